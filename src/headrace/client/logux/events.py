"""Events of a local log as applications see them: the check before adding, and the iterator."""

from collections import deque
from typing import Any, Protocol, Self

from headrace.client.logux.store import LogEvent
from headrace.errors import BadEventError, PayloadTooLargeError
from headrace.model import PAYLOAD_BYTES_MAX
from headrace.payload.logux import BadEnvelopeError, Envelope, encode_envelope, raw_event
from headrace.wire.logux import messages as logux

_TIME = [-(10**15) - 0.5, "", 10**9]
"""A time whose encoding is longer than that of any real event."""


def check_event(event: Any, host: str) -> bytes:
    """Return the event as JSON; raise BadEventError or PayloadTooLargeError if no server would accept it."""
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise BadEventError("an event is a dict with a string `type`")
    try:
        # Decode the event as a server will.
        found = logux.decode(logux.pack(["sync", 1, event, _TIME], binary=True), binary=True)
        assert isinstance(found, logux.Sync)
        [(same, _)] = found.events
    except (logux.BadLoguxMessageError, TypeError, ValueError, RecursionError) as error:
        raise BadEventError(f"an event has only what JSON has: {error}") from None
    if same != event:
        raise BadEventError(
            "an event has only what JSON has: None, bool, int, float, str, list, dict"
        )
    created = [_TIME[0], host, _TIME[2]]
    envelope = Envelope(raw_event(event), created=created, origin=host)
    try:
        encode_envelope(envelope)
    except BadEnvelopeError:
        raise PayloadTooLargeError(
            f"an event may have about {PAYLOAD_BYTES_MAX} bytes of JSON with its time and host, "
            f"this one has {len(envelope.event)} without them"
        ) from None
    return bytes(envelope.event)


class Source(Protocol):
    async def page(self, behind: int) -> list[LogEvent]:
        """Wait for events after a number and return them; empty if there will be no more."""


class LogEvents:
    """An async iterator over a local log, in order and without end, until the client is closed.

    Several tasks may iterate over it; each event goes to one of them.
    """

    def __init__(self, source: Source, after: int) -> None:
        self.after = after
        """Number of the last event taken: pass it to `events` to continue after it later."""
        self._source = source
        self._read = after
        self._ready: deque[LogEvent] = deque()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> LogEvent:
        while not self._ready:
            page = await self._source.page(self._read)
            if not page:
                raise StopAsyncIteration
            # Another task may have received the same page.
            self._ready.extend(one for one in page if one.added > self._read)
            self._read = max(self._read, page[-1].added)
        taken = self._ready.popleft()
        self.after = taken.added
        return taken
