"""State that the connections of one server share, whatever their protocol: limits, counts, all open ones.

Elsewhere: a single connection (`connection.py`).
"""

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from headrace.broker.broker import Broker
from headrace.broker.readers import Readers
from headrace.config.settings import Limits
from headrace.server.access import Access
from headrace.server.diagnostics import Health
from headrace.server.loop import Turns
from headrace.server.metrics.metrics import Metrics
from headrace.server.peers.pause import Pause
from headrace.server.refusals import Refusals
from headrace.server.trace.tracing import Tracing
from headrace.wire import websocket

if TYPE_CHECKING:
    from headrace.server.peers.connection import Connection

logger = logging.getLogger(__name__)

UNACKNOWLEDGED_BYTES_MAX = 4 << 20
"""Unacknowledged bytes above which a connection is not read. The next commit is milliseconds away."""
HELD_BACK_BYTES_MAX = 72 << 20
"""Unacknowledged bytes above which a connection is not read while commits are held back.

It is the largest window of a client, 256 of the largest payloads, so that a PING behind them is still read
and answered.
"""
CROWDED_BYTES_MAX = 1 << 16
"""Unacknowledged bytes above which it is not read while all connections exceed `publish_bytes_max`."""

_STOP_TIMEOUT_S = 1.0
_REFUSALS_LOGGED_EVERY_S = 1.0


class Connections:
    """State that the connections of one server share, whatever their protocol."""

    def __init__(
        self, broker: Broker, limits: Limits, metrics: Metrics, health: Health, access: Access
    ) -> None:
        self.broker = broker
        self.access = access
        self.readers = Readers(broker)
        self.health = health
        self.limits = limits
        self.metrics = metrics
        self.listeners: dict[str, str] = {}
        """Address of each listener, for the answer to peers that connected to the wrong one."""
        self.loop = asyncio.get_running_loop()
        self.turns = Turns(self.loop)
        self.open: set[Connection] = set()
        self.paused: set[Connection] = set()
        self.draining = False
        self._all_gone = asyncio.Event()
        self._refusal_logged_s: dict[str, float] = {}
        self.refusals = Refusals(self.loop, limits, metrics)
        self.trace: Tracing | None = None
        """Traces of what connections send and receive; None while nobody follows any."""

    @property
    def refuses_new(self) -> bool:
        """True if a further connection is refused."""
        return self.draining or len(self.open) >= self.limits.connections_max

    def may_read(self, unacknowledged_bytes: int) -> bool:
        """True if a connection with this many unacknowledged bytes is read."""
        store = self.broker.store
        if store.pending_bytes > self.limits.publish_bytes_max:
            return unacknowledged_bytes <= CROWDED_BYTES_MAX
        bytes_max = HELD_BACK_BYTES_MAX if store.held_back else UNACKNOWLEDGED_BYTES_MAX
        return unacknowledged_bytes <= bytes_max

    def tick(self) -> None:
        """Read again from paused connections that are below their limit, because the limit has changed."""
        for connection in list(self.paused):
            connection.read_again()
        self.refusals.tick()

    def refused(self, peer: str, why: str = "connections_max is reached") -> None:
        """Count a refused connection. At most one line per second is logged."""
        self._count_refusal("connections_refused_total", f"{peer}: refused, {why}")

    def request_refused(self, peer: str, why: str) -> None:
        """Count an HTTP request that breaks a limit. At most one line per second is logged."""
        self._count_refusal("http_requests_refused_total", f"{peer}: request refused, {why}")

    def _count_refusal(self, counter: str, message: str) -> None:
        self.metrics.count(counter)
        now_s = self.loop.time()
        if now_s >= self._refusal_logged_s.get(counter, 0.0) + _REFUSALS_LOGGED_EVERY_S:
            self._refusal_logged_s[counter] = now_s
            logger.warning("%s", message)

    def drain(self) -> None:
        """Stop reading from all connections, and refuse new ones."""
        self.draining = True
        for connection in self.open:
            connection.pause(Pause.CLOSING)

    async def close(self) -> None:
        """Hang up on all peers, and wait a moment until the connections have ended."""
        if self.open:
            self._all_gone.clear()
            for connection in list(self.open):
                connection.close("the server is stopping", websocket.GOING_AWAY)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_gone.wait(), _STOP_TIMEOUT_S)
        self.refusals.close()

    def lost(self, connection: "Connection") -> None:
        self.open.discard(connection)
        self.paused.discard(connection)
        if not self.open:
            self._all_gone.set()
