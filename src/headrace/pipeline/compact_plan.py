"""Which files of a lake become one: small ones of a partition that batches wrote after each other. Pure."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from headrace.lake.sorted_file import NAME

FILES_MAX = 500
"""Files that one task reads: all of them are open at a time."""

_NAME = re.compile(NAME)


class Bin(NamedTuple):
    """Files of one partition that become one, in the order in which they were exported."""

    files: tuple[str, ...]
    bytes: int

    @property
    def directory(self) -> str:
        return self.files[0].rpartition("/")[0]


def bins(files: Mapping[str, int], file_bytes: int) -> list[Bin]:
    """`files` with their sizes. Those of half the size or more are left alone, and so is one that is alone.

    Files are taken as they follow each other, so that what is next to each other in the log is in one file.
    """
    small = sorted((path for path, size in files.items() if 2 * size < file_bytes), key=_place)
    found: list[Bin] = []
    gathered: list[str] = []
    size = 0
    for path in [*small, ""]:
        is_full = size + files.get(path, 0) > file_bytes or len(gathered) == FILES_MAX
        if gathered and (is_full or path.rpartition("/")[0] != gathered[0].rpartition("/")[0]):
            if len(gathered) > 1:
                found.append(Bin(tuple(gathered), size))
            gathered, size = [], 0
        gathered.append(path)
        size += files.get(path, 0)
    return found


def name_after(path: str, unique: str) -> str:
    """The name of the file that others become, of which this is the first: it has its place among them."""
    _, number, task, _ = _place(path)
    return f"c{number:08}-{unique}-{task:04}"


def _place(path: str) -> tuple[str, int, int, str]:
    """By partition, batch and task."""
    directory, _, name = path.rpartition("/")
    found = _NAME.fullmatch(name)
    number, task = (int(found[1]), int(found[2])) if found else (0, 0)
    return directory, number, task, name
