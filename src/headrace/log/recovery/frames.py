"""Reader of journal files: finds headers, frames and entries, and reports damaged bytes.

Writes nothing but copies of damaged bytes, to the quarantine, which is for people: the log never reads it
again. Elsewhere: the consequences of damage (`scan.py`).

The reader accepts a frame only if the frame has the generation of the file. The generation comes from one of
the two copies of the file's header or from the catalogue, never from a frame.

Earlier versions wrote journal files of format 1, which this version only reads. Such a file has one header,
in its first sector. Its frames begin at multiples of a sector and have no foot. Their generation is drawn for
each use of the file, and the crc of an entry's header has no seed.
"""

import re
import struct
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from crc32c import crc32c

from headrace.log.commit.journal import (
    APPEND,
    BLOCK_BYTES,
    CRC,
    ENTRY,
    ENTRY_HEADER_BYTES,
    FILE_HEADER,
    FILE_MAGIC,
    FOOT_MAGIC,
    FRAME,
    FRAME_BEGIN,
    FRAME_FOOT_BYTES,
    FRAME_HEAD_BYTES,
    FRAMES_POSITION,
    HEAD_MAGIC,
    HEADER_POSITIONS,
    LOST,
    LOST_NAMES,
    LOST_NOTE,
    NAMES,
    NOTE,
    OLD_NAMES,
    SECTOR_BYTES,
    Entry,
    FrameHead,
    JournalHeader,
    entry_seed,
    file_number,
    frame_bytes,
)
from headrace.log.disk import Disk, LoadedBytes, load, read_patiently
from headrace.log.layout import Layout

CUT = "the file was truncated"
"""Reason of a Problem that no crash explains: a file is complete on disk before it gets its name."""

_CHECKED_ENTRY = struct.Struct(ENTRY.format + "I")
_ENTRY_BEGIN = re.compile(rb"[\x01-\x0d]\x00")
"""Pattern of an entry's kind and padding."""
_BAD_HEADER = "an entry's header is damaged"
_LOST_AS = {NOTE: LOST_NOTE, NAMES: LOST_NAMES, OLD_NAMES: LOST_NAMES}


class Problem(NamedTuple):
    """Bytes of the journal that are damaged or unfinished."""

    file: str
    position: int
    length: int
    reason: str
    entry: Entry | None = None
    """The entry, if only its data is damaged."""
    harmless: bool = False
    """True if another block holds the same facts, so that nothing is lost."""


class Frame(NamedTuple):
    """A commit as it was read from the journal."""

    sequence: int
    synced: int
    """Last commit known to be on disk when this one was written."""
    entries: list[Entry]
    """Entries in order; one with damaged data has a kind `LOST…` and zeros instead of its data."""
    problems: list[Problem]
    seed: int
    """Seed of the checksums of the entry headers."""
    end: int
    """Place in the file where the next frame begins."""
    is_ended: bool
    """True if the end of the frame was written: its foot is intact, or all of its entries are."""


def read_header(path: Path, generation: int = 0) -> JournalHeader | None:
    """Return the file's header from either of its copies, or None if neither is valid.

    If the copies differ, the one with `generation` counts, or else the later one.
    """
    return _header(path, load(path, FRAMES_POSITION).data, generation)


def has_commits(path: Path) -> bool:
    """True if the file's header says that commits were written to the file."""
    header = read_header(path)
    return header is not None and header.first > 0


def read_frames(
    path: Path,
    until: int | None = None,
    *,
    entries: bool = True,
    generation: int = 0,
    loaded: LoadedBytes | None = None,
) -> Iterator[Frame | Problem]:
    """Yield every frame of the file's last use in order, and a Problem for each missing or damaged one.

    `until` is the writer's position; without it, reading ends where no valid frame follows. Without
    `entries`, undamaged frames come without their entries: the search for damage needs only checksums.
    `generation` is the catalogue's, for a file that has lost both copies of its header. `loaded` is the
    file's content if the caller has it.
    """
    data = (loaded or load(path, until)).data
    name = path.name
    header = _header(path, data, generation)
    if header is None:
        if not generation:
            if until is not None:
                yield Problem(name, 0, until, "neither copy of the file's header can be read")
            return
        format_ = _Format(path, data, generation, None)
    elif header.first:
        kind = _Format1 if header.applied is None else _Format
        format_ = kind(path, data, header.generation, header.first)
    else:
        # Nothing was written here, or the headers that came with the first commit are lost.
        format_ = _Format(path, data, generation or header.generation, None)
    if header is None or header.applied is not None:
        yield from _header_problems(path, data, header, format_)
    position = format_.frames_position
    number = header.first if header is not None else 0
    while position < len(data):
        head = format_.head_at(position)
        problems: list[Problem] = []
        if head is None:
            head = format_.next_head(position)
            if head is None:
                break
            if head.position > position:
                length = head.position - position
                yield Problem(name, position, length, "a frame is damaged")
                position = head.position
            if format_.head_at(position) is None:
                reason = "the head of a frame is damaged"
                problems.append(Problem(name, position, format_.head_bytes, reason, harmless=True))
        yield format_.frame(head, problems, entries=entries)
        position += format_.frame_bytes(head.length)
        number = head.sequence + 1
    if until is not None:
        if position < until:
            yield Problem(name, position, until - position, "a frame is damaged")
        return
    if format_.looks_begun(position, number):
        yield Problem(name, position, SECTOR_BYTES, "an unfinished frame")
    if header is not None and header.first and len(data) < header.size:
        yield Problem(name, len(data), header.size - len(data), CUT)


