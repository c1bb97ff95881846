"""Copies the files that a catalogue names to another directory, as far as the catalogue says they reach.

Segments and indexes only ever grow, so a file that was copied before is continued where its copy ends.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.log.catalogue_rows import BatchRow, SegmentRow
from headrace.log.disk import Disk
from headrace.log.entries import StagedFiles
from headrace.log.file_reads import read_patiently
from headrace.log.index import row_position
from headrace.log.layout import Layout

Progress = Callable[[int, int], None]
"""Is told how many bytes are done, and how many there are."""

_BLOCK_BYTES = 1 << 20

_LARGE_BYTES = 1 << 20
"""Files of this size are synced one by one, so that a server on the same disk never waits for all at once."""


class NamedFile(NamedTuple):
    """A file and how much of it counts."""

    path: Path
    """Relative to the data directory."""
    size: int


def named_files(
    layout: Layout, segments: Iterable[SegmentRow], batches: Iterable[BatchRow]
) -> Iterator[NamedFile]:
    """The files that rows of the catalogue stand for."""
    for row in segments:
        log = layout.segment(row.topic_id, row.base).relative_to(layout.root)
        yield NamedFile(log, row.end - row.base)
        yield NamedFile(log.with_suffix(".idx"), row_position(row.rows))
    for batch in batches:
        for file in msgspec.msgpack.decode(batch.staged, type=StagedFiles):
            path = layout.staged_file(file.id.hex()).relative_to(layout.root)
            yield NamedFile(path, file.size)


class FileCopy:
    """Files of one directory, copied to another."""

    def __init__(self, source: Path, target: Path, disk: Disk, progress: Progress | None) -> None:
        self._source = source
        self._target = target
        self._disk = disk
        self._progress = progress
        self._sizes: dict[Path, int] = {}
        """What the target has of each file."""
        self._done = self._total = 0

    def missing_bytes(self, files: Iterable[NamedFile]) -> int:
        return sum(max(0, file.size - self._sizes.get(file.path, 0)) for file in files)

    def take(self, files: list[NamedFile]) -> list[NamedFile]:
        """Copy what is missing; returns the files that are no longer there."""
        self._total = self._done + self.missing_bytes(files)
        gone = []
        for file in files:
            if self._sizes.get(file.path, -1) < file.size:
                try:
                    self._copy(file)
                except FileNotFoundError:
                    gone.append(file)
        return gone

    def keep_only(self, files: Iterable[NamedFile]) -> None:
        """Delete the copies of files that the source has given up meanwhile."""
        for path in self._sizes.keys() - {file.path for file in files}:
            self._disk.unlink(self._target / path)

    def _copy(self, file: NamedFile) -> None:
        position = self._sizes.get(file.path, 0)
        source = os.open(self._source / file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            target = self._disk.open(self._target / file.path, create=True)
            try:
                while position < file.size:
                    wanted = min(_BLOCK_BYTES, file.size - position)
                    # Pages that cannot be read are zeros in the copy: `verify` says what they cost.
                    block, _ = read_patiently(source, wanted, position)
                    if not block:
                        break
                    self._disk.write(target, [block], position)
                    position += len(block)
                    self._advance(len(block))
                if position >= _LARGE_BYTES:
                    self._disk.sync(target)
            finally:
                self._disk.close(target)
        finally:
            os.close(source)
        self._sizes[file.path] = file.size

    def _advance(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)
