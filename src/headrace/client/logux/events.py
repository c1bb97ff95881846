"""Events of a local log as applications give and take them: what may be added, and an iterator over all."""

from collections import deque
from typing import Any, Protocol, Self

from headrace.client.logux_store import LogEvent
from headrace.errors import BadEventError, PayloadTooLargeError
from headrace.logux_envelope import BadEnvelopeError, Envelope, encode_envelope, raw_event
from headrace.model import PAYLOAD_BYTES_MAX
from headrace.wire import logux

_TIME = [-(10**15) - 0.5, "", 10**9]
"""A time that is longer than any that an event can get."""


def check_event(event: Any, host: str) -> bytes:
    """The event in JSON; raises BadEventError or PayloadTooLargeError for what no server takes."""
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise BadEventError("an event is a dict with a string `type`")
    try:
        # As a server will do.
        found = logux.decode(logux.pack(["sync", 1, event, _TIME], binary=True), binary=True)
        assert isinstance(found, logux.Sync)
        [(same, _)] = found.events
    except (logux.BadMessageError, TypeError, ValueError, RecursionError) as error:
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
        """Wait for events behind a number; none when there will be no more."""


class LogEvents:
    """An async iterator over a local log, in its order and on and on; it ends when the client is closed.

    Several tasks may iterate over it; each event goes to one of them.
    """

    def __init__(self, source: Source, after: int) -> None:
        self.after = after
        """The number of the last event taken: go on behind it another time."""
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
            # Another task may have got the same page.
            self._ready.extend(one for one in page if one.added > self._read)
            self._read = max(self._read, page[-1].added)
        taken = self._ready.popleft()
        self.after = taken.added
        return taken
