"""What the jobs ask of a table, whatever its format; opens one, or refuses a directory of something else."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from headrace.lake.columns import columns_text
from headrace.lake.format import LakeError, Oddity, Shape, check_path
from headrace.lake.manifests import HIDDEN
from headrace.lake.writing import Bounds, Layout, Written

FORMATS = ("delta", "parquet", "iceberg")
AUTO = "auto"
"""The format that a lake has, or the first of them for a new one."""


class Table(Protocol):
    kind: str
    """One of `FORMATS`."""
    layout: Layout
    shape: Shape

    @property
    def id(self) -> str:
        """What tells this table from all others, wherever it lies."""

    def last(self, app: str) -> int | None:
        """The last number that this application has committed."""

    def commit(
        self,
        app: str,
        number: int,
        files: Sequence[Written],
        notes: Mapping[str, str],
        *,
        replaced: Collection[str] = (),
    ) -> bool:
        """Add files to the table, all at once and once for this number.

        With `replaced` they hold the rows of files that go out of it in the same step; it is no batch then.
        False when the number was committed before, or one of these is there no more: nothing has changed.
        """

    def notes(self, number: int) -> Mapping[str, str] | None:
        """What the commit of a batch has noted; None when the table remembers no such commit."""

    def all_notes(self) -> list[tuple[int, Mapping[str, str]]]:
        """Each number and what its commit has noted, of all commits that the table still remembers."""

    def files(self) -> dict[str, int]:
        """The files that the table is made of now, below its directory, with their sizes."""

    def files_of(self, topic: str, offset: int) -> list[str]:
        """Those that may hold records of a topic at or behind an offset, and some others."""

    def bounds(self) -> dict[str, Bounds]:
        """What the table says of each of its files: by this, those who look for something leave files out."""

    def oddities(self) -> Iterable[Oddity]:
        """What is not as it was made, for those who read the table without us."""

    def shown(self, path: str) -> str:
        """The name by which those know a file who look for files and ask no table: mostly its own."""

    def sweep(self, after_s: float, *, dry_run: bool) -> int:
        """Delete files of ours that the table has not named for so long, or only count them."""

    def sync(self) -> None:
        """All that is committed is on disk, and there for all readers, when this returns."""


def find_table(lake: Path, kind: str, shape: Shape, *, any_partition: bool = False) -> Table | None:
    """The table of a lake, or None where one can be made. Changes nothing."""
    if kind not in (AUTO, *FORMATS):
        raise LakeError(f"there is no format {kind!r} of lakes: there is {', '.join(FORMATS)}")
    _class_of(kind)  # or says what is missing for it
    check_path(lake)
    if not lake.exists():
        return None
    if not lake.is_dir():
        raise LakeError(f"{lake} is no directory: name a new or an empty one")
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
    """The table of a lake that is there. Changes nothing."""
    check_path(lake)
    if not lake.is_dir():
        what = "it is no directory" if lake.exists() else "there is no such directory"
        raise LakeError(f"{lake} is no lake of Headrace: {what}")
    found = _find(lake)
    if found is None:
        others = sorted(path.name for path in lake.iterdir())
        if others and HIDDEN not in others:
            raise not_ours(lake, others[0])
        raise LakeError(f"{lake} is no lake of Headrace: there is no table in it")
    return found


def make_table(lake: Path, kind: str, shape: Shape) -> Table:
    """A new one, in a directory that `find_table` has found none in."""
    return _class_of(kind).make(lake, shape)


class _Kind(Protocol):
    def open(self, lake: Path) -> Table | None:
        """None where there is none of its kind, or where it was left while it was made."""

    def make(self, lake: Path, shape: Shape) -> Table: ...


_MARKS = {"delta": "_delta_log", "parquet": f"{HIDDEN}/files.db", "iceberg": f"{HIDDEN}/catalog.db"}
"""What is there where there is a table of a kind."""


def _find(lake: Path) -> Table | None:
    kinds = (kind for kind, mark in _MARKS.items() if (lake / mark).exists())
    return next((found for kind in kinds if (found := _class_of(kind).open(lake))), None)


def _left_of_making(lake: Path) -> set[str]:
    """What a lake may have that was left while it was made."""
    found = {HIDDEN, _MARKS["delta"]}
    return found | {"metadata"} if (lake / _MARKS["iceberg"]).exists() else found


def _class_of(kind: str) -> _Kind:
    """Imported where it is needed: not all that they need is there."""
    if kind == "iceberg":
        try:
            from headrace.lake.iceberg import IcebergLake
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("headrace"):
                raise
            raise LakeError(
                f"this needs: pip install 'headrace[iceberg]' ({error.name} is missing)"
            ) from None
        return IcebergLake
    if kind == "parquet":
        from headrace.lake.parquet import ParquetLake

        return ParquetLake
    from headrace.lake.delta import DeltaLake

    return DeltaLake


def not_ours(lake: Path, name: str) -> LakeError:
    return LakeError(
        f"{lake} holds something else than a lake of Headrace ({name}): name a new or an empty directory"
    )
