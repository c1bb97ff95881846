"""The quarantine: keeps damaged data for inspection by people. The log never reads it again."""

import contextlib
import os
import time
from pathlib import Path

from crc32c import crc32c

from headrace.log.disk import Disk, read_patiently
from headrace.log.layout import Layout
from headrace.log.recovery.frames import Problem


def quarantine(layout: Layout, path: Path, problem: Problem) -> None:
    """Copy the damaged part of a journal file before the file is recycled."""
    layout.quarantine.mkdir(exist_ok=True)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        damaged, _ = read_patiently(fd, problem.length, problem.position)
    finally:
        os.close(fd)
    # The same bytes get the same name, so that an applier that retries keeps them once.
    name = f"journal-{path.stem}-{problem.position}-{crc32c(damaged):08x}.bin"
    (layout.quarantine / name).write_bytes(damaged)


def quarantine_journal(layout: Layout, disk: Disk, path: Path) -> None:
    """Move a journal file to the quarantine: a new file is made in its place."""
    layout.quarantine.mkdir(exist_ok=True)
    disk.rename(path, layout.quarantine / f"journal-{int(time.time() * 1000)}-{path.name}")
    disk.sync_directory(layout.quarantine)
    disk.sync_directory(layout.journal)


def quarantine_file(layout: Layout, path: Path) -> None:
    """Keep a file that will be deleted, under another name; takes no extra room before the deletion."""
    layout.quarantine.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError, FileNotFoundError):
        os.link(path, layout.quarantine / f"staged-{path.name}.bin")
