"""The layout of journal files of format 1, which earlier versions wrote and this one only reads.

A file has one header, in its first sector. Frames begin at multiples of a sector and have no foot. Their
generation is drawn for each use of the file, and the crc of an entry's header has no seed.
"""

import struct
from pathlib import Path

from crc32c import crc32c

from headrace.log.journal import CRC, SECTOR_BYTES, FrameHead, JournalHeader, file_number

_FILE_MAGIC = b"HRJOURN1"
_FILE_HEADER = struct.Struct(">8sQQQ16s")
_FRAME_MAGIC = 0x48524631
_FRAME = struct.Struct(">IQQQII")
_FRAME_BEGIN = struct.Struct(">IQ")


def parse_header(path: Path, data: memoryview) -> JournalHeader | None:
    if len(data) < SECTOR_BYTES:
        return None
    magic, generation, first, size, boot_id = _FILE_HEADER.unpack_from(data)
    (crc,) = CRC.unpack_from(data, _FILE_HEADER.size)
    if magic != _FILE_MAGIC or crc != crc32c(data[: _FILE_HEADER.size]):
        return None
    return JournalHeader(generation, file_number(path), first, None, size, boot_id)


class Format1:
    """Finds frames in the bytes of one file."""

    frames_position = SECTOR_BYTES
    head_bytes = _FRAME.size + CRC.size
    entries_are_seeded = False

    def __init__(self, data: memoryview, header: JournalHeader) -> None:
        self._data = data
        self._header = header

    def frame_bytes(self, length: int) -> int:
        return -(-(self.head_bytes + length) // SECTOR_BYTES) * SECTOR_BYTES

    def seed(self, sequence: int) -> int:
        return 0

    def head_at(self, position: int) -> FrameHead | None:
        if position + self.head_bytes > len(self._data):
            return None
        magic, generation, sequence, synced, length, body_crc = _FRAME.unpack_from(
            self._data, position
        )
        if magic != _FRAME_MAGIC or generation != self._header.generation:
            return None
        (crc,) = CRC.unpack_from(self._data, position + _FRAME.size)
        if crc != crc32c(self._data[position : position + _FRAME.size]):
            return None
        first = self._header.first
        return FrameHead(
            generation, self._header.file, first, position, sequence, synced, length, body_crc
        )

    def next_head(self, position: int) -> FrameHead | None:
        """The first frame that begins at or after `position`."""
        begin = _FRAME_BEGIN.pack(_FRAME_MAGIC, self._header.generation)
        whole: bytes = self._data.obj  # type: ignore[assignment]
        while (position := whole.find(begin, position)) >= 0:
            head = self.head_at(position) if position % SECTOR_BYTES == 0 else None
            if head is not None:
                return head
            position += 1
        return None
