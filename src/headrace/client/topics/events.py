"""Messages and events that a client passes to the application, and the handlers it calls. No decisions."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.model import RECORD_HEADER_BYTES
from headrace.session.client import ConnectionState
from headrace.session.topics.events import Missed

__all__ = ["ConnectionState", "Handlers", "Message", "Missed"]


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


class Handlers:
    """The functions to call for each kind of event."""

    def __init__(self, *names: str) -> None:
        self._handlers: dict[str, list[Callable[[Any], object]]] = {name: [] for name in names}

    def add(self, name: str, handler: Callable[[Any], object]) -> Callable[[], None]:
        """Add a handler; return a function that removes it."""
        if name not in self._handlers:
            raise ValueError(f"there is no event {name!r}, only {', '.join(self._handlers)}")
        handlers = self._handlers[name]
        handlers.append(handler)

        def remove() -> None:
            if handler in handlers:
                handlers.remove(handler)

        return remove

    def tell(self, name: str, event: object) -> None:
        """Call the handlers at once, so that they learn of a gap before the messages after it are taken."""
        for handler in tuple(self._handlers[name]):
            try:
                handler(event)
            except Exception as error:  # of the handler, and not of the connection
                asyncio.get_running_loop().call_exception_handler(
                    {"message": f"a handler of {name!r} events failed", "exception": error}
                )
