"""Blocks: records of one topic with a header, as uploads bring them and as staged files hold them.

Leaves out files (`staging.py`) and what becomes of the records (`batches.py`).

    uploaded  "HRB1", name length, record count, length of the records, crc of the records; name; records
    staged    the same, with the crc of the other header fields and the name in place of "HRB1"

The crc of a staged header starts from a seed that depends on the file's random id, and on where in the file
the block begins. So behind a damaged header a reader finds the next block by this crc, and neither a payload
nor a copy of a block in another place is taken for it.

A block holds no more than a run may: it becomes one entry of the journal, and nobody touches its records
on the way. Those of logs of Logux and of channels are the exception: each is checked here, and stored once.
"""

import errno
import os
import re
import struct
from pathlib import Path
from typing import NamedTuple

from crc32c import crc32c

from headrace.channel_envelope import BadMessageError
from headrace.errors import BadBlockError, BadTopicNameError
from headrace.log.file_reads import read_patiently
from headrace.log.index import RUN_BYTES_MAX, RUN_RECORDS_MAX
from headrace.log.message_rows import check_row
from headrace.log.records import holds, split_records
from headrace.logux_envelope import BadEnvelopeError, check_envelope
from headrace.model import (
    CHANNEL_PREFIX,
    ENVELOPE_PREFIXES,
    LOGUX_PREFIX,
    RECORD_HEADER_BYTES,
    RESERVED_TOPIC_BYTES_MAX,
    check_publish_topic,
    check_topic_name,
    present_name,
)

MAGIC = b"HRB1"
_HEADER = struct.Struct(">4sHIII")
_CRC = struct.Struct(">I")
_PLACE = struct.Struct(">Q")
HEADER_BYTES = _HEADER.size
BLOCK_BYTES_MAX = HEADER_BYTES + RESERVED_TOPIC_BYTES_MAX + RUN_BYTES_MAX

_LIKE_A_HEADER = re.compile(rb"(?=.{4}[\x00\x01].\x00\x00..\x00.{7})", re.DOTALL)
"""A name, a number of records and a length that are not too large."""

_NAMES_CACHED_MAX = 1024
"""Topic names that were found right: an upload has few, or each of them seldom."""


class Block(NamedTuple):
    topic: str
    record_count: int
    data: bytes | memoryview
    """Whole records."""

    @property
    def has_events(self) -> bool:
        """Whether its records are events of Logux."""
        return self.topic.startswith(LOGUX_PREFIX)

    @property
    def has_messages(self) -> bool:
        """Whether its records are messages for a channel."""
        return self.topic.startswith(CHANNEL_PREFIX)

    def payloads(self) -> list[bytes]:
        records = split_records(bytes(self.data), self.record_count)
        return [record[RECORD_HEADER_BYTES:] for record in records]


def encode_block(topic: str, data: bytes, record_count: int) -> bytes:
    """A block as an upload brings it."""
    return encode_block_header(topic, data, record_count) + data


def encode_block_header(topic: str, data: bytes | memoryview, record_count: int) -> bytes:
    """What comes before the records in an upload."""
    name = topic.encode()
    return _HEADER.pack(MAGIC, len(name), record_count, len(data), crc32c(data)) + name


def check_block_topic(topic: str) -> None:
    """Raise BadTopicNameError for one whose records cannot come in blocks."""
    if not topic.startswith(ENVELOPE_PREFIXES):
        check_publish_topic(topic)
    elif topic == LOGUX_PREFIX:
        raise BadTopicNameError(f"topic {topic!r} is no log of Logux: a name is missing behind it")
    elif topic == CHANNEL_PREFIX:
        raise BadTopicNameError(f"topic {topic!r} is no channel: a name is missing behind it")
    else:
        check_topic_name(topic)


