"""Blocks: records of one topic with a header, in the format of uploads and of staged files.

Elsewhere: files (`staging.py`) and appending the records (`batches.py`).

    uploaded  "HRB1", name length, record count, length of the records, crc of the records; name; records
    staged    the same, with the crc of the other header fields and the name in place of "HRB1"

The crc of a staged header starts from a seed that depends on the file's random id and on the block's place in
the file. So a reader finds the next block after a damaged header by this crc, and mistakes neither a payload
nor a copy of a block in another place for it.

A block is no longer than a run may be: it becomes one entry of the journal, and its records are not touched
on the way. Records of topics that have an owner (`batches.py`) are the exception: each is checked here.
"""

import errno
import os
import re
import struct
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from crc32c import crc32c

from headrace.errors import BadBlockError, BadTopicNameError
from headrace.log.disk import read_patiently
from headrace.log.read.index import RUN_BYTES_MAX, RUN_RECORDS_MAX
from headrace.log.records import holds
from headrace.log.store import Block
from headrace.model import (
    RECORD_HEADER_BYTES,
    RESERVED_TOPIC_BYTES_MAX,
    check_upload_topic,
    present_name,
)

MAGIC = b"HRB1"
_HEADER = struct.Struct(">4sHIII")
_CRC = struct.Struct(">I")
_PLACE = struct.Struct(">Q")
HEADER_BYTES = _HEADER.size
BLOCK_BYTES_MAX = HEADER_BYTES + RESERVED_TOPIC_BYTES_MAX + RUN_BYTES_MAX

_LIKE_A_HEADER = re.compile(rb"(?=.{4}[\x00\x01].\x00\x00..\x00.{7})", re.DOTALL)
"""Pattern of a header whose name length, record count and data length are not too large."""

_NAMES_CACHED_MAX = 1024
"""Number of cached valid topic names: an upload has few names, or repeats each one seldom."""


Checks = Mapping[str, Callable[[bytes], object]]
"""Functions by topic prefix: each raises ValueError for a payload that may not be uploaded there."""


def encode_block(topic: str, data: bytes, record_count: int) -> bytes:
    """Return a block in the format of an upload."""
    return encode_block_header(topic, data, record_count) + data


def encode_block_header(topic: str, data: bytes | memoryview, record_count: int) -> bytes:
    """Return the part of an uploaded block that precedes the records."""
    name = topic.encode()
    return _HEADER.pack(MAGIC, len(name), record_count, len(data), crc32c(data)) + name


def prefix_of(topic: str, prefixes: Collection[str]) -> str | None:
    """Return the prefix that a topic begins with; None if it begins with none of them."""
    return next((prefix for prefix in prefixes if topic.startswith(prefix)), None)


class BlockDecoder:
    """Checks an upload while it arrives, in pieces of any size, and converts it to the staged format."""

    def __init__(self, checks: Checks, seed: int = 0) -> None:
        self._checks = checks
        self._seed = seed
        self.records = 0
        """Number of records in all blocks so far."""
        self.topics: dict[str, None] = {}
        """Topics of the blocks since the caller last emptied this. A topic may come again."""
        self._rest = b""
        self._blocks = 0
        self._position = 0
        self._topics: dict[bytes, str] = {}

    def feed(self, *data: bytes) -> list[bytes | memoryview]:
        """Return the parts of a staged file that `data` completes; raise BadBlockError for a bad block."""
        buffer = b"".join((self._rest, *data))
        view = memoryview(buffer)
        parts: list[bytes | memoryview] = []
        at = 0
        while len(buffer) - at >= HEADER_BYTES:
            magic, name_bytes, count, length, crc = _HEADER.unpack_from(buffer, at)
            self._check_header(magic, name_bytes, count, length)
            name_at = at + HEADER_BYTES
            data_at = name_at + name_bytes
            end = data_at + length
            if len(buffer) < end:
                break
            topic = self._topic(buffer[name_at:data_at])
            records = buffer[data_at:end]
            if crc32c(records) != crc:
                raise self._bad("the checksum of its records is wrong")
            if not holds(records, count):
                raise self._bad(f"its {length} bytes are not {count} records of an allowed size")
            self._check_records(Block(topic, count, records))
            seed = crc32c(_PLACE.pack(self._position), self._seed)
            parts.append(_CRC.pack(crc32c(view[at + len(MAGIC) : data_at], seed)))
            parts.append(view[at + len(MAGIC) : end])
            self.records += count
            self._blocks += 1
            self._position += end - at
            at = end
        self._rest = buffer[at:]
        return parts

    def finish(self) -> None:
        """End the upload; raise BadBlockError if it ends inside a block."""
        if self._rest:
            raise self._bad("the body ends inside it")

    def _check_header(self, magic: bytes, name_bytes: int, count: int, length: int) -> None:
        """Check a header before the block's records arrive."""
        if magic != MAGIC:
            raise self._bad(f"it begins with {magic!r} instead of {MAGIC!r}")
        if name_bytes > RESERVED_TOPIC_BYTES_MAX:
            allowed = f"{RESERVED_TOPIC_BYTES_MAX} are allowed"
            raise self._bad(f"its topic name has {name_bytes} bytes, {allowed}")
        if not 1 <= count <= RUN_RECORDS_MAX:
            raise self._bad(f"it has {count} records, 1 to {RUN_RECORDS_MAX} are allowed")
        if not count * RECORD_HEADER_BYTES <= length <= RUN_BYTES_MAX:
            raise self._bad(
                f"{length} bytes cannot hold {count} records, or exceed {RUN_BYTES_MAX}"
            )

    def _topic(self, name: bytes) -> str:
        topic = self._topics.get(name)
        if topic is not None:
            return topic
        try:
            topic = name.decode()
            check_upload_topic(topic, self._checks)
        except UnicodeDecodeError:
            raise self._bad("its topic name is not UTF-8") from None
        except BadTopicNameError as error:
            raise self._bad(str(error)) from None
        if len(self._topics) >= _NAMES_CACHED_MAX:
            self._topics.clear()
        self._topics[name] = topic
        self.topics[topic] = None
        return topic

    def _check_records(self, block: Block) -> None:
        prefix = prefix_of(block.topic, self._checks)
        if prefix is None:
            return
        for number, payload in enumerate(block.payloads(), 1):
            try:
                self._checks[prefix](payload)
            except ValueError as error:
                raise self._bad(f"record {number}: {error}") from None

    def _bad(self, reason: str) -> BadBlockError:
        return BadBlockError(f"block {self._blocks + 1} at byte {self._position}: {reason}")


