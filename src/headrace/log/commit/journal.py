"""The journal's format and its writer: frames of checksummed entries, one frame per commit.

Leaves out reading (`journal_reading.py`), what entries mean (`gathered.py`) and when to commit
(`embedded.py`).

A journal file is written full of zeros ahead of its use and recycled after its entries were applied, so
that a commit changes no metadata and one synchronous write is all it costs.

    file   header block, second header block, frames …, whatever an earlier use left there
    frame  head (generation, file, first, position, number, last synced number, length, crc of the
           entries; crc), entries, padding, foot (the same fields as the head)
    entry  header (kind, topic, offset, ordinal, count, ms, lengths, crc of the data; crc), extra, data

No bad block takes more than its own content along:

- The header stands in two blocks, and the catalogue knows the generation and the set of files besides.
- Frames begin at multiples of a block, so that a block holds bytes of one frame only, and no write touches
  a block of a commit that was acknowledged.
- A frame says in its head and in its foot which frame of which file it is. A reader finds it by either.
- The crc of an entry's header starts from a seed that depends on the generation and on the number of the
  commit. Behind a damaged entry a reader finds the next one by this crc.

The generation is a random number that each start of a server draws. Clients never see it, so no payload can
contain what a reader would take for a frame or for an entry. `synced` in a frame is the last commit known
to be on disk when the frame was written: a bad frame that a later one vouches for is damage; any other bad
frame is a write the machine did not finish, and nobody was told that it was stored.
"""

import os
import struct
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from crc32c import crc32c

from headrace.log.disk import Disk

BLOCK_BYTES = 4096
"""Unit that a disk loses at once: no two frames, and no two copies of a header, share a block."""
SECTOR_BYTES = 512
"""Unit that some disks lose at once."""

OLD_CREATE, APPEND, TRIM, DESTROY, OLD_CURSOR, DECIDE, ADVANCE, CHANGE, NOTE, OLD_NAMES = range(
    1, 11
)
CREATE, CURSOR, NAMES = range(11, 14)
PRESENT_KINDS = {OLD_CREATE: CREATE, OLD_CURSOR: CURSOR, OLD_NAMES: NAMES}
"""Kinds of entries in which earlier versions named topics, with the kinds that replaced them. The kind alone
tells an earlier name from a present one that reads the same."""
LOST_NAMES, LOST_NOTE, LOST = 253, 254, 255
"""Never written: stand for names, for a note, and for anything else whose data is damaged when it is read
back."""

HEADER_POSITIONS = (0, BLOCK_BYTES)
FRAMES_POSITION = 2 * BLOCK_BYTES

FILE_MAGIC = b"HRJOURN2"
FILE_HEADER = struct.Struct(">8sQIQQQ16s")
HEAD_MAGIC = 0x48524632
FOOT_MAGIC = 0x48524633
FRAME = struct.Struct(">IQIQQQQII")
FRAME_BEGIN = struct.Struct(">IQ")
FRAME_HEAD_BYTES = FRAME_FOOT_BYTES = FRAME.size + 4
ENTRY = struct.Struct(">BxHIQQQIQI")
ENTRY_HEADER_BYTES = ENTRY.size + 4
CRC = struct.Struct(">I")
_SEED = struct.Struct(">QQ")
_TOPIC_ID = slice(8, 16)
EXTRA_BYTES_MAX = 0xFFFF

_FILL_BYTES = 1 << 20
_JOIN_ABOVE = 16
"""Short entries are copied together in less time than one call for each takes."""
_COUNT_ABOVE = 64
"""So many are short, since all of them are one commit."""


class Entry(NamedTuple):
    """One change of one topic, in absolute values: applying it twice is harmless."""

    kind: int
    topic_id: int
    offset: int
    ordinal: int
    record_count: int
    ms: int
    extra: bytes
    data: bytes | memoryview

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


