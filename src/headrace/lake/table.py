"""What the jobs ask of a table, whatever its format; opens one, or refuses a directory of something else."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from headrace.lake.format import LakeError
from headrace.lake.manifests import HIDDEN
from headrace.lake.writing import Written

FORMATS = ("delta",)


class Table(Protocol):
    by_topic: bool
    """Partitioned by topic and date, not by date alone."""

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

    def sweep(self, after_s: float, *, dry_run: bool) -> int:
        """Delete files of ours that the table has not named for so long, or only count them."""

    def sync(self) -> None:
        """All that is committed is on disk when this returns."""


def find_table(lake: Path, kind: str, *, by_topic: bool) -> Table | None:
    """The table of a lake, or None where one can be made. Changes nothing."""
    if kind not in FORMATS:
        raise LakeError(f"there is no format {kind!r} of lakes: there is {', '.join(FORMATS)}")
    if not lake.exists():
        return None
    if not lake.is_dir():
        raise LakeError(f"{lake} is no directory: name a new or an empty one")
    from headrace.lake.delta import LOG, DeltaLake

    found = DeltaLake.open(lake)
    # A lake that was left while it was made has a part of these.
    others = sorted({path.name for path in lake.iterdir()} - {HIDDEN, LOG})
    if found is None and others:
        raise not_ours(lake, others[0])
    if found is not None and found.by_topic != by_topic:
        raise LakeError(
            f"{lake} is partitioned by topic and date: give --by-topic, or name another directory"
            if found.by_topic
            else f"{lake} is partitioned by date alone: leave out --by-topic, or name another directory"
        )
    return found


def open_table(lake: Path) -> Table:
    """The table of a lake that is there. Changes nothing."""
    if not lake.is_dir():
        what = "it is no directory" if lake.exists() else "there is no such directory"
        raise LakeError(f"{lake} is no lake of Headrace: {what}")
    from headrace.lake.delta import DeltaLake

    found = DeltaLake.open(lake)
    if found is None:
        others = sorted(path.name for path in lake.iterdir())
        if others and HIDDEN not in others:
            raise not_ours(lake, others[0])
        raise LakeError(f"{lake} is no lake of Headrace: there is no table in it")
    return found


def make_table(lake: Path, kind: str, *, by_topic: bool) -> Table:
    """A new one, in a directory that `find_table` has found none in."""
    from headrace.lake.delta import DeltaLake

    assert kind in FORMATS
    return DeltaLake.make(lake, by_topic=by_topic)


def not_ours(lake: Path, name: str) -> LakeError:
    return LakeError(
        f"{lake} holds something else than a lake of Headrace ({name}): name a new or an empty directory"
    )
