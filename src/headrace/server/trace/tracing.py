"""Traces: who is followed, and how the lines reach a reader that may be slow.

A trace costs nothing while there is none: then `Connections.trace` is None, and a read or a write looks at
that attribute only. While there is a trace, the followed connections' bytes are decoded a second time.

A reader that is too slow loses lines, and is told how many. Elsewhere: decoding (`outlines.py`), and the
endpoint (`http/trace.py`).
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import msgspec

from headrace.server.trace.lines import Line
from headrace.server.trace.outlines import Outline, outline

logger = logging.getLogger(__name__)

TRACES_MAX = 4
"""Traces at the same time. Each decodes what its connections send and receive."""

TRACE_BYTES_MAX = 1 << 20
"""Bytes of lines that wait for a slow reader. Further lines are lost."""

KEEP_ALIVE_S = 15.0
"""Time without lines after which an empty line is sent, so that proxies keep the connection open."""

_encode = msgspec.json.Encoder().encode


class Traced(Protocol):
    """The part of a connection that is known here."""

    protocol: str
    peer: str

    @property
    def names(self) -> tuple[str, ...]:
        """All names under which this connection can be followed."""

    @property
    def unfinished(self) -> bytes:
        """The beginning of a message that has arrived in part."""

    @property
    def only_topic(self) -> str | None:
        """The topic of all messages, if the protocol has one."""


class Filter:
    """The connections and topics that a trace follows."""

    def __init__(self, topic: str | None, peer: str | None, *, payloads: bool) -> None:
        self._topic = topic
        self._peer = peer
        self.payloads = payloads
        self._users: set[Traced] = set()
        """Connections that have used the topic: their messages without a topic are shown too."""

    def takes(self, connection: Traced) -> bool:
        return self._peer is None or self._peer in connection.names

    def shows(self, connection: Traced, line: Line) -> bool:
        if self._topic is None or not self.takes(connection):
            return self.takes(connection)
        if line.topic is None:
            return connection in self._users
        if line.topic != self._topic:
            return False
        self._users.add(connection)
        return True

    def lost(self, connection: Traced) -> None:
        self._users.discard(connection)


class Trace:
    """The lines for one reader."""

    def __init__(self, wanted: Filter) -> None:
        self.wanted = wanted
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._lost = 0
        self._news = asyncio.Event()
        self.closed = False

    def put(self, fields: dict[str, Any]) -> bool:
        """Add a line. Return False if it is lost."""
        line = _encode(fields) + b"\n"
        if self._lost or self._bytes + len(line) > TRACE_BYTES_MAX:
            # Once a line is lost, all are until the reader has been told, so that the gap is in one place.
            self._lost += 1
            return False
        self._lines.append(line)
        self._bytes += len(line)
        self._news.set()
        return True

    def close(self) -> None:
        self.closed = True
        self._news.set()

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield lines until the trace is closed."""
        while not self.closed:
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await self._news.wait()
            except TimeoutError:
                yield b"\n"
                continue
            self._news.clear()
            if self._lines:
                some = b"".join(self._lines)
                self._lines.clear()
                self._bytes = 0
                lost, self._lost = self._lost, 0
                if lost:
                    some += _encode({"kind": "lost", "lines": lost}) + b"\n"
                yield some


class Tracing:
    """All traces of a server. While there are any, connections call it with their bytes."""

    def __init__(
        self,
        attach: Callable[["Tracing | None"], None],
        now_ms: Callable[[], int],
        count_lost: Callable[[], None],
    ) -> None:
        """`attach` tells connections whom to call: this, or nobody."""
        self._attach = attach
        self._now_ms = now_ms
        self._count_lost = count_lost
        self._traces: list[Trace] = []
        self._outlines: dict[Traced, Outline] = {}
        self._closed = False

    @property
    def count(self) -> int:
        return len(self._traces)

    @property
    def is_full(self) -> bool:
        return self._closed or len(self._traces) >= TRACES_MAX

    def begin(self, wanted: Filter) -> Trace:
        assert not self.is_full
        trace = Trace(wanted)
        self._traces.append(trace)
        self._attach(self)
        return trace

    def end(self, trace: Trace) -> None:
        self._traces.remove(trace)
        if not self._traces:
            self._outlines.clear()
            self._attach(None)

    def close(self) -> None:
        """End all traces: the server stops."""
        self._closed = True
        for trace in self._traces:
            trace.close()

    # Calls from connections

    def opened(self, connection: Traced) -> None:
        self._show(connection, "in", [Line("opened")])

    def received(self, connection: Traced, data: Any) -> None:
        """Show what a read has brought, before the session gets it."""
        self._outlined(connection, "in", data)

    def sent(self, connection: Traced, data: bytes) -> None:
        self._outlined(connection, "out", data)

    def closes(self, connection: Traced, reason: str) -> None:
        """Show that the server closes a connection."""
        self._show(connection, "out", [Line("close", fields={"reason": reason} if reason else {})])

    def lost(self, connection: Traced) -> None:
        self._show(connection, "in", [Line("gone")])
        self._outlines.pop(connection, None)
        for trace in self._traces:
            trace.wanted.lost(connection)

    def _outlined(self, connection: Traced, direction: str, data: Any) -> None:
        try:
            outline = self._outline(connection)
            if outline is not None:
                read = outline.received if direction == "in" else outline.sent
                self._show(connection, direction, read(data))
        except Exception:
            # A trace must not end the connection that it shows.
            logger.exception("%s: internal error in a trace", connection.peer)
            self._outlines.pop(connection, None)

    def _outline(self, connection: Traced) -> Outline | None:
        if not any(trace.wanted.takes(connection) for trace in self._traces):
            self._outlines.pop(connection, None)
            return None
        found = self._outlines.get(connection)
        if found is None:
            found = outline(connection.protocol, connection.unfinished, connection.only_topic)
            self._outlines[connection] = found
        return found

    def _show(self, connection: Traced, direction: str, lines: list[Line]) -> None:
        head: dict[str, Any] = {
            "ms": self._now_ms(),
            "peer": connection.peer,
            "protocol": connection.protocol,
            "direction": direction,
        }
        for trace in self._traces:
            wanted = trace.wanted
            for line in lines:
                if wanted.shows(connection, line) and not trace.put(
                    head | line.shown(payloads=wanted.payloads)
                ):
                    self._count_lost()
