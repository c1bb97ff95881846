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
    offset: int
    """Just past this message: subscribe from here to get the next one."""
    payload: bytes


class Handlers:
    """The functions to call for each kind of event."""

    def __init__(self) -> None:
        self._handlers: dict[str, list[Callable[[Any], object]]] = {"state": [], "missed": []}

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

    def tell(self, name: str, event: ConnectionState | Missed) -> None:
        # Through the loop: a handler may use the client, and its errors are the loop's to report.
        loop = asyncio.get_running_loop()
        for handler in self._handlers[name]:
            loop.call_soon(handler, event)