class BlockDecoder:
    """Checks an upload while it arrives, in pieces of any size, and makes of it what is staged."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self.records = 0
        """In all blocks so far."""
        self.has_messages = False
        """Whether any of them is for a channel."""
        self._rest = b""
        self._blocks = 0
        self._position = 0
        self._topics: dict[bytes, str] = {}

    def feed(self, *data: bytes) -> list[bytes | memoryview]:
        """The parts of a staged file that `data` completes; raises BadBlockError."""
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
                raise self._bad(f"its {length} bytes are not {count} records of a size each may be")
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
        """The upload has ended; raises BadBlockError when that was inside a block."""
        if self._rest:
            raise self._bad("the body ends inside it")

    def _check_header(self, magic: bytes, name_bytes: int, count: int, length: int) -> None:
        """Before its records arrive."""
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
            check_block_topic(topic)
        except UnicodeDecodeError:
            raise self._bad("its topic name is not UTF-8") from None
        except BadTopicNameError as error:
            raise self._bad(str(error)) from None
        if len(self._topics) >= _NAMES_CACHED_MAX:
            self._topics.clear()
        self._topics[name] = topic
        return topic

    def _check_records(self, block: Block) -> None:
        if not block.topic.startswith(ENVELOPE_PREFIXES):
            return
        check = check_envelope if block.has_events else check_row
        self.has_messages |= block.has_messages
        for number, payload in enumerate(block.payloads(), 1):
            try:
                check(payload)
            except (BadEnvelopeError, BadMessageError) as error:
                raise self._bad(f"record {number}: {error}") from None

    def _bad(self, reason: str) -> BadBlockError:
        return BadBlockError(f"block {self._blocks + 1} at byte {self._position}: {reason}")


def staged_seed(staged_id: str) -> int:
    """What the checksums of a staged file's headers start from.

    Without the first byte it is the seed of earlier versions, whose names of topics may have changed since.
    """
    return crc32c(b"$" + staged_id.encode())


class Damaged(NamedTuple):
    """A block that cannot be read, or several, or the rest of a staged file."""

    reason: str


class Read(NamedTuple):
    """A part of a staged file, and where the next begins."""

    what: Block | Damaged
    next: int


def read_staged(path: Path, position: int, size: int, bytes_max: int) -> list[Read]:
    """Blocks from `position` on, at least one; `size` is how long the file was made.

    Raises OSError for what may pass, such as too many open files.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            wanted = min(max(bytes_max, BLOCK_BYTES_MAX), size - position)
            # Blocks are slices of it: what they become is a copy anyway.
            data = memoryview(read_patiently(fd, wanted, position)[0])
            first = memoryview(read_patiently(fd, HEADER_BYTES + RESERVED_TOPIC_BYTES_MAX, 0)[0])
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EIO):
            raise
        return [Read(Damaged(f"the file cannot be read: {error.strerror}"), size)]
    found: list[Read] = []
    seed, is_old = _seed_of(path.name, first, data, position)
    at = 0
    while at < bytes_max and position + at < size:
        what, end = _staged_block(data, at, position, seed)
        if is_old and isinstance(what, Block):
            what = what._replace(topic=present_name(what.topic.encode()).decode())
        if end is not None:
            at = end
            found.append(Read(what, position + end))
        elif found and position + len(data) < size:
            break  # of this one only a part was read
        else:
            behind = _next_block(data, at + 1, position, seed)
            if behind is None:
                # What was not read yet may still hold blocks; a header may begin in the last bytes.
                partly = seed is not None and len(data) == wanted < size - position
                behind = max(at + 1, wanted - HEADER_BYTES - RESERVED_TOPIC_BYTES_MAX)
                found.append(Read(what, position + behind if partly else size))
                break
            at = behind
            found.append(Read(what, position + at))
    return found


def _seed_of(
    staged_id: str, first: memoryview, data: memoryview, position: int
) -> tuple[int | None, bool]:
    """Return the seed of a file, and whether an earlier version staged the file.

    The first header of the file shows both. Where that header is damaged, the next block does. The seed is
    None for a file of the earliest version: nothing in such a file tells a block from a payload.
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
    """What the checksum of a header at this place of the file starts from."""
    return crc32c(_PLACE.pack(place), seed) if seed is not None else 0


def _next_block(data: memoryview, at: int, position: int, seed: int | None) -> int | None:
    """Where the next block begins whose header holds."""
    if seed is None:
        return None
    for match in _LIKE_A_HEADER.finditer(data, at):
        begin = match.start()
        if _header_holds(data, begin, _placed(seed, position + begin)):
            return begin
    return None


def _header_holds(data: memoryview, at: int, seed: int) -> bool:
    head, name_bytes, *_ = _HEADER.unpack_from(data, at)
    holds_: bool = _CRC.unpack(head)[0] == crc32c(
        data[at + len(MAGIC) : at + HEADER_BYTES + name_bytes], seed
    )
    return holds_


def _staged_block(
    data: memoryview, at: int, position: int, seed: int | None
) -> tuple[Block | Damaged, int | None]:
    """The block and where it ends; None when that is not known, or not in `data`.

    `position` is where `data` begins in the file.
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