def _header_problems(
    path: Path, data: memoryview, header: JournalHeader | None, format_: "_Format"
) -> Iterator[Problem]:
    if header is None and format_.next_head(0) is None:
        return
    for position in HEADER_POSITIONS:
        if header is None or _parse_header(path, data, position) != header:
            reason = "a copy of the file's header is damaged"
            yield Problem(path.name, position, BLOCK_BYTES, reason, harmless=True)


_FILE_MAGIC_1 = b"HRJOURN1"
_FILE_HEADER_1 = struct.Struct(">8sQQQ16s")
_FRAME_MAGIC_1 = 0x48524631
_FRAME_1 = struct.Struct(">IQQQII")


def _header(path: Path, data: memoryview, generation: int) -> JournalHeader | None:
    copies = (_parse_header(path, data, position) for position in HEADER_POSITIONS)
    found = [header for header in copies if header is not None]
    old = _parse_header_1(path, data)
    if not found or old is None:
        return max(found, key=lambda one: (one.generation == generation, one.first), default=old)
    # A file of format 1 was put to use again, and the machine crashed before the write was complete.
    return max(*found, old, key=lambda one: one.first)


def _parse_header(path: Path, data: memoryview, position: int) -> JournalHeader | None:
    magic, *fields = _checked(FILE_HEADER, data, position)
    if magic != FILE_MAGIC or position + BLOCK_BYTES > len(data):
        return None
    header = JournalHeader(*fields)
    return header if header.file == file_number(path) else None


def _parse_header_1(path: Path, data: memoryview) -> JournalHeader | None:
    magic, *fields = _checked(_FILE_HEADER_1, data, 0)
    if magic != _FILE_MAGIC_1 or len(data) < SECTOR_BYTES:
        return None
    generation, first, size, boot_id = fields
    return JournalHeader(generation, file_number(path), first, None, size, boot_id)


def _checked(fields: struct.Struct, data: memoryview, position: int) -> tuple[Any, ...]:
    """Return the fields at `position`; (None,) unless the checksum after them is correct."""
    end = position + fields.size
    if end + CRC.size > len(data) or CRC.unpack_from(data, end)[0] != crc32c(data[position:end]):
        return (None,)
    return fields.unpack_from(data, position)


