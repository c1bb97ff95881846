"""Single damages: a sector or a block is zeroed, filled with garbage or replaced; a file is cut or missing.

This file only changes files of a copied data directory. `judge.py` decides what a damage may cost.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.log.damage_matrix.worlds import Place, World

UNITS = (512, 4096)

CONTENTS = ("zeros", "garbage", "other file", "other place")
"""Content of the block after the damage. The last two are intact blocks in the wrong place."""

KINDS = {
    "journal": ("journal/", ".journal"),
    "segment": ("segments/", ".log"),
    "index": ("segments/", ".idx"),
    "staged": ("staged/", ""),
    "catalogue": ("catalogue.sqlite", "catalogue.sqlite"),
    "wal": ("catalogue.sqlite-wal", "-wal"),
    "shm": ("catalogue.sqlite-shm", "-shm"),
    "backup": ("catalogue.backup.sqlite", ".sqlite"),
    "lock": ("lock", "lock"),
}

WHOLE = 1 << 62
"""End position that is greater than the size of any file."""


class Damage(NamedTuple):
    """One damage to one file; `apply` does it."""

    file: str
    kind: str
    what: str
    """One of `CONTENTS`, or `flip`, `missing` or `cut`; `unreadable` is done by `unreadable.py`."""
    position: int
    length: int

    @property
    def place(self) -> Place:
        return Place(self.file, self.position, self.position + self.length)

    def __str__(self) -> str:
        where = f" at {self.position}" if self.length != WHOLE or self.position else ""
        size = f" {self.length}" if self.length != WHOLE else ""
        return f"{self.file}:{where}{size} {self.what}"

    def apply(self, root: Path) -> bool:
        """Damage the file. Return False if that changes nothing."""
        path = root / self.file
        data = path.read_bytes()
        if self.what == "missing":
            path.unlink()
            return True
        if self.what == "cut":
            path.write_bytes(data[: self.position])
            return self.position < len(data)
        end = min(self.position + self.length, len(data))
        block = self._content(root, data, end - self.position)
        if block is None or block == data[self.position : end]:
            return False
        path.write_bytes(data[: self.position] + block + data[end:])
        return True

    def _content(self, root: Path, data: bytes, length: int) -> bytes | None:
        if self.what == "zeros":
            return bytes(length)
        if self.what == "flip":
            return bytes([data[self.position] ^ 1 << self.position % 8])
        if self.what == "garbage":
            return random.Random(f"{self.file} {self.position}").randbytes(length)
        if self.what == "other place":
            # Take a neighbour rather than a distant block: then both blocks are in use, or neither is.
            before = self.position - self.length
            at = before if before >= 0 else self.position + self.length
            return _exactly(data[at : at + length], length)
        for other in _like(root, self):
            block = other.read_bytes()[self.position : self.position + length]
            if len(block) == length and block != data[self.position : self.position + length]:
                return block
        return None


def kind_of(file: str) -> str:
    for kind, (prefix, suffix) in KINDS.items():
        if file.startswith(prefix) and file.endswith(suffix):
            return kind
    raise ValueError(f"a file of no known kind: {file}")


def damages(world: World) -> Iterator[Damage]:
    """Yield every damage to every file."""
    for file in world.data_files():
        yield from damages_of(world, file)


def damages_of(world: World, file: str) -> Iterator[Damage]:
    kind = kind_of(file)
    size = (world.path / file).stat().st_size
    yield Damage(file, kind, "missing", 0, WHOLE)
    if kind == "journal":
        yield Damage(file, kind, "zeros", 0, WHOLE)
    for position in range(0, size, UNITS[-1]):
        yield Damage(file, kind, "cut", position, WHOLE)
    for unit in UNITS:
        for position in range(0, size, unit):
            for what in CONTENTS:
                yield Damage(file, kind, what, position, unit)


def _like(root: Path, damage: Damage) -> list[Path]:
    """Return the other files of the same kind, beginning with the next one."""
    found = sorted(
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and kind_of(str(path.relative_to(root))) == damage.kind
    )
    if damage.kind in ("catalogue", "backup"):
        found = ["catalogue.sqlite", "catalogue.backup.sqlite"]
    at = found.index(damage.file)
    names = [*found[at + 1 :], *found[:at]]
    return [root / name for name in names if (root / name).exists()]


def _exactly(block: bytes, length: int) -> bytes | None:
    return block if len(block) == length else None
