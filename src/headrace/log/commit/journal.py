"""The journal: its format, its writer and its ring of files. One frame of checksummed entries per commit.

Elsewhere: reading (`log/recovery/frames.py`), the meaning of entries (`log/apply/changes.py`) and when to
commit (`log/embedded.py`).

A journal file gets headers and zeros before its first use and is recycled after its entries were applied. So
a commit changes no file metadata and costs one synchronous write.

    file   header block, second header block, frames …, leftovers of an earlier use
    frame  head (generation, file, first, position, number, last synced number, length, crc of the
           entries; crc), entries, padding, foot (the same fields as the head)
    entry  header (kind, topic, offset, ordinal, count, ms, lengths, crc of the data; crc), extra, data

A bad block never costs more than its own content:

- Two blocks hold copies of the header, and the catalogue also knows the generation and the set of files.
- Frames begin at multiples of a block. So a block holds bytes of one frame only, and no write touches a block
  of an acknowledged commit.
- Both head and foot of a frame identify the frame and its file. A reader finds the frame by either.
- The crc of an entry's header starts from a seed that depends on the generation and on the number of the
  commit. After a damaged entry, a reader finds the next entry by this crc.

The generation is a random number that each start of a server draws. Clients never see it, so no payload can
contain bytes that a reader would mistake for a frame or an entry. `synced` in a frame is the last commit
known to be on disk when the frame was written. If a later frame's `synced` covers a bad frame, the bad frame
is damage. Any other bad frame without its foot is a write that did not finish, and it was never acknowledged.

The `extra` field of an entry is a MessagePack array; each kind of entry has a class for it.
"""

import os
import struct
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
from crc32c import crc32c

from headrace.log.disk import Disk
from headrace.log.store import Appended, Progress, Topic

RECENT_MAX = 8
"""Number of a producer's last numbers that are kept with the offset just past their append."""

Recent = list[tuple[int, int]]
"""Pairs of (number, offset just past the record), oldest first."""


class CreateEntry(msgspec.Struct, frozen=True, array_like=True):
    name: bytes
    epoch: int
    durability: bytes


class Name(msgspec.Struct, frozen=True, array_like=True):
    """A copy of the fields of the entry that created a topic."""

    topic_id: int
    name: bytes
    epoch: int
    durability: bytes
    offset: int
    ordinal: int

    @classmethod
    def of(cls, topic_id: int, create: CreateEntry, offset: int, ordinal: int) -> Self:
        return cls(topic_id, create.name, create.epoch, create.durability, offset, ordinal)


Names = list[Name]
"""The data of an entry that repeats topic names."""


class Destroy(msgspec.Struct, frozen=True, array_like=True):
    epoch: int


class Producer(msgspec.Struct, frozen=True, array_like=True):
    """The producer of an append and the append's number, by which a repeated append is recognised."""

    name: bytes
    number: int
    pieces_left: int = 0
    """Number of further entries of the same commit that belong to this append."""
    progress: Progress | None = None
    """For records of a batch: the batch's progress including this entry."""


class StagedFile(msgspec.Struct, frozen=True, array_like=True):
    id: bytes
    size: int


StagedFiles = list[StagedFile]
"""The data of a decision."""


class CursorEntry(msgspec.Struct, frozen=True, array_like=True):
    topic: bytes
    reader: bytes
    epoch: int
    commit: int
    """Number of the commit: distinguishes this entry from leftovers of an earlier use of the journal file."""
    dropped: bool = False


class NoteEntry(msgspec.Struct, frozen=True, array_like=True):
    """Extra of a note's entry; the note's value is the entry's data."""

    key: bytes
    due_ms: int
    dropped: bool = False


BLOCK_BYTES = 4096
"""Unit in which disks lose data: no two frames, and no two copies of a header, share a block."""
SECTOR_BYTES = 512
"""Smaller unit in which some disks lose data."""

OLD_CREATE, APPEND, TRIM, DESTROY, OLD_CURSOR, DECIDE, ADVANCE, CHANGE, NOTE, OLD_NAMES = range(
    1, 11
)
CREATE, CURSOR, NAMES = range(11, 14)
PRESENT_KINDS = {OLD_CREATE: CREATE, OLD_CURSOR: CURSOR, OLD_NAMES: NAMES}
"""Kinds of entries in which earlier versions named topics, with the kinds that replaced them. Only the kind
distinguishes a name of the earlier format from a present name with the same bytes."""
LOST_NAMES, LOST_NOTE, LOST = 253, 254, 255
"""Kinds that are never written. On reading, they mark damaged data of names, of a note, and of any other
entry."""

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

_FILL_BYTES = 1 << 20
_JOIN_ABOVE = 16
"""Above this number of entries, joining short entries is faster than one call per entry."""
_COUNT_ABOVE = 64
"""Above this number, entries are short on average, because the size of a commit is limited."""


