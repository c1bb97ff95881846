"""A lake of plain Parquet files: whoever takes all of its directory has every row once, and needs no table.

Files are written under names that nobody takes for Parquet. One that is committed gets a second name that all
can see. When it is replaced, that name goes before the file with its rows gets one: who looks in between
misses rows, nobody ever sees one twice. What a killed job has left is found by comparing these names with
what is committed, and mended by the next job that writes. Our own readers use the first names, which stay for
a while.
"""

import os
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from headrace.lake.format import LakeError, Oddity, Shape
from headrace.lake.manifests import HIDDEN
from headrace.lake.registry import Registry
from headrace.lake.sorted_file import DATED
from headrace.lake.syncing import is_older, make_directory, sync
from headrace.lake.writing import Bounds, Layout, Written

MARK = f"{HIDDEN}/files.db"

_OURS = re.compile(rf"{HIDDEN}/files/(t-[0-9a-f]{{16}}/)?{DATED}")
"""First names of files that are written here."""


class ParquetLake:
    """Implements `table.Table`."""

    kind = "parquet"
    layout = Layout(f"{HIDDEN}/files/", ".data", has_topic=True)

    def __init__(self, lake: Path, shape: Shape) -> None:
        self._lake, self.shape = lake, shape
        self._registry = Registry(lake / MARK)

    @classmethod
    def open(cls, lake: Path) -> Self | None:
        shape = Registry(lake / MARK).shape()
        return cls(lake, shape) if shape is not None else None

    @classmethod
    def make(cls, lake: Path, shape: Shape) -> Self:
        make_directory(lake / HIDDEN)
        Registry(lake / MARK).make(shape)
        sync(lake / HIDDEN)
        return cls(lake, shape)

    @property
    def id(self) -> str:
        return self._registry.id()

    def last(self, app: str) -> int | None:
        return self._registry.last(app)

    def commit(
        self,
        app: str,
        number: int,
        files: Sequence[Written],
        notes: Mapping[str, str],
        *,
        replaced: Collection[str] = (),
    ) -> bool:
        if not self._registry.commit(app, number, files, notes, replaced):
            return False
        changed = [*(one.path for one in files), *replaced]
        self._show({_directory(self.shown(path)) for path in changed})
        return True

    def notes(self, number: int) -> Mapping[str, str] | None:
        return self._registry.notes(number)

    def all_notes(self) -> list[tuple[int, Mapping[str, str]]]:
        return self._registry.all_notes()

    def files(self) -> dict[str, int]:
        return self._registry.files()

    def files_of(self, topic: str, offset: int) -> list[str]:
        return self._registry.files_of(topic, offset)

    def bounds(self) -> dict[str, Bounds]:
        return self._registry.bounds()

    def oddities(self) -> list[Oddity]:
        live = {self.shown(path) for path in self.files()}
        every = (str(path.relative_to(self._lake)) for path in self._lake.rglob("*.parquet"))
        others = sorted(name for name in every if name not in live and not self._is_ours(name))
        if not others:
            return []
        reason = "it is no file of the lake, but whoever takes all files of it reads its rows, too"
        if len(others) > 1:
            reason = f"{reason}; there are {len(others)} of them"
        return [Oddity("note", others[0], reason)]

    def shown(self, path: str) -> str:
        # Dates come first: else Spark would take the directory of each topic for a table.
        *directories, name = path.removeprefix(self.layout.directory).split("/")
        return "/".join([*reversed(directories), f"{name.removesuffix('.data')}.parquet"])

    def sweep(self, after_s: float, *, dry_run: bool) -> int:
        live = self.files()
        until = time.time() - after_s
        old = [
            path
            for path in (self._lake / self.layout.directory).rglob("*.data")
            if _OURS.fullmatch(name := str(path.relative_to(self._lake)))
            and name not in live
            and is_older(path, until)
        ]
        for path in old if not dry_run else ():
            path.unlink(missing_ok=True)
        return len(old)

    def sync(self) -> None:
        self._show()

    # What is in sight

    def _show(self, only: Collection[str] | None = None) -> None:
        """What is committed and nothing else, in all directories or in these."""
        with self._registry.alone():
            live = {self.shown(path): path for path in self.files()}
            wanted = {name for name in live if only is None or _directory(name) in only}
            found = set(self._in_sight(only))
            hidden = {name for name in found - wanted if self._is_ours(name)}
            shown = wanted - found
            for name in hidden:
                self._hide(name)
            for name in shown:
                self._link(live[name], name)
            for directory in {_directory(name) for name in hidden | shown}:
                sync(self._lake / directory)

    def _in_sight(self, only: Collection[str] | None) -> Iterator[str]:
        every = self._lake.glob("date=*/t-*" if self.shape.by_topic else "date=*")
        for directory in every if only is None else map(self._lake.joinpath, only):
            if directory.is_dir():
                yield from (str(path.relative_to(self._lake)) for path in directory.iterdir())

    def _is_ours(self, name: str) -> bool:
        """Whether a name in sight is the second one of a file, and so none of others."""
        path = self._first_name(name)
        return _OURS.fullmatch(path) is not None and (self._lake / path).exists()

    def _hide(self, name: str) -> None:
        with suppress(FileNotFoundError, PermissionError):
            # Whoever sweeps counts from now on.
            os.utime(self._lake / self._first_name(name))
        (self._lake / name).unlink(missing_ok=True)

    def _first_name(self, name: str) -> str:
        *directories, name = name.split("/")
        path = "/".join([*reversed(directories), f"{name.removesuffix('.parquet')}.data"])
        return f"{self.layout.directory}{path}"

    def _link(self, path: str, name: str) -> None:
        make_directory((self._lake / name).parent)
        try:
            (self._lake / name).hardlink_to(self._lake / path)
        except FileNotFoundError:
            raise LakeError(
                f"{self._lake / path} is missing, which the table names: restore it"
            ) from None
        except OSError as error:
            raise LakeError(f"{self._lake / name} cannot be made: {error.strerror}") from None


def _directory(name: str) -> str:
    return name.rpartition("/")[0]