class JournalHeader(NamedTuple):
    """The header of a journal file, which stands in two copies."""

    generation: int
    file: int
    """The number in the file's name: the header of another file does not count."""
    first: int
    """The number of the first commit in the file."""
    applied: int | None
    """The last applied commit when the file was put to use: a catalogue that knows less is out of date.
    None for a file of format 1, which does not say."""
    size: int
    """The length that the file was made with: a shorter file was cut."""
    boot_id: bytes


class FrameHead(NamedTuple):
    """The fields that identify a frame, which stand at its beginning and at its end."""

    generation: int
    file: int
    first: int
    """The `first` of the file's header: frames of an earlier use have another one."""
    position: int
    """The frame's place in its file: a copy of the frame elsewhere does not count."""
    sequence: int
    synced: int
    """The last commit known to be on disk when this one was written."""
    length: int
    """The size of all entries in bytes."""
    crc: int
    """The checksum of all entries."""


def entry_seed(generation: int, sequence: int) -> int:
    """Return the seed of the checksums of all entry headers of a commit."""
    return crc32c(_SEED.pack(generation, sequence))


def encode_entry(
    kind: int,
    topic_id: int,
    offset: int,
    ordinal: int,
    count: int,
    ms: int,
    extra: bytes,
    data: bytes | memoryview,
    *,
    seed: int,
) -> bytes:
    head = ENTRY.pack(
        kind, len(extra), len(data), topic_id, offset, ordinal, count, ms, crc32c(data)
    )
    if not extra:
        return head + CRC.pack(crc32c(head, seed)) + data
    return b"".join((head, CRC.pack(crc32c(extra, crc32c(head, seed))), extra, data))


def encode_single(
    topic_id: int, offset: int, ordinal: int, ms: int, record: bytes, seed: int
) -> bytes:
    """Encode an append of one record: the result of `encode_entry`, in fewer steps."""
    head = ENTRY.pack(APPEND, 0, len(record), topic_id, offset, ordinal, 1, ms, crc32c(record))
    return head + CRC.pack(crc32c(head, seed)) + record


def encode_changes(
    entries: list[bytes], topic_ids: Collection[int], ms: int, sequence: int, seed: int
) -> list[bytes]:
    """What goes before the entries of a commit in which these topics have changes: an entry for each."""
    crc, count = changes_crc(entries, topic_ids), len(topic_ids)
    made = []
    for topic_id in topic_ids:
        # What `encode_entry` makes of it, in fewer steps: this is done for every topic.
        head = ENTRY.pack(CHANGE, 0, 0, topic_id, crc, sequence, count, ms, 0)
        made.append(head + CRC.pack(crc32c(head, seed)))
    return made


def changes_crc(entries: Iterable[bytes], topic_ids: Collection[int]) -> int:
    """A checksum of all that must be there together: entries of these topics, and notes."""
    ids = {topic_id.to_bytes(8) for topic_id in topic_ids if topic_id}
    # A header holds checksums of the rest.
    heads = [
        entry[:ENTRY_HEADER_BYTES]
        for entry in entries
        if entry[0] == NOTE or (entry[_TOPIC_ID] in ids and entry[0] != CHANGE)
    ]
    return crc32c(b"".join(heads))


def decode_entry(encoded: bytes) -> Entry:
    """An entry this process encoded itself: nothing is checked."""
    kind, extra, length, topic_id, offset, ordinal, count, ms, _ = ENTRY.unpack_from(encoded)
    data_at = ENTRY_HEADER_BYTES + extra
    return Entry(
        kind,
        topic_id,
        offset,
        ordinal,
        count,
        ms,
        encoded[ENTRY_HEADER_BYTES:data_at],
        encoded[data_at : data_at + length],
    )


def entry_offset(encoded: bytes) -> int:
    """Where an append entry begins, without building the rest of it."""
    fields = ENTRY.unpack_from(encoded)
    offset: int = fields[4]
    return offset


