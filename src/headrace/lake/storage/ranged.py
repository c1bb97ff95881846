"""An object as a file for Arrow, with few requests for the footer and the columns of a Parquet file."""

import os
from collections.abc import Callable

TAIL_BYTES = 256 << 10
"""Size of the end of an object that is fetched when it is opened. Most footers are smaller."""

AHEAD_BYTES = 1 << 20
"""Least size of other requests. Small columns are near each other, so that one request fetches several."""

Fetch = Callable[[int, int], memoryview]
"""Fetches the bytes of an object between two positions."""


class RangedFile:
    """The part of a Python file that `pyarrow.PythonFile` uses. Arrow copies nothing that `read` returns."""

    closed = False

    def __init__(self, fetch: Fetch, size: int, tail: memoryview) -> None:
        self._fetch, self._size, self._position = fetch, size, 0
        self._tail_start, self._tail = size - len(tail), tail
        self._ahead_start, self._ahead = 0, memoryview(b"")

    def read(self, size: int = -1) -> memoryview:
        start = min(self._position, self._size)
        end = self._size if size < 0 else min(start + size, self._size)
        self._position = end
        if start >= self._tail_start:
            return self._tail[start - self._tail_start : end - self._tail_start]
        if end - start >= AHEAD_BYTES:
            return self._fetch(start, end)
        if not self._ahead_start <= start <= end <= self._ahead_start + len(self._ahead):
            self._ahead_start = start
            self._ahead = self._fetch(start, min(start + AHEAD_BYTES, self._size))
        return self._ahead[start - self._ahead_start : end - self._ahead_start]

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        self.closed = True
