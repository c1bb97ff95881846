"""Runs of records made by hand: payloads → bytes and rows as an index has them."""

from collections.abc import Sequence

from crc32c import crc32c

from headrace.log.read.index import Row, encode_row
from headrace.log.records import pack_record
from headrace.model import Position
from headrace.reader.decode import parse
from headrace.reader.view import LogBlock, LogRange

Runs = Sequence[Sequence[bytes]]


def packed(
    runs: Runs, offset: int = 0, ordinal: int = 0, ms: int = 1000
) -> tuple[list[Row], bytes]:
    """Return rows and bytes of consecutive runs; each run is a millisecond later than the one before."""
    rows, data = [], b""
    for number, payloads in enumerate(runs):
        run = b"".join(map(pack_record, payloads))
        at = offset + len(data)
        rows.append(Row(at, len(run), ordinal, len(payloads), ms + number, crc32c(run)))
        data += run
        ordinal += len(payloads)
    return rows, data


def index(rows: Sequence[Row]) -> bytes:
    return b"".join(map(encode_row, rows))


def block(runs: Runs, offset: int = 0, ordinal: int = 0) -> LogBlock:
    rows, data = packed(runs, offset, ordinal)
    return LogBlock(parse(index(rows)).rows, data, "segment x.log")


def whole(one: LogBlock) -> LogRange:
    """Return the whole range of a block."""
    first, last = one.rows[0], one.rows[-1]
    return LogRange(
        "t",
        Position(1, int(first["offset"]), int(first["ordinal"])),
        Position(
            1,
            int(last["offset"]) + int(last["length"]),
            int(last["ordinal"]) + int(last["count"]),
        ),
    )


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
