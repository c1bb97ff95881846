"""The journal's format and its files: frames of checksummed entries, written one commit at a time.

Leaves out what entries mean (`applier.py`) and when to commit (`embedded.py`).

A journal file is written full of zeros ahead of its use and recycled after its entries were applied, so
that a commit changes no metadata and one synchronous write is all it costs. It starts with a sector of
header; every frame starts at a sector's beginning, so that no later write touches a sector of a commit
that was acknowledged, and so that a reader can find the next frame behind a damaged one.

    file   header sector, frames …, whatever an earlier use left there
    frame  header (generation, sequence number, last synced number, length, crc of the entries; crc),
           entries, padding
    entry  header (kind, topic, offset, ordinal, count, ms, lengths, crc of the data; crc), extra, data

A frame counts when its generation is its file's: a random number drawn each time a file is put to use,
so that neither the frames of an earlier use nor a payload made to look like one are taken for it.
`synced` in a frame names the last commit known to be on disk when it was written: a bad frame that a
later one vouches for is damage; any other bad one is a write the machine did not finish, and nobody was
told it was stored.
"""

import contextlib
import os
import secrets
import struct
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from crc32c import crc32c

from headrace.log.disk import Disk

SECTOR_BYTES = 512

CREATE, APPEND, TRIM, DESTROY, CURSOR, DECIDE, ADVANCE, CHANGE, NOTE = range(1, 10)
LOST_NOTE, LOST = 254, 255
"""Never written: stand for a note, and for anything else, whose data is damaged when it is read back."""

CUT = "the file was cut"
"""The reason of a Problem that no crash explains: a file is complete on disk before it has its name."""

_FILE_MAGIC = b"HRJOURN1"
_FILE_HEADER = struct.Struct(">8sQQQ16s")
_FRAME_MAGIC = 0x48524631
_FRAME = struct.Struct(">IQQQII")
_FRAME_BEGIN = struct.Struct(">IQ")
FRAME_HEADER_BYTES = _FRAME.size + 4
_ENTRY = struct.Struct(">BxHIQQQIQI")
_CHECKED_ENTRY = struct.Struct(_ENTRY.format + "I")
_CRC = struct.Struct(">I")
ENTRY_HEADER_BYTES = _ENTRY.size + 4
_TOPIC_ID = slice(8, 16)
EXTRA_BYTES_MAX = 0xFFFF

_ZEROS = bytes(SECTOR_BYTES)
_FILL_BYTES = 1 << 20
_JOIN_ABOVE = 16
"""Short entries are copied together in less time than one call for each takes."""
_COUNT_ABOVE = 64
"""So many are short, since all of them are one commit."""
_READ_BYTES = 16 << 20


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


class Frame(NamedTuple):
    sequence: int
    synced: int
    """The last commit known to be on disk when this one was written."""
    entries: list[Entry]
    """In their order; one whose data is damaged is `LOST` or `LOST_NOTE` and has zeros instead."""
    problems: list["Problem"]


class Problem(NamedTuple):
    """Bytes of the journal that cannot be read."""

    file: str
    position: int
    length: int
    reason: str
    entry: Entry | None
    """What is known of the entry when only its data is bad."""


def encode_entry(
    kind: int,
    topic_id: int,
    offset: int,
    ordinal: int,
    count: int,
    ms: int,
    extra: bytes,
    data: bytes | memoryview,
) -> bytes:
    head = _ENTRY.pack(
        kind, len(extra), len(data), topic_id, offset, ordinal, count, ms, crc32c(data)
    )
    if not extra:
        return head + _CRC.pack(crc32c(head)) + data
    return b"".join((head, _CRC.pack(crc32c(extra, crc32c(head))), extra, data))