class _Format:
    """Finds frames of the present format in the bytes of one file."""

    frames_position = FRAMES_POSITION
    head_bytes = FRAME_HEAD_BYTES
    entries_are_seeded = True

    def __init__(self, path: Path, data: memoryview, generation: int, first: int | None) -> None:
        self._name = path.name
        self._data = data
        self._whole: bytes = data.obj  # type: ignore[assignment]
        self._file = file_number(path)
        self._generation = generation
        self._first = first
        self._heads: list[FrameHead] | None = None
        if first is None:
            # Without a header, the last use of the file counts.
            self._first = max((head.first for head in self._all_heads()), default=0)

    def frame_bytes(self, length: int) -> int:
        return frame_bytes(length)

    def seed(self, sequence: int) -> int:
        return entry_seed(self._generation, sequence)

    def head_at(self, position: int) -> FrameHead | None:
        head = self._parse(position, HEAD_MAGIC)
        return head if head is not None and head.position == position else None

    def next_head(self, position: int) -> FrameHead | None:
        """Return the first frame that begins at or after `position`, found by its head or its foot."""
        if self._heads is None:
            self._heads = self._all_heads()
        number = bisect_left(self._heads, position, key=attrgetter("position"))
        return self._heads[number] if number < len(self._heads) else None

    def _all_heads(self) -> list[FrameHead]:
        found: dict[int, FrameHead] = {}
        for magic in (HEAD_MAGIC, FOOT_MAGIC):
            begin = FRAME_BEGIN.pack(magic, self._generation)
            position = FRAMES_POSITION - 1
            while (position := self._whole.find(begin, position + 1)) >= 0:
                head = self._parse(position, magic)
                if head is None:
                    continue
                end = head.position + frame_bytes(head.length)
                if position == (head.position if magic == HEAD_MAGIC else end - FRAME_FOOT_BYTES):
                    found[head.position] = head
        return sorted(found.values(), key=attrgetter("position"))

    def _parse(self, position: int, magic: int) -> FrameHead | None:
        found, *fields = _checked(FRAME, self._data, position)
        if found != magic:
            return None
        head = FrameHead(*fields)
        belongs = (head.generation, head.file) == (self._generation, self._file)
        return head if belongs and self._first in (None, head.first) else None

    def frame(self, head: FrameHead, problems: list[Problem], *, entries: bool) -> Frame:
        """Return the frame with its problems; without `entries`, an undamaged one has none."""
        data, seed = self._data, self.seed(head.sequence)
        start = head.position + self.head_bytes
        stop = min(start + head.length, len(data))
        end = head.position + self.frame_bytes(head.length)
        if stop == start + head.length and crc32c(data[start:stop]) == head.crc:
            found = _sound(data, start, stop) if entries else []
            return Frame(head.sequence, head.synced, found, problems, seed, end, True)
        found, bad = self._entries(start, stop, head.length, seed)
        if not bad:
            # Each entry is valid, but some belong to another commit: an earlier use left them at the same
            # places.
            reason = "its entries are not those of one commit"
            bad.append(Problem(self._name, head.position, end - head.position, reason))
        is_ended = self._has_foot(head, end)
        return Frame(head.sequence, head.synced, found, problems + bad, seed, end, is_ended)

    def _has_foot(self, head: FrameHead, end: int) -> bool:
        return self._parse(end - FRAME_FOOT_BYTES, FOOT_MAGIC) == head

    def _entries(
        self, start: int, stop: int, length: int, seed: int
    ) -> tuple[list[Entry], list[Problem]]:
        """Return the entries of a damaged frame; with seeds, also those after a damaged entry header."""
        data = self._data
        entries: list[Entry] = []
        problems: list[Problem] = []
        position = start
        while position + ENTRY_HEADER_BYTES <= stop:
            entry, crc = _entry_at(data, position, seed)
            end = stop
            if entry is not None:
                end = position + ENTRY_HEADER_BYTES + len(entry.extra) + len(entry.data)
            if entry is None or end > stop or crc32c(entry.data) != crc:
                following = None
                if self.entries_are_seeded:
                    following = _next_entry(data, position + 1, stop, seed, before=end)
                if following is not None:
                    # A payload never contains an entry: a header before one belongs to another place.
                    size = following - position
                    problems.append(Problem(self._name, position, size, _BAD_HEADER))
                    position = following
                    continue
                if entry is None:
                    break
                lost = _LOST_AS.get(entry.kind, LOST)
                entry = entry._replace(kind=lost, data=bytes(len(entry.data)))
                reason = "an entry's data is damaged"
                problems.append(Problem(self._name, position, end - position, reason, entry))
            entries.append(entry)
            position = end
        if position < start + length:
            # The content that was here is unknown.
            rest = start + length - position
            problems.append(Problem(self._name, position, rest, _BAD_HEADER))
        return _without_copies(entries) if problems else entries, problems

    def looks_begun(self, position: int, number: int) -> bool:
        """True if an entry of the commit `number` is here, after an invalid frame head."""
        start = position + self.head_bytes
        fits = start + ENTRY_HEADER_BYTES <= len(self._data)
        return fits and _entry_at(self._data, start, self.seed(number))[0] is not None


