"""Messages of named readers, an extension of Figg and Wombat. Elsewhere: their bytes (each protocol's codec).

The fields have the limits of Wombat, which sends each message as a map.

A client sends READ instead of ATTACH. The server answers at once: with WAITING while another connection reads
under the same name, and with READING when this connection may read. RECORDS follow. HANDLED names the
position behind the last of a contiguous prefix of handled records. STORED confirms that the cursor at this
position is durable. LOST ends the reading: another connection has taken over, or the server refuses the
reader.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct, field

from headrace.model import PAYLOAD_BYTES_MAX, RECORD_HEADER_BYTES

READ, WAITING, READING, RECORDS, HANDLED, STORED, LOST = range(64, 71)
"""Types of messages. Both protocols count their own types from 1; these numbers leave room for them."""
RECORDS_BYTES_MAX = RECORD_HEADER_BYTES + PAYLOAD_BYTES_MAX
"""Size limit of the records in one RECORDS message: the largest record just fits."""

RECORD_OVERHEAD_BYTES = 128
"""Bytes that a record counts in a reader's window besides its own: the cost of keeping it in a client."""

REASON_BYTES_MAX = 1024

SUPERSEDED = 1
"""Another connection reads now. A client asks again to wait for its next turn."""
REFUSED = 2
"""The server does not let this reader read. Asking again changes nothing."""


Natural = Annotated[int, Meta(ge=0)]


class Read(Struct, frozen=True, gc=False):
    topic: str
    reader: str
    newest: bool
    """True if a reader without a cursor starts at the end of the topic, False for the oldest record kept."""
    instance: Natural
    """Random number of the client: its new connection replaces its old connection at once."""
    window: Natural
    """Limit in bytes of records delivered and not handled; each record counts RECORD_OVERHEAD_BYTES more."""


class Waiting(Struct, frozen=True, gc=False):
    """Answer to every READ that is not answered with READING at once."""

    topic: str
    ahead: Natural
    """Number of other connections that come first; 0 if reading starts in a moment."""


class Reading(Struct, frozen=True, gc=False):
    topic: str
    grant: Natural
    """Number to acknowledge with; it is different for every grant."""
    asked: Natural
    """Offset of the cursor."""
    exact: bool
    """False if records behind the cursor are gone."""
    epoch: Natural
    offset: Natural
    ordinal: Natural
    """`epoch`, `offset` and `ordinal` are the position where delivery starts."""


class Records(Struct, frozen=True, gc=False):
    """Consecutive records with the same time."""

    topic: str
    epoch: Natural
    offset: Natural
    """Offset of the first record."""
    ordinal: Natural
    ms: Natural = field(name="time")
    """Time when the records were stored, in Unix milliseconds."""
    data: bytes = field(name="records")
    """The records: each a big-endian `uint32` size and the payload."""


class Handled(Struct, frozen=True, gc=False):
    topic: str
    grant: Natural
    offset: Natural
    ordinal: Natural


class Stored(Struct, frozen=True, gc=False):
    topic: str
    grant: Natural
    offset: Natural


class Lost(Struct, frozen=True, gc=False):
    topic: str
    code: int
    reason: str


ToServer = Read | Handled
ToClient = Waiting | Reading | Records | Stored | Lost

TYPES: dict[type[ToServer | ToClient], int] = {
    Read: READ,
    Waiting: WAITING,
    Reading: READING,
    Records: RECORDS,
    Handled: HANDLED,
    Stored: STORED,
    Lost: LOST,
}
NAMES = {number: kind.__name__.lower() for kind, number in TYPES.items()}


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