def encode_single(topic_id: int, offset: int, ordinal: int, ms: int, record: bytes) -> bytes:
    """An append of one record: what `encode_entry` makes of it, in fewer steps."""
    head = _ENTRY.pack(APPEND, 0, len(record), topic_id, offset, ordinal, 1, ms, crc32c(record))
    return head + _CRC.pack(crc32c(head)) + record


def encode_changes(
    entries: list[bytes], topic_ids: Collection[int], ms: int, sequence: int
) -> list[bytes]:
    """What goes before the entries of a commit in which these topics have changes: an entry for each."""
    crc, count = changes_crc(entries, topic_ids), len(topic_ids)
    made = []
    for topic_id in topic_ids:
        # What `encode_entry` makes of it, in fewer steps: this is done for every topic.
        head = _ENTRY.pack(CHANGE, 0, 0, topic_id, crc, sequence, count, ms, 0)
        made.append(head + _CRC.pack(crc32c(head)))
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
    kind, extra, length, topic_id, offset, ordinal, count, ms, _ = _ENTRY.unpack_from(encoded)
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
    fields = _ENTRY.unpack_from(encoded)
    offset: int = fields[4]
    return offset


def entry_end(encoded: bytes) -> int:
    """The offset just past an append entry, without building the rest of it."""
    fields = _ENTRY.unpack_from(encoded)
    end: int = fields[4] + fields[2]
    return end


def encode_frame(
    generation: int, sequence: int, synced: int, entries: Sequence[bytes]
) -> list[bytes]:
    """The buffers of one commit, padded to whole sectors."""
    count = len(entries)
    if count > _JOIN_ABOVE and (count > _COUNT_ABOVE or sum(map(len, entries)) < count << 12):
        entries = (b"".join(entries),)
    length = crc = 0
    for entry in entries:
        length += len(entry)
        crc = crc32c(entry, crc)
    head = _FRAME.pack(_FRAME_MAGIC, generation, sequence, synced, length, crc)
    parts = [head, _CRC.pack(crc32c(head)), *entries]
    padding = -(FRAME_HEADER_BYTES + length) % SECTOR_BYTES
    if padding:
        parts.append(_ZEROS[:padding])
    return parts


