"""The interface that jobs use for a table of any format, and functions that open or create one.

A place with other content is refused.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from headrace.lake.columns import columns_text
from headrace.lake.files.writing import Bounds, FileLayout, WrittenFile
from headrace.lake.format import Committed, LakeError, Oddity, Shape, not_ours
from headrace.lake.storage.storage import HIDDEN, DirectoryStorage, Storage, directory_of

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

    def last(self, app: str) -> Committed | None:
        """Return the last commit of this application, as long as the table exists."""

    def commit(
        self,
        app: str,
        number: int,
        files: Sequence[WrittenFile],
        token: int,
        *,
        replaced: Collection[str] = (),
    ) -> bool:
        """Add files to the table, all at once and once for this number.

        With `replaced`, the new files hold the rows of those files, which the same step removes. Return True
        if the number is committed with this token, also if an earlier attempt did that. Return False, without
        any change, if another commit has the number or one of `replaced` is no longer in the table.
        """

    def files(self) -> dict[str, int]:
        """Return the current files of the table, as paths below its place, with their sizes."""

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


def find_table(
    storage: Storage, kind: str, shape: Shape, *, any_partition: bool = False
) -> Table | None:
    """Return the table of a lake; None if one can be created. Changes nothing."""
    if kind not in (AUTO, *FORMATS):
        raise LakeError(f"unknown lake format {kind!r}: use one of {', '.join(FORMATS)}")
    _class_of(kind)  # raises if its packages are missing
    if kind == "parquet":
        directory_of(storage, "a lake of plain Parquet files")
    found = _find(storage) if storage.exists() else None
    if found is None:
        _check_catalog(storage, kind)
        others = storage.top() - _left_of_making(storage) if storage.exists() else set()
        if others:
            raise not_ours(storage.address, min(others))
        return None
    if kind not in (AUTO, found.kind):
        raise LakeError(
            f"{storage.address} is a lake of the format {found.kind}: give --format {found.kind}, or "
            "name another directory"
        )
    _check_shape(storage.address, found.shape, shape, any_partition=any_partition)
    return found


def _check_shape(lake: str, found: Shape, wanted: Shape, *, any_partition: bool) -> None:
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


def open_table(storage: Storage) -> Table:
    """Return the table of an existing lake. Changes nothing."""
    if not storage.exists():
        raise LakeError(f"{storage.address} is not a lake of Headrace: it does not exist")
    found = _find(storage)
    if found is None:
        others = storage.top()
        if others and HIDDEN not in others:
            raise not_ours(storage.address, min(others))
        raise LakeError(f"{storage.address} is not a lake of Headrace: there is no table in it")
    return found


def make_table(storage: Storage, kind: str, shape: Shape) -> Table:
    """Create a table in a place where `find_table` has returned None."""
    _class_of(kind).make(storage, shape)
    made = find_table(storage, kind, shape)  # another process may have created another one first
    assert made is not None
    made.sync()
    return made


class _Kind(Protocol):
    def open(self, storage: Storage) -> Table | None:
        """Return the table; None if there is none of this kind, or if its creation was interrupted."""

    def make(self, storage: Storage, shape: Shape) -> None:
        """Create the table, unless another process has created it."""


_MARKS = {
    "_delta_log": "delta",
    f"{HIDDEN}/files.db": "parquet",
    f"{HIDDEN}/catalog.db": "iceberg",
    f"{HIDDEN}/iceberg.json": "iceberg",
}
"""Files or directories that show that a table exists, and its kind."""


def _find(storage: Storage) -> Table | None:
    kinds = (kind for mark, kind in _MARKS.items() if storage.has(mark))
    return next((found for kind in kinds if (found := _class_of(kind).open(storage))), None)


def _check_catalog(storage: Storage, kind: str) -> None:
    """Raise LakeError unless a new table of this kind can be created with or without a catalogue."""
    if kind == "iceberg" and not storage.catalog and not isinstance(storage, DirectoryStorage):
        raise LakeError(
            f"{storage.address} needs a catalogue for an Iceberg table: give one with --catalog-option, such "
            "as uri=https://host, or leave out --format iceberg"
        )
    if kind != "iceberg" and storage.catalog:
        raise LakeError(
            f"{storage.address} would be a lake without a catalogue: give --format iceberg, or leave out "
            "--catalog-option"
        )


def _left_of_making(storage: Storage) -> set[str]:
    """Return the names that an interrupted creation may have left in a lake."""
    found = {HIDDEN, "_delta_log"}
    has_metadata = storage.catalog or storage.has(f"{HIDDEN}/catalog.db")
    return found | {"metadata"} if has_metadata else found


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
