"""Messages of named readers, an extension that Figg and Wombat share. Bytes are in each protocol's codec.

A client sends READ instead of ATTACH. The server answers at once, with WAITING while another connection reads
under the same name, and with READING once this one may. RECORDS follow. HANDLED names the position behind the
last of a contiguous prefix of handled records, STORED confirms that the cursor is there, durably. LOST ends
the reading: another connection has taken over, or the server refuses it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headrace.model import PAYLOAD_BYTES_MAX, RECORD_HEADER_BYTES

READ, WAITING, READING, RECORDS, HANDLED, STORED, LOST = range(64, 71)
"""Types of messages. Both protocols count their own from 1; these leave room for theirs."""
NAMES = {
    READ: "read",
    WAITING: "waiting",
    READING: "reading",
    RECORDS: "records",
    HANDLED: "handled",
    STORED: "stored",
    LOST: "lost",
}

RECORDS_BYTES_MAX = RECORD_HEADER_BYTES + PAYLOAD_BYTES_MAX
"""Records in one RECORDS message: the largest record just fits."""

RECORD_OVERHEAD_BYTES = 128
"""What each record counts for in a reader's window, besides its bytes: what it costs a client to keep."""

REASON_BYTES_MAX = 1024

SUPERSEDED = 1
"""Another connection reads now: ask again to wait for the next turn."""
REFUSED = 2
"""The server will not let this reader read: asking again changes nothing."""


class Read(NamedTuple):
    topic: str
    reader: str
    newest: bool
    """Where a reader without a cursor starts: at the end, or with the oldest record kept."""
    instance: int
    """A random number of the client's: its new connection replaces its old one at once."""
    window: int
    """Delivered and not handled: so many bytes, each record counting RECORD_OVERHEAD_BYTES more."""


class Waiting(NamedTuple):
    """The answer to every READ that is not answered with READING at once."""

    topic: str
    ahead: int
    """How many other connections come first; 0: reading starts in a moment."""


class Reading(NamedTuple):
    topic: str
    grant: int
    """The number to acknowledge with: every grant has another."""
    asked: int
    """The offset of the cursor."""
    exact: bool
    """False when records behind the cursor are gone."""
    epoch: int
    offset: int
    ordinal: int
    """Where delivery starts."""


class Records(NamedTuple):
    """Consecutive records with one time."""

    topic: str
    epoch: int
    offset: int
    """Where the first of them begins."""
    ordinal: int
    ms: int
    """When they were stored, in Unix milliseconds."""
    data: bytes
    """The records: each a big-endian `uint32` size and the payload."""


class Handled(NamedTuple):
    topic: str
    grant: int
    offset: int
    ordinal: int


class Stored(NamedTuple):
    topic: str
    grant: int
    offset: int


class Lost(NamedTuple):
    topic: str
    code: int
    reason: str


ToServer = Read | Handled
ToClient = Waiting | Reading | Records | Stored | Lost


class Portion(NamedTuple):
    offset: int
    ordinal: int
    data: bytes


def portions(offset: int, ordinal: int, records: Sequence[bytes]) -> Iterator[Portion]:
    """Split consecutive records so that each portion fits into one RECORDS message."""
    gathered: list[bytes] = []
    size = 0
    for record in records:
        if size + len(record) > RECORDS_BYTES_MAX:
            yield Portion(offset, ordinal, b"".join(gathered))
            offset, ordinal = offset + size, ordinal + len(gathered)
            gathered, size = [], 0
        gathered.append(record)
        size += len(record)
    if gathered:
        yield Portion(offset, ordinal, b"".join(gathered))
