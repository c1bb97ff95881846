"""What a client hands to the application, and who asked to be told. Decides nothing."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.session.client import ConnectionState, Missed

__all__ = ["ConnectionState", "Handlers", "Message", "Missed"]


class Message(msgspec.Struct, frozen=True, gc=False):
    """A message of a topic, as a subscription gives it."""

    # A struct and not a tuple: it is made once per message received, in a quarter of the time.
    topic: str
    offset: int | None
    """Just past this message: subscribe from here to get the next one. None over Wombat, when the server's
    serials do not tell offsets; those of a Headrace server do."""
    payload: bytes
    serial: str | None = None
    """The message's serial: subscribe from it to get the next one. Opaque. Wombat only."""
    ordinal: int | None = None
    """How many records of the topic precede it. Named readers only."""
    epoch: int | None = None
    """The life of the topic: one that was destroyed and made again has another. Named readers only."""
    time: float | None = None
    """When the server stored it, in Unix seconds. Named readers only."""


class Handlers:
    """The functions to call for each kind of event."""

    def __init__(self, *names: str) -> None:
        self._handlers: dict[str, list[Callable[[Any], object]]] = {name: [] for name in names}

    def add(self, name: str, handler: Callable[[Any], object]) -> Callable[[], None]:
        """Returns a function that takes the handler out again."""
        if name not in self._handlers:
            raise ValueError(f"there is no event {name!r}, only {', '.join(self._handlers)}")
        handlers = self._handlers[name]
        handlers.append(handler)

        def remove() -> None:
            if handler in handlers:
                handlers.remove(handler)

        return remove

    def tell(self, name: str, event: object) -> None:
        """Call the handlers at once: of a gap they know before the messages behind it are taken."""
        for handler in tuple(self._handlers[name]):
            try:
                handler(event)
            except Exception as error:  # theirs: not to be mixed with the connection's
                asyncio.get_running_loop().call_exception_handler(
                    {"message": f"a handler of {name!r} events failed", "exception": error}
                )
