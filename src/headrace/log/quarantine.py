"""Keeps what is damaged for whoever may want to look at it: nothing here is ever read again by the log."""

import contextlib
import os
import time
from pathlib import Path

from headrace.log.journal import Problem
from headrace.log.layout import Layout


def quarantine(layout: Layout, path: Path, problem: Problem) -> None:
    """Copy the damaged part of a journal file, which will be recycled."""
    layout.quarantine.mkdir(exist_ok=True)
    with path.open("rb") as file:
        file.seek(problem.position)
        damaged = file.read(problem.length)
    name = f"journal-{int(time.time() * 1000)}-{path.stem}-{problem.position}.bin"
    (layout.quarantine / name).write_bytes(damaged)


def quarantine_file(layout: Layout, path: Path) -> None:
    """Keep a file that will be deleted under another name; it takes no room of its own until then."""
    layout.quarantine.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError, FileNotFoundError):
        os.link(path, layout.quarantine / f"staged-{path.name}.bin")