class Entry(NamedTuple):
    """One change of one topic, in absolute values, so that applying it twice is harmless."""

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
    """The header of a journal file, of which the file has two copies."""

    generation: int
    file: int
    """Number in the file's name. A header with the number of another file is ignored."""
    first: int
    """Number of the first commit in the file; 0 if no commit was written to the file yet."""
    applied: int | None
    """Last applied commit when the file was put to use: a catalogue that knows fewer commits is out of date.
    None for a file of format 1, which has no such field."""
    size: int
    """Length of the file when it was created: a shorter file was truncated."""
    boot_id: bytes

    @classmethod
    def unused(cls, path: Path, size: int, generation: int) -> Self:
        """Return the header of a file without commits, which shows that the file is not damaged."""
        return cls(generation, file_number(path), 0, 0, size, boot_id())


class FrameHead(NamedTuple):
    """The fields that identify a frame, stored at its beginning and at its end."""

    generation: int
    file: int
    first: int
    """The `first` of the file's header. Frames of an earlier use of the file have another value."""
    position: int
    """The frame's place in its file. A copy of the frame at another place is ignored."""
    sequence: int
    synced: int
    """Last commit known to be on disk when this frame was written."""
    length: int
    """Size of all entries in bytes."""
    crc: int
    """Checksum of all entries."""


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
    """Encode an append of one record, with the same result as `encode_entry` in fewer steps."""
    head = ENTRY.pack(APPEND, 0, len(record), topic_id, offset, ordinal, 1, ms, crc32c(record))
    return head + CRC.pack(crc32c(head, seed)) + record


def encode_changes(
    entries: list[bytes], topic_ids: Collection[int], ms: int, sequence: int, seed: int
) -> list[bytes]:
    """Return the entries that precede those of a commit with changes of these topics: one per topic."""
    crc, count = changes_crc(entries, topic_ids), len(topic_ids)
    made = []
    for topic_id in topic_ids:
        # Same result as `encode_entry` in fewer steps, because this runs for every topic.
        head = ENTRY.pack(CHANGE, 0, 0, topic_id, crc, sequence, count, ms, 0)
        made.append(head + CRC.pack(crc32c(head, seed)))
    return made


def changes_crc(entries: Iterable[bytes], topic_ids: Collection[int]) -> int:
    """Return a checksum of the entries that count only together: those of these topics, and notes."""
    ids = {topic_id.to_bytes(8) for topic_id in topic_ids if topic_id}
    # An entry's header holds checksums of its extra and data, so the headers are enough.
    heads = [
        entry[:ENTRY_HEADER_BYTES]
        for entry in entries
        if entry[0] == NOTE or (entry[_TOPIC_ID] in ids and entry[0] != CHANGE)
    ]
    return crc32c(b"".join(heads))


def decode_entry(encoded: bytes) -> Entry:
    """Decode an entry that this process encoded itself, without any checks."""
    kind, extra, length, topic_id, offset, ordinal, count, ms, _ = ENTRY.unpack_from(encoded)
    data_at = ENTRY_HEADER_BYTES + extra
    packed, data = encoded[ENTRY_HEADER_BYTES:data_at], encoded[data_at : data_at + length]
    return Entry(kind, topic_id, offset, ordinal, count, ms, packed, data)


def entry_offset(encoded: bytes) -> int:
    """Return the offset at which an append entry begins, without decoding the rest of the entry."""
    offset: int = ENTRY.unpack_from(encoded)[4]
    return offset


def entry_end(encoded: bytes) -> int:
    """Return the offset just past an append entry, without decoding the rest of the entry."""
    fields = ENTRY.unpack_from(encoded)
    end: int = fields[4] + fields[2]
    return end


def encode_frame(
    header: JournalHeader, position: int, sequence: int, synced: int, entries: Sequence[bytes]
) -> list[bytes]:
    """Return the buffers of one commit, padded to whole blocks."""
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
    """Return the number in the name of a journal file."""
    return int(path.stem)


def prepare_file(disk: Disk, path: Path, size: int, generation: int) -> None:
    """Create a journal file of headers and zeros; it gets its name only when it is complete on disk."""
    made = path.with_suffix(".new")
    headers = encode_headers(JournalHeader.unused(path, size, generation))
    disk.unlink(made)
    with disk.opened(made, create=True, sync=True) as fd:
        disk.write(fd, [headers], 0)
        for position in range(len(headers), size, _FILL_BYTES):
            disk.write(fd, [bytes(min(_FILL_BYTES, size - position))], position)
    disk.rename(made, path)
    disk.sync_directory(path.parent)


def write_unused_headers(disk: Disk, path: Path, generation: int) -> None:
    """Give headers to a file without commits that an earlier version has prepared."""
    header = JournalHeader.unused(path, path.stat().st_size, generation)
    with disk.opened(path, sync=True) as fd:
        disk.write(fd, [encode_headers(header)], 0)


