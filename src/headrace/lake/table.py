"""The interface that jobs use for a table of any format, functions that open or create one, and their lock.

A directory with other content is refused. One job of each kind changes a lake at a time, among those that
share the storage.
"""

import fcntl
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self

from headrace.lake.columns import columns_text
from headrace.lake.files.writing import Bounds, FileLayout, WrittenFile
from headrace.lake.format import LakeError, Oddity, Shape, check_path, not_ours
from headrace.lake.manifests import HIDDEN

FORMATS = ("delta", "parquet", "iceberg")
AUTO = "auto"
"""The format of an existing lake, or the first of `FORMATS` for a new one."""


class Table(Protocol):
    kind: str
    """One of `FORMATS`."""
    layout: FileLayout
    shape: Shape

    @property
    def id(self) -> str:
        """Identity of the table, which does not depend on its location."""

    def last(self, app: str) -> int | None:
        """Return the last number that this application has committed."""

    def commit(
        self,
        app: str,
        number: int,
        files: Sequence[WrittenFile],
        notes: Mapping[str, str],
        *,
        replaced: Collection[str] = (),
    ) -> bool:
        """Add files to the table, all at once and once for this number.

        With `replaced`, the new files hold the rows of those files, which the same step removes; the commit
        is not a batch then. Return False, without any change, if the number is already committed or one of
        `replaced` is no longer in the table.
        """

    def notes(self, number: int) -> Mapping[str, str] | None:
        """Return the notes in the commit of a batch; None if the table no longer has that commit."""

    def all_notes(self) -> list[tuple[int, Mapping[str, str]]]:
        """Return number and notes of every batch whose commit the table still has."""

    def files(self) -> dict[str, int]:
        """Return the current files of the table, as paths below its directory, with their sizes."""

    def files_of(self, topic: str, offset: int) -> list[str]:
        """Return the files that may hold records of a topic at or after an offset, perhaps with others."""

    def bounds(self) -> dict[str, Bounds]:
        """Return the table's statistics of each file, by which readers skip files."""

    def oddities(self) -> Iterable[Oddity]:
        """Return differences from the table as it was made, which readers without Headrace would notice."""

    def shown(self, path: str) -> str:
        """Return the name of a file for readers that list directories instead of using the table.

        It is usually the file's own name.
        """

    def sweep(self, after_s: float, *, dry_run: bool) -> int:
        """Delete our files that the table has not named for `after_s` seconds, or only count them."""

    def sync(self) -> None:
        """Make all commits durable and visible for all readers before returning."""


def find_table(lake: Path, kind: str, shape: Shape, *, any_partition: bool = False) -> Table | None:
    """Return the table of a lake; None if one can be created. Changes nothing."""
    if kind not in (AUTO, *FORMATS):
        raise LakeError(f"unknown lake format {kind!r}: use one of {', '.join(FORMATS)}")
    _class_of(kind)  # raises if its packages are missing
    check_path(lake)
    if not lake.exists():
        return None
    if not lake.is_dir():
        raise LakeError(f"{lake} is not a directory: name a new or an empty one")
    found = _find(lake)
    others = {path.name for path in lake.iterdir()} - _left_of_making(lake)
    if found is None and others:
        raise not_ours(lake, min(others))
    if found is not None:
        if kind not in (AUTO, found.kind):
            raise LakeError(
                f"{lake} is a lake of the format {found.kind}: give --format {found.kind}, or name another "
                "directory"
            )
        _check_shape(lake, found.shape, shape, any_partition=any_partition)
    return found


def _check_shape(lake: Path, found: Shape, wanted: Shape, *, any_partition: bool) -> None:
    if not any_partition and found.by_topic != wanted.by_topic:
        raise LakeError(
            f"{lake} is partitioned by topic and date: give --by-topic, or name another directory"
            if found.by_topic
            else f"{lake} is partitioned by date alone: leave out --by-topic, or name another directory"
        )
    if wanted.decode and wanted[1:] != found[1:]:
        what = (
            f"has the columns {columns_text(found.decoded)!r} of {found.decode}"
            if found.decode
            else "has no decoded columns"
        )
        raise LakeError(f"{lake} {what}: leave out --decode, or name another directory")


def open_table(lake: Path) -> Table:
    """Return the table of an existing lake. Changes nothing."""
    check_path(lake)
    if not lake.is_dir():
        what = "it is not a directory" if lake.exists() else "there is no such directory"
        raise LakeError(f"{lake} is not a lake of Headrace: {what}")
    found = _find(lake)
    if found is None:
        others = sorted(path.name for path in lake.iterdir())
        if others and HIDDEN not in others:
            raise not_ours(lake, others[0])
        raise LakeError(f"{lake} is not a lake of Headrace: there is no table in it")
    return found


def make_table(lake: Path, kind: str, shape: Shape) -> Table:
    """Create a table in a directory where `find_table` has returned None."""
    return _class_of(kind).make(lake, shape)


class _Kind(Protocol):
    def open(self, lake: Path) -> Table | None:
        """Return the table; None if there is none of this kind, or if its creation was interrupted."""

    def make(self, lake: Path, shape: Shape) -> Table: ...


_MARKS = {"delta": "_delta_log", "parquet": f"{HIDDEN}/files.db", "iceberg": f"{HIDDEN}/catalog.db"}
"""File or directory that shows that a table of each kind exists."""


def _find(lake: Path) -> Table | None:
    kinds = (kind for kind, mark in _MARKS.items() if (lake / mark).exists())
    return next((found for kind in kinds if (found := _class_of(kind).open(lake))), None)


def _left_of_making(lake: Path) -> set[str]:
    """Return the names that an interrupted creation may have left in a lake."""
    found = {HIDDEN, _MARKS["delta"]}
    return found | {"metadata"} if (lake / _MARKS["iceberg"]).exists() else found


def _class_of(kind: str) -> _Kind:
    """Import the format only when it is used, because its packages may not be installed."""
    if kind == "iceberg":
        try:
            from headrace.lake.formats.iceberg import IcebergLake
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("headrace"):
                raise
            raise LakeError(
                f"this needs: pip install 'headrace[iceberg]' ({error.name} is missing)"
            ) from None
        return IcebergLake
    if kind == "parquet":
        from headrace.lake.formats.parquet import ParquetLake

        return ParquetLake
    from headrace.lake.formats.delta import DeltaLake

    return DeltaLake


class Lock:
    """Lock that is held until the `with` block ends, or until the process ends in any way."""

    def __init__(self, directory: Path, job: str) -> None:
        self._lake = directory.parent
        self._job = job
        self._fd = os.open(directory / f"lock-{job}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def __enter__(self) -> Self:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 20, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            raise LakeError(
                f"another {self._job} writes to {self._lake} (process {holder or 'unknown'})"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, b"%d\n" % os.getpid(), 0)
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)
