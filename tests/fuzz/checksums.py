"""Changes of uploads and journal files that keep checksums correct, to reach the code behind the checks.

The checksums are not secret, but they are there against accidents. So a frame of the journal gets the right
one only if its entries follow each other to its end, as all that a writer makes do.
"""

import random
import struct
from collections.abc import Callable

from crc32c import crc32c

from headrace.log.batch.blocks import HEADER_BYTES
from headrace.log.commit.journal import (
    BLOCK_BYTES,
    CRC,
    ENTRY,
    ENTRY_HEADER_BYTES,
    FILE_HEADER,
    FOOT_MAGIC,
    FRAME,
    FRAME_FOOT_BYTES,
    FRAME_HEAD_BYTES,
    FRAMES_POSITION,
    HEAD_MAGIC,
    HEADER_POSITIONS,
    entry_seed,
    frame_bytes,
)

_BLOCK = struct.Struct(">4sHIII")
_NEAR_BYTES = 200
"""Bytes at the beginning of a journal's block that are changed: the rest of a block is mostly padding."""


def with_checksums_of_blocks(data: bytes) -> bytes:
    """Return an upload in which each block has the checksum of its records."""
    made, at = bytearray(data), 0
    while at + HEADER_BYTES <= len(made):
        magic, name_bytes, count, length, _ = _BLOCK.unpack_from(made, at)
        data_at = at + HEADER_BYTES + name_bytes
        if data_at + length > len(made):
            break
        crc = crc32c(bytes(made[data_at : data_at + length]))
        _BLOCK.pack_into(made, at, magic, name_bytes, count, length, crc)
        at = data_at + length
    return bytes(made)


def changed_journal(
    data: bytes, chance: random.Random, changed_bytes: Callable[[bytes, random.Random], bytes]
) -> bytes:
    """Return a journal file with changes where it has content, and usually with correct checksums."""
    made = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(made) // BLOCK_BYTES + 1) * BLOCK_BYTES
        if chance.randrange(4) == 0:
            at = max(0, at - FRAME_FOOT_BYTES)  # the foot of the frame before it
        old = bytes(made[at : at + _NEAR_BYTES])
        made[at : at + len(old)] = changed_bytes(old, chance)[: len(old)].ljust(len(old), b"\0")
    if chance.randrange(8) == 0:
        del made[chance.randrange(len(made) + 1) :]
    return bytes(made) if chance.randrange(4) == 0 else _with_checksums_of_journal(made, chance)


def _with_checksums_of_journal(made: bytearray, chance: random.Random) -> bytes:
    for position in HEADER_POSITIONS:
        if position + FILE_HEADER.size + CRC.size <= len(made) and chance.randrange(4):
            _seal(made, position, FILE_HEADER.size)
    for position in range(FRAMES_POSITION, len(made) - FRAME_HEAD_BYTES, BLOCK_BYTES):
        fields = FRAME.unpack_from(made, position)
        magic, generation, _, _, _, sequence, _, length, _ = fields
        if magic != HEAD_MAGIC:
            continue
        start, stop = position + FRAME_HEAD_BYTES, position + FRAME_HEAD_BYTES + length
        if _seal_entries(made, start, stop, entry_seed(generation, sequence), chance):
            fields = (*fields[:-1], crc32c(bytes(made[start:stop])))
        FRAME.pack_into(made, position, *fields)
        _seal(made, position, FRAME.size)
        foot = position + frame_bytes(length) - FRAME_FOOT_BYTES
        if foot + FRAME_FOOT_BYTES <= len(made) and chance.randrange(4):
            FRAME.pack_into(made, foot, FOOT_MAGIC, *fields[1:])
            _seal(made, foot, FRAME.size)
    return bytes(made)


def _seal_entries(made: bytearray, start: int, stop: int, seed: int, chance: random.Random) -> bool:
    """Correct the checksums of most entries. Return True if the frame's own checksum may be correct too."""
    is_sound = stop <= len(made)
    while start + ENTRY_HEADER_BYTES <= min(stop, len(made)):
        *fields, _ = ENTRY.unpack_from(made, start)
        extra_at = start + ENTRY_HEADER_BYTES
        data_at = extra_at + fields[1]
        end = data_at + fields[2]
        if end > min(stop, len(made)):
            return False
        if chance.randrange(6) == 0:
            is_sound = False
        else:
            ENTRY.pack_into(made, start, *fields, crc32c(bytes(made[data_at:end])))
            checked = bytes(made[start : start + ENTRY.size] + made[extra_at:data_at])
            CRC.pack_into(made, start + ENTRY.size, crc32c(checked, seed))
        start = end
    return is_sound and start == stop


def _seal(made: bytearray, position: int, size: int) -> None:
    end = position + size
    CRC.pack_into(made, end, crc32c(bytes(made[position:end])))