class _Format1(_Format):
    """Finds frames of format 1."""

    frames_position = SECTOR_BYTES
    head_bytes = _FRAME_1.size + CRC.size
    entries_are_seeded = False

    def frame_bytes(self, length: int) -> int:
        return -(-(self.head_bytes + length) // SECTOR_BYTES) * SECTOR_BYTES

    def seed(self, sequence: int) -> int:
        return 0

    def _has_foot(self, head: FrameHead, end: int) -> bool:
        return False

    def head_at(self, position: int) -> FrameHead | None:
        magic, *fields = _checked(_FRAME_1, self._data, position)
        if magic != _FRAME_MAGIC_1 or fields[0] != self._generation:
            return None
        return FrameHead(self._generation, self._file, self._first or 0, position, *fields[1:])

    def next_head(self, position: int) -> FrameHead | None:
        """Return the first frame that begins at or after `position`."""
        begin = FRAME_BEGIN.pack(_FRAME_MAGIC_1, self._generation)
        while (position := self._whole.find(begin, position)) >= 0:
            head = self.head_at(position) if position % SECTOR_BYTES == 0 else None
            if head is not None:
                return head
            position += 1
        return None


def _sound(data: memoryview, start: int, stop: int) -> list[Entry]:
    """Return the entries of a frame with a correct checksum."""
    entries: list[Entry] = []
    unpack, new = ENTRY.unpack_from, tuple.__new__
    while start < stop:
        kind, extra_bytes, data_bytes, topic_id, offset, ordinal, count, ms, _ = unpack(data, start)
        start += ENTRY_HEADER_BYTES
        extra = b""
        if extra_bytes:
            extra = bytes(data[start : start + extra_bytes])
            start += extra_bytes
        body = data[start : start + data_bytes]
        start += data_bytes
        # Same as `Entry(…)` but without its Python-level constructor: there are very many entries.
        entries.append(new(Entry, (kind, topic_id, offset, ordinal, count, ms, extra, body)))
    return entries


def _without_copies(entries: list[Entry]) -> list[Entry]:
    """Return the entries without damaged ones that have an undamaged copy elsewhere in the frame."""
    sound = {(entry.topic_id, entry.offset) for entry in entries if entry.kind == APPEND}
    return [
        entry
        for entry in entries
        if entry.kind != LOST or not entry.topic_id or (entry.topic_id, entry.offset) not in sound
    ]


def _entry_at(data: memoryview, position: int, seed: int) -> tuple[Entry | None, int]:
    """Return the entry with a valid header at `position`, or None, and the expected checksum of its data."""
    kind, extra_bytes, data_bytes, topic_id, offset, ordinal, count, ms, crc, head_crc = (
        _CHECKED_ENTRY.unpack_from(data, position)
    )
    data_at = position + ENTRY_HEADER_BYTES
    checked = crc32c(data[position : position + ENTRY.size], seed)
    extra = b""
    if extra_bytes:
        extra = bytes(data[data_at : data_at + extra_bytes])
        checked = crc32c(extra, checked)
        data_at += extra_bytes
    if checked != head_crc:
        return None, 0
    body: bytes | memoryview = data[data_at : data_at + data_bytes]
    if len(body) < data_bytes:
        body = bytes(data_bytes)
    # Same as `Entry(…)` but without its Python-level constructor: there may be a third of a million.
    entry: Entry = tuple.__new__(Entry, (kind, topic_id, offset, ordinal, count, ms, extra, body))
    return entry, crc


def _next_entry(data: memoryview, position: int, stop: int, seed: int, before: int) -> int | None:
    """Return the place of the next entry that has a valid header and begins before `before`, or None.

    The seed is a secret of this commit, so no payload contains such a header.
    """
    for match in _ENTRY_BEGIN.finditer(data, position, min(before + 1, stop)):
        begin = match.start()
        if begin + ENTRY_HEADER_BYTES > stop:
            return None
        _, extra_bytes, data_bytes, *_ = ENTRY.unpack_from(data, begin)
        size = ENTRY_HEADER_BYTES + extra_bytes + data_bytes
        if begin + size <= stop and _entry_at(data, begin, seed)[0] is not None:
            return begin
    return None


def quarantine(layout: Layout, disk: Disk, path: Path, problem: Problem) -> None:
    """Keep the damaged part of a journal file for people to inspect, before the file is recycled."""
    disk.make_directory(layout.quarantine)
    with FileIO(path) as file:
        damaged, _ = read_patiently(file.fileno(), problem.length, problem.position)
    # The same bytes get the same name, so that an applier that retries keeps them once.
    name = f"journal-{path.stem}-{problem.position}-{crc32c(damaged):08x}.bin"
    disk.write_file(layout.quarantine / name, [damaged], synced=True)
    disk.sync_directory(layout.quarantine)


def quarantine_file(layout: Layout, path: Path) -> None:
    """Keep a file that will be deleted, under another name; takes no extra room before the deletion."""
    disk = Disk()
    disk.make_directory(layout.quarantine)
    with suppress(FileExistsError, FileNotFoundError):
        disk.link(path, layout.quarantine / f"staged-{path.name}.bin")