class JournalFile:
    """A prepared file that commits are written to."""

    def __init__(self, disk: Disk, path: Path, header: JournalHeader) -> None:
        self.path = path
        self.position = FRAMES_POSITION
        self._header = header
        self._disk = disk
        self._fd = disk.open(path)

    def fits(self, entries: Iterable[bytes]) -> bool:
        return self.position + frame_bytes(sum(map(len, entries))) <= self._header.size

    def write(self, sequence: int, synced: int, entries: Sequence[bytes], *, sync: bool) -> None:
        """Write one commit; with `sync`, the commit is on disk when this returns."""
        parts = encode_frame(self._header, self.position, sequence, synced, entries)
        position, end = self.position, self.position + sum(map(len, parts))
        if position == FRAMES_POSITION:
            # The headers name the first commit, so they are written with it, at no cost of their own.
            parts.insert(0, encode_headers(self._header))
            position = 0
        # An error leaves the position unchanged: the same call writes the same bytes to the same place.
        self._disk.write(self._fd, parts, position, synced=sync)
        self.position = end

    def close(self) -> None:
        self._disk.close(self._fd)


class ClosedFile(NamedTuple):
    path: Path
    until: int
    """End of the file's last frame, in bytes."""
    last: int
    """Number of the file's last commit."""


class Ring:
    """The current journal file, the files that wait for the applier, and the free files."""

    def __init__(
        self,
        disk: Disk,
        file_bytes: int,
        generation: int,
        boot_id: bytes,
        elapsed_s: Callable[[], float],
    ) -> None:
        self._disk = disk
        self._elapsed_s = elapsed_s
        self._generation = generation
        self._file_bytes = file_bytes
        self._boot_id = boot_id
        self.free: deque[Path] = deque()
        self._unsynced: dict[Path, int] = {}
        """Number of the last commit in a file that is written and not synced."""
        self.touched: dict[Path, dict[Topic, int]] = {}
        """Topics with commits in a file, each with the end offset of its last append there."""
        self.current: JournalFile | None = None
        self.opened_s = 0.0
        self._last = 0
        """Number of the last commit in the current file; 0 if the file holds none."""

    @property
    def used(self) -> bool:
        """True if the current file holds any commit."""
        return self._last > 0

    def open_next(self, first: int, applied: int) -> bool:
        """Open the next free file for commits; return False if no file is free.

        After an OSError the file is still free.
        """
        if not self.free:
            return False
        path = self.free[0]
        header = JournalHeader(
            self._generation, file_number(path), first, applied, self._file_bytes, self._boot_id
        )
        self.current = JournalFile(self._disk, path, header)
        self.free.popleft()
        self.touched[path] = {}
        self.opened_s = self._elapsed_s()
        return True

    def close_current(self) -> ClosedFile:
        file, last = self.current, self._last
        assert file is not None and last
        self.current, self._last = None, 0
        file.close()
        return ClosedFile(file.path, file.position, last)

    def wrote(
        self,
        sequence: int,
        appended: list[Appended],
        created: list[Topic],
        *,
        synced: bool,
    ) -> None:
        """Record a commit that was written to the current file."""
        file = self.current
        assert file is not None
        self._last = sequence
        touched = self.touched[file.path]
        for topic in created:  # perhaps without records
            touched[topic] = topic.end_offset
        for one in appended:
            touched[one.topic] = one.end
        if not synced:
            self._unsynced[file.path] = sequence

    def unsynced(self) -> list[Path]:
        """Return the files with commits that are written and not synced."""
        return list(self._unsynced)

    def sync(self, paths: list[Path]) -> None:
        """Fsync files, in any thread. Opens each file anew, since a recycled file may be closed meanwhile."""
        for path in paths:
            with self._disk.opened(path, sync=True):
                pass

    def synced(self, sequence: int) -> None:
        """Record that all commits up to `sequence` are synced. A file may hold later ones by now."""
        self._unsynced = {path: last for path, last in self._unsynced.items() if last > sequence}

    def recycle(self, path: Path) -> None:
        """Take a file whose commits are synced as segments, or a new one, for new commits."""
        self.touched.pop(path, None)
        self._unsynced.pop(path, None)
        self.free.append(path)

    def close(self) -> None:
        if self.current is not None:
            self.current.close()
        self.current, self._last = None, 0


def encode_headers(header: JournalHeader) -> bytes:
    """Return both copies of a file's header, each in a block of its own."""
    fields = FILE_HEADER.pack(FILE_MAGIC, *header)
    return (fields + CRC.pack(crc32c(fields))).ljust(BLOCK_BYTES, b"\0") * len(HEADER_POSITIONS)


def boot_id() -> bytes:
    """Return the identity of this boot of the machine: unsynced data of an earlier boot is lost."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return bytes.fromhex(text.replace("-", ""))
    except (OSError, ValueError):
        return os.urandom(16)