def entry_end(encoded: bytes) -> int:
    """The offset just past an append entry, without building the rest of it."""
    fields = ENTRY.unpack_from(encoded)
    end: int = fields[4] + fields[2]
    return end


def encode_frame(
    header: JournalHeader, position: int, sequence: int, synced: int, entries: Sequence[bytes]
) -> list[bytes]:
    """The buffers of one commit, padded to whole blocks."""
    count = len(entries)
    if count > _JOIN_ABOVE and (count > _COUNT_ABOVE or sum(map(len, entries)) < count << 12):
        entries = (b"".join(entries),)
    length = crc = 0
    for entry in entries:
        length += len(entry)
        crc = crc32c(entry, crc)
    fields = (header.generation, header.file, header.first, position, sequence, synced, length, crc)
    padding = frame_bytes(length) - FRAME_HEAD_BYTES - length - FRAME_FOOT_BYTES
    return [
        _encode_head(HEAD_MAGIC, fields),
        *entries,
        bytes(padding),
        _encode_head(FOOT_MAGIC, fields),
    ]


def _encode_head(magic: int, fields: tuple[int, ...]) -> bytes:
    head = FRAME.pack(magic, *fields)
    return head + CRC.pack(crc32c(head))


def frame_bytes(body: int) -> int:
    """Return the space that a frame with `body` bytes of entries takes in the file."""
    return -(-(FRAME_HEAD_BYTES + body + FRAME_FOOT_BYTES) // BLOCK_BYTES) * BLOCK_BYTES


def file_number(path: Path) -> int:
    """The number in the name of a journal file."""
    return int(path.stem)


def prepare_file(disk: Disk, path: Path, size: int) -> None:
    """Make a journal file of `size` bytes of zeros, complete on disk before it has its name."""
    made = path.with_suffix(".new")
    disk.unlink(made)
    fd = disk.open(made, create=True)
    try:
        for position in range(0, size, _FILL_BYTES):
            disk.write(fd, [bytes(min(_FILL_BYTES, size - position))], position)
        disk.sync(fd)
    finally:
        disk.close(fd)
    disk.rename(made, path)
    disk.sync_directory(path.parent)


class JournalFile:
    """A prepared file that commits are being written to."""

    def __init__(
        self,
        disk: Disk,
        path: Path,
        *,
        generation: int,
        first: int,
        applied: int,
        size: int,
        boot_id: bytes,
    ) -> None:
        self.path = path
        self.position = FRAMES_POSITION
        self._header = JournalHeader(generation, file_number(path), first, applied, size, boot_id)
        self._disk = disk
        self._fd = disk.open(path)
        self._begun = False

    def fits(self, body: int) -> bool:
        return self.position + frame_bytes(body) <= self._header.size

    def write(self, sequence: int, synced: int, entries: Sequence[bytes], *, sync: bool) -> None:
        """Write one commit; with `sync` it is on disk when this returns."""
        parts = encode_frame(self._header, self.position, sequence, synced, entries)
        length = sum(map(len, parts))
        position = self.position
        if not self._begun:
            # The headers go with the first commit: an unused file costs no write of its own.
            parts.insert(0, encode_headers(self._header))
            position = 0
        # After an error nothing has changed here: the same call writes the same bytes to the same place.
        self._disk.write(self._fd, parts, position, synced=sync)
        self._begun = True
        self.position += length

    def close(self) -> None:
        self._disk.close(self._fd)


def encode_headers(header: JournalHeader) -> bytes:
    """Both copies of a file's header, each in a block of its own."""
    fields = FILE_HEADER.pack(FILE_MAGIC, *header)
    return (fields + CRC.pack(crc32c(fields))).ljust(BLOCK_BYTES, b"\0") * len(HEADER_POSITIONS)


def boot_id() -> bytes:
    """The identity of this start of the machine: data not synced before another one is lost."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return bytes.fromhex(text.replace("-", ""))
    except (OSError, ValueError):
        return os.urandom(16)
