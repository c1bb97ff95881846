"""Messages and events that a client passes to the application, and the handlers it calls. No decisions."""

import msgspec

from headrace.model import RECORD_HEADER_BYTES
from headrace.session.topics.client import ConnectionState, Missed

__all__ = ["ConnectionState", "Message", "Missed"]


class Message(msgspec.Struct, frozen=True, gc=False):
    """A message of a topic, as a subscription delivers it."""

    # A struct instead of a tuple: one is created per received message, in a quarter of the time.
    topic: str
    next_offset: int | None
    """Offset of the next record, just past this message: subscribe from here to continue after it. None over
    Wombat if the server's serials do not contain offsets; those of a Headrace server do."""
    payload: bytes
    serial: str | None = None
    """Opaque serial of the message: subscribe from it to continue after the message. Wombat only."""
    ordinal: int | None = None
    """Number of records of the topic that precede this one. Named readers only."""
    epoch: int | None = None
    """Epoch of the topic: a topic that is destroyed and made again has another one. Set for named readers,
    and over Wombat with the serials of a Headrace server."""
    time: float | None = None
    """Time at which the server stored the message, in Unix seconds. Named readers only."""

    @property
    def offset(self) -> int | None:
        """Offset of this record, as in the lake and in Spark: subscribe from here to receive it again."""
        if self.next_offset is None:
            return None
        return self.next_offset - RECORD_HEADER_BYTES - len(self.payload)