def frame_bytes(body: int) -> int:
    """What a frame with `body` bytes of entries takes in the file."""
    return -(-(FRAME_HEADER_BYTES + body) // SECTOR_BYTES) * SECTOR_BYTES


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

    def __init__(self, disk: Disk, path: Path, size: int, first: int, boot_id: bytes) -> None:
        self.path = path
        self.generation = secrets.randbits(64)
        self.position = SECTOR_BYTES
        self._disk = disk
        self._size = size
        self._fd = disk.open(path)
        header = _FILE_HEADER.pack(_FILE_MAGIC, self.generation, first, size, boot_id)
        header += _CRC.pack(crc32c(header))
        self._header: bytes | None = header.ljust(SECTOR_BYTES, b"\0")

    def fits(self, body: int) -> bool:
        return self.position + frame_bytes(body) <= self._size

    def write(self, sequence: int, synced: int, entries: Sequence[bytes], *, sync: bool) -> None:
        """Write one commit; with `sync` it is on disk when this returns."""
        parts = encode_frame(self.generation, sequence, synced, entries)
        length = sum(map(len, parts))
        position = self.position
        if self._header is not None:
            # The header goes with the first commit: an unused file costs no write of its own.
            parts.insert(0, self._header)
            position = 0
        # After an error nothing has changed here: the same call writes the same bytes to the same place.
        self._disk.write(self._fd, parts, position, synced=sync)
        self._header = None
        self.position += length

    def close(self) -> None:
        self._disk.close(self._fd)


class JournalHeader(NamedTuple):
    generation: int
    first: int
    """The number of the first commit in the file."""
    size: int
    """How long the file was made: one that is shorter was cut."""
    boot_id: bytes


def read_header(path: Path) -> JournalHeader | None:
    """The file's header, or None when there is none that holds."""
    with path.open("rb") as file:
        sector = file.read(SECTOR_BYTES)
    return _parse_header(sector)


def read_frames(
    path: Path, until: int | None = None, *, entries: bool = True
) -> Iterator[Frame | Problem]:
    """Every frame of the file's generation in order, and a Problem where one should be but is not.

    `until` is where the writer stood; without it reading ends where no valid frame follows. Without
    `entries` those of sound frames are left out: to look for damage takes no more than a checksum.
    """
    data = _load(path, until)
    header = _parse_header(data[:SECTOR_BYTES])
    name = path.name
    generation = header.generation if header else None
    position = SECTOR_BYTES
    # Without a header the first frame names the generation, and only there: anywhere else the same
    # bytes could be a payload.
    frame = _frame_at(data, position, generation)
    if header is None and (frame is not None or any(data[:SECTOR_BYTES])):
        yield Problem(name, 0, SECTOR_BYTES, "the file's header is damaged", None)
    while frame is not None or position < len(data):
        if frame is None:
            found = _next_frame(data, position + SECTOR_BYTES, generation)
            if found is None:
                if until is None and _looks_begun(data, position):
                    yield Problem(name, position, SECTOR_BYTES, "an unfinished frame", None)
                break
            yield Problem(name, position, found - position, "a frame's header is damaged", None)
            position = found
            frame = _frame_at(data, position, generation)
            continue
        generation, sequence, synced, length, crc = frame
        start = position + FRAME_HEADER_BYTES
        stop = min(start + length, len(data))
        if stop == start + length and crc32c(data[start:stop]) == crc:
            yield Frame(sequence, synced, _sound(data, start, stop) if entries else [], [])
        else:
            found_entries, problems = _entries(name, data, start, stop, length)
            if not problems:
                # Each entry holds, but some are another commit's: left from earlier, at the same places.
                reason = "its entries are not those of one commit"
                problems.append(Problem(name, position, frame_bytes(length), reason, None))
            yield Frame(sequence, synced, found_entries, problems)
        position += frame_bytes(length)
        frame = _frame_at(data, position, generation)
    if until is not None and position < until:
        yield Problem(name, position, until - position, "a frame's header is damaged", None)
    size = header.size if header is not None else SECTOR_BYTES
    if until is None and len(data) < size:
        yield Problem(name, len(data), size - len(data), CUT, None)


def _load(path: Path, until: int | None) -> memoryview:
    """The file's bytes, to which entries point; what the disk cannot read is zeros, and so is damage."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        data = memoryview(bytearray(size if until is None else min(size, until)))
        at = 0
        while at < len(data):
            try:
                read = os.preadv(fd, [data[at : at + _READ_BYTES]], at)
            except OSError:
                read = _read_sectors(fd, data[at : at + _READ_BYTES], at)
            if not read:
                break
            at += read
        return data
    finally:
        os.close(fd)


def _read_sectors(fd: int, into: memoryview, at: int) -> int:
    """Fill what can be read, a sector at a time."""
    for first in range(0, len(into), SECTOR_BYTES):
        with contextlib.suppress(OSError):
            os.preadv(fd, [into[first : first + SECTOR_BYTES]], at + first)
    return len(into)


def _parse_header(sector: bytes | memoryview) -> JournalHeader | None:
    if len(sector) < SECTOR_BYTES:
        return None
    magic, generation, first, size, boot_id = _FILE_HEADER.unpack_from(sector)
    (crc,) = _CRC.unpack_from(sector, _FILE_HEADER.size)
    if magic != _FILE_MAGIC or crc != crc32c(sector[: _FILE_HEADER.size]):
        return None
    return JournalHeader(generation, first, size, boot_id)


def _frame_at(
    data: memoryview, position: int, generation: int | None
) -> tuple[int, int, int, int, int] | None:
    if position + FRAME_HEADER_BYTES > len(data):
        return None
    magic, found, sequence, synced, length, body_crc = _FRAME.unpack_from(data, position)
    if magic != _FRAME_MAGIC or (generation is not None and found != generation):
        return None
    (crc,) = _CRC.unpack_from(data, position + _FRAME.size)
    if crc != crc32c(data[position : position + _FRAME.size]):
        return None
    return found, sequence, synced, length, body_crc


def _looks_begun(data: memoryview, position: int) -> bool:
    """Whether an entry stands here behind a header that does not hold: the header, then, is damaged.

    What recycling left seldom looks so: either its header holds, or the place is inside its data.
    """
    start = position + FRAME_HEADER_BYTES
    return _frame_at(data, position, None) is None and bool(
        _entries("", data, start, len(data), 0, entries_max=1)[0]
    )


def _next_frame(data: memoryview, position: int, generation: int | None) -> int | None:
    if generation is None:
        return None
    begin = _FRAME_BEGIN.pack(_FRAME_MAGIC, generation)
    while (position := data.obj.find(begin, position)) >= 0:  # type: ignore[attr-defined]
        if position % SECTOR_BYTES == 0 and _frame_at(data, position, generation) is not None:
            return position
        position += 1
    return None


def _sound(data: memoryview, start: int, stop: int) -> list[Entry]:
    """The entries of a frame whose checksum holds."""
    entries: list[Entry] = []
    unpack, new = _ENTRY.unpack_from, tuple.__new__
    while start < stop:
        kind, extra_bytes, data_bytes, topic_id, offset, ordinal, count, ms, _ = unpack(data, start)
        start += ENTRY_HEADER_BYTES
        extra = b""
        if extra_bytes:
            extra = bytes(data[start : start + extra_bytes])
            start += extra_bytes
        body = data[start : start + data_bytes]
        start += data_bytes
        # What `Entry(…)` does, without its way through Python: there are very many.
        entries.append(new(Entry, (kind, topic_id, offset, ordinal, count, ms, extra, body)))
    return entries


def _entries(
    name: str,
    data: memoryview,
    start: int,
    stop: int,
    length: int,
    entries_max: int = sys.maxsize,
) -> tuple[list[Entry], list[Problem]]:
    entries: list[Entry] = []
    problems: list[Problem] = []
    position = start
    new = tuple.__new__
    while position + ENTRY_HEADER_BYTES <= stop and len(entries) < entries_max:
        kind, extra_bytes, data_bytes, topic_id, offset, ordinal, count, ms, crc, head_crc = (
            _CHECKED_ENTRY.unpack_from(data, position)
        )
        data_at = position + ENTRY_HEADER_BYTES
        checked = crc32c(data[position : position + _ENTRY.size])
        extra = b""
        if extra_bytes:
            extra = bytes(data[data_at : data_at + extra_bytes])
            checked = crc32c(extra, checked)
            data_at += extra_bytes
        if checked != head_crc:
            break
        body = data[data_at : data_at + data_bytes]
        # What `Entry(…)` does, without its way through Python: there may be a third of a million.
        entry = new(Entry, (kind, topic_id, offset, ordinal, count, ms, extra, body))
        if len(body) < data_bytes or crc32c(body) != crc:
            lost = LOST_NOTE if kind == NOTE else LOST
            entry = entry._replace(kind=lost, data=bytes(data_bytes))
            size = data_at + data_bytes - position
            problems.append(Problem(name, position, size, "an entry's data is damaged", entry))
        entries.append(entry)
        position = data_at + data_bytes
    if position < start + length:
        # Without its header nothing says how long an entry is: the rest of the frame goes with it.
        rest = start + length - position
        problems.append(Problem(name, position, rest, "an entry's header is damaged", None))
    return entries, problems


def boot_id() -> bytes:
    """The identity of this start of the machine: data not synced before another one is lost."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return bytes.fromhex(text.replace("-", ""))
    except (OSError, ValueError):
        return os.urandom(16)
