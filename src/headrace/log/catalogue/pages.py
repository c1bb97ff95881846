"""Rows of a damaged catalogue, read page by page without SQLite. Writes nothing.

SQLite finds rows through other pages, so one bad page can hide a whole table. This reader looks at every page
alone: a bad page costs its own rows and no others. A row counts if its checksum is correct. Pages that SQLite
has freed may still hold replaced rows: of several rows with the same key, the newest counts.

The format is SQLite's: https://www.sqlite.org/fileformat2.html
"""

import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from headrace.log.catalogue.rows import TABLES, R, checksum, row_key
from headrace.log.disk import load

_PAGE_BYTES = 4096
"""Page size: SQLite's default, which the catalogue uses."""
_FILE_HEADER_BYTES = 100
_TABLE_LEAF, _INDEX_LEAF, _INDEX_INTERIOR = 0x0D, 0x0A, 0x02
_PAGE_HEADER = struct.Struct(">BHHHB")
_INTEGER_BYTES = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}
_NUMBER = struct.Struct(">I")

Value = int | bytes | None


class Pages:
    """The rows that can be found in a catalogue's file."""

    def __init__(self, path: Path) -> None:
        self._data = load(path).data
        found: dict[type, dict[object, object]] = {kind: {} for kind in TABLES}
        for values in self._records():
            for kind in TABLES:
                row = _row(kind, values)
                if row is not None:
                    known = found[kind].setdefault(row_key(row), row)
                    if _age(row) > _age(known):
                        found[kind][row_key(row)] = row
        self._found = found

    def rows(self, kind: type[R]) -> list[R]:
        return list(self._found[kind].values())  # type: ignore[arg-type]

    def _records(self) -> Iterator[list[Value]]:
        for begin in range(0, len(self._data) - _PAGE_BYTES + 1, _PAGE_BYTES):
            header = begin + (_FILE_HEADER_BYTES if begin == 0 else 0)
            kind, _, cells, _, _ = _PAGE_HEADER.unpack_from(self._data, header)
            if kind not in (_TABLE_LEAF, _INDEX_LEAF, _INDEX_INTERIOR):
                continue
            pointers = header + (12 if kind == _INDEX_INTERIOR else 8)
            for number in range(min(cells, _PAGE_BYTES // 4)):
                # A bad page may contain anything: a cell that is not a valid record is skipped.
                with suppress(IndexError, ValueError, struct.error, OverflowError):
                    at = pointers + 2 * number
                    place = int.from_bytes(self._data[at : at + 2])
                    yield self._record(kind, begin, begin + place)

    def _record(self, kind: int, page: int, at: int) -> list[Value]:
        if kind == _INDEX_INTERIOR:
            at += 4  # the page of smaller keys
        size, at = _varint(self._data, at)
        rowid = None
        if kind == _TABLE_LEAF:
            rowid, at = _varint(self._data, at)
        values = _values(self._payload(kind, page, at, size))
        if rowid is not None and values and values[0] is None:
            values[0] = rowid  # an INTEGER PRIMARY KEY
        return values

    def _payload(self, kind: int, page: int, at: int, size: int) -> bytes:
        """Return a record's bytes, whose end may be in a chain of other pages."""
        most = _PAGE_BYTES - 35 if kind == _TABLE_LEAF else (_PAGE_BYTES - 12) * 64 // 255 - 23
        if size <= most:
            return _exactly(self._data[at : min(at + size, page + _PAGE_BYTES)], size)
        least = (_PAGE_BYTES - 12) * 32 // 255 - 23
        local = least + (size - least) % (_PAGE_BYTES - 4)
        if local > most:
            local = least
        parts = [bytes(self._data[at : at + local])]
        (following,) = _NUMBER.unpack_from(self._data, at + local)
        left = size - local
        while left > 0:
            begin = (following - 1) * _PAGE_BYTES
            if not 0 <= begin <= len(self._data) - _PAGE_BYTES:
                raise ValueError("the chain of overflow pages is broken")
            (following,) = _NUMBER.unpack_from(self._data, begin)
            parts.append(bytes(self._data[begin + 4 : begin + 4 + min(left, _PAGE_BYTES - 4)]))
            left -= len(parts[-1])
        return b"".join(parts)


def _values(record: bytes) -> list[Value]:
    size, at = _varint(record, 0)
    kinds = []
    while at < size:
        kind, at = _varint(record, at)
        kinds.append(kind)
    values: list[Value] = []
    for kind in kinds:
        length = _INTEGER_BYTES.get(kind, 0) if kind < 12 else (kind - 12) // 2
        part = _exactly(record[at : at + length], length)
        at += length
        if kind >= 12 and kind % 2 == 0:
            values.append(part)
        elif kind in (8, 9):
            values.append(kind - 8)
        elif kind == 0:
            values.append(None)
        elif kind in _INTEGER_BYTES:
            values.append(int.from_bytes(part, signed=True))
        else:
            raise ValueError("a value has a type that no table uses")
    return values


def _varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    value = 0
    for _ in range(8):
        byte = data[at]
        at += 1
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at
    return value << 8 | data[at], at + 1


def _exactly(part: bytes | memoryview, size: int) -> bytes:
    if len(part) != size:
        raise ValueError("a record ends after the end of its page")
    return bytes(part)


def _row(kind: type[R], values: list[Value]) -> R | None:
    """Return the values as a row of this kind; None if they are not such a row."""
    types = kind.__annotations__.values()
    if len(values) != len(types) + 1 or not all(map(isinstance, values, types)):
        return None
    row = kind(*values[:-1])  # type: ignore[arg-type]
    return row if checksum(row) == values[-1] else None


def _age(row: object) -> list[int]:
    return [getattr(row, name) for name in TABLES[type(row)].ages]