def staged_seed(staged_id: str) -> int:
    """Return the seed of the checksums of a staged file's headers.

    Earlier versions used a seed without the first byte `$`. Their topic names may have changed since.
    """
    return crc32c(b"$" + staged_id.encode())


class Damaged(NamedTuple):
    """One or more blocks, or the rest of a staged file, that cannot be read."""

    reason: str


class StagedRead(NamedTuple):
    """A part of a staged file, and the position of the next part."""

    what: Block | Damaged
    next: int


def read_staged(path: Path, position: int, size: int, bytes_max: int) -> list[StagedRead]:
    """Return blocks from `position` on, at least one; `size` is the length of the complete file.

    Raises OSError for errors that may pass, such as too many open files.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            wanted = min(max(bytes_max, BLOCK_BYTES_MAX), size - position)
            # Blocks are slices of this buffer: encoding them for the journal makes a copy anyway.
            data = memoryview(read_patiently(fd, wanted, position)[0])
            first = memoryview(read_patiently(fd, HEADER_BYTES + RESERVED_TOPIC_BYTES_MAX, 0)[0])
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EIO):
            raise
        return [StagedRead(Damaged(f"the file cannot be read: {error.strerror}"), size)]
    found: list[StagedRead] = []
    seed, is_old = _seed_of(path.name, first, data, position)
    at = 0
    while at < bytes_max and position + at < size:
        what, end = _staged_block(data, at, position, seed)
        if is_old and isinstance(what, Block):
            what = what._replace(topic=present_name(what.topic.encode()).decode())
        if end is None:
            if found and position + len(data) < size:
                break  # only a part of this block was read
            end = _next_block(data, at + 1, position, seed)
        if end is None:
            # The unread rest may still hold blocks; a header may begin in the last bytes.
            partly = seed is not None and len(data) == wanted < size - position
            behind = max(at + 1, wanted - HEADER_BYTES - RESERVED_TOPIC_BYTES_MAX)
            found.append(StagedRead(what, position + behind if partly else size))
            break
        at = end
        found.append(StagedRead(what, position + at))
    return found


def _seed_of(
    staged_id: str, first: memoryview, data: memoryview, position: int
) -> tuple[int | None, bool]:
    """Return the seed of a file, and True if an earlier version staged the file.

    The first header of the file shows both. If that header is damaged, the next block shows them. The seed is
    None for a file of the earliest version, in which nothing distinguishes a block from a payload.
    """
    seed, old_seed = staged_seed(staged_id), crc32c(staged_id.encode())
    if len(first) >= HEADER_BYTES:
        for one, is_old in ((seed, False), (old_seed, True), (None, True)):
            if _header_holds(first, 0, _placed(one, 0)):
                return one, is_old
    is_old = (
        _next_block(data, 0, position, seed) is None
        and _next_block(data, 0, position, old_seed) is not None
    )
    return (old_seed if is_old else seed), is_old


def _placed(seed: int | None, place: int) -> int:
    """Return the seed of the checksum of a header at this place of the file."""
    return crc32c(_PLACE.pack(place), seed) if seed is not None else 0


def _next_block(data: memoryview, at: int, position: int, seed: int | None) -> int | None:
    """Return the place of the next block with a valid header, or None."""
    if seed is None:
        return None
    for match in _LIKE_A_HEADER.finditer(data, at):
        begin = match.start()
        if _header_holds(data, begin, _placed(seed, position + begin)):
            return begin
    return None


def _header_holds(data: memoryview, at: int, seed: int) -> bool:
    head, name_bytes, *_ = _HEADER.unpack_from(data, at)
    checked = data[at + len(MAGIC) : at + HEADER_BYTES + name_bytes]
    return bool(_CRC.unpack(head)[0] == crc32c(checked, seed))


def _staged_block(
    data: memoryview, at: int, position: int, seed: int | None
) -> tuple[Block | Damaged, int | None]:
    """Return the block and its end; the end is None if it is not known or not in `data`.

    `position` is the place of `data` in the file.
    """
    name_at = at + HEADER_BYTES
    if name_at > len(data):
        return Damaged("the file is cut off"), None
    _, name_bytes, count, length, crc = _HEADER.unpack_from(data, at)
    data_at = name_at + name_bytes
    if not _header_holds(data, at, _placed(seed, position + at)):
        return Damaged("a block's header is damaged"), None
    end = data_at + length
    if end > len(data):
        return Damaged("the file is cut off"), None
    records = data[data_at:end]
    if crc32c(records) != crc:
        return Damaged(f"{count} records have a wrong checksum"), end
    return Block(bytes(data[name_at:data_at]).decode(), count, records), end
