"""State that the connections of one server share, whatever their protocol: limits, counts, all open ones.

Elsewhere: a single connection (`connection.py`).
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

from headrace.broker.broker import Broker
from headrace.broker.readers import Readers
from headrace.config.settings import Limits
from headrace.model import CHANNEL_PREFIX
from headrace.server.access import Access
from headrace.server.diagnostics import Health
from headrace.server.loop import Turns
from headrace.server.metrics.metrics import Metrics
from headrace.server.peers.held import HELD_BACK_BYTES_MAX, HeldMemory
from headrace.server.peers.newcomers import Newcomers
from headrace.server.peers.pause import Pause
from headrace.server.peers.strangers import Strangers
from headrace.server.peers.summaries import Summaries
from headrace.server.peers.tally import PeerRules, Tally, Who
from headrace.server.peers.throttle import Throttle
from headrace.server.refusals import Refusals
from headrace.server.trace.tracing import Tracing
from headrace.wire import websocket

if TYPE_CHECKING:
    from headrace.server.peers.connection import Connection

logger = logging.getLogger(__name__)

UNACKNOWLEDGED_BYTES_MAX = 4 << 20
"""Unacknowledged bytes above which a connection is not read. The next commit is milliseconds away."""
CROWDED_BYTES_MAX = 1 << 16
"""Unacknowledged bytes above which it is not read while all connections exceed `publish_bytes_max`."""

_STOP_TIMEOUT_S = 1.0
_REFUSALS_LOGGED_EVERY_S = 1.0
_KNOWN_LINES_MAX = 10
"""Bad peers of one address that are logged in full if they have shown who they are; of strangers, one is."""
_CREATING_MIN = 1000
"""Topics that are being created, above which those that exist now are forgotten."""


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
        self.strangers = Strangers(self.loop, limits, self.newcomers("connections_max"))
        self.paused: set[Connection] = set()
        self.draining = False
        self._all_gone = asyncio.Event()
        self._refusal_logged_s: dict[str, float] = {}
        self._closings = Summaries(self.loop, "connections closed")
        self.refusals = Refusals(self.loop, limits, metrics)
        self.trace: Tracing | None = None
        """Traces of what connections send and receive; None while nobody follows any."""
        self.rules = PeerRules(limits)
        self.held = HeldMemory(self.loop, self.turns, limits, metrics)
        self.throttle = Throttle(self.loop, self.turns, broker.store, metrics)
        self.tally = Tally(
            "connections_max",
            lambda: self.rules,
            lambda: self.limits.connections_max,
            metrics,
            self.strangers.newcomers.has_room,
        )
        self.http_newcomers = self.newcomers("connections_max")
        """Connections of HTTP without a request that shows credentials."""
        self.http = Tally(
            "connections_max",
            lambda: self.rules,
            lambda: self.limits.connections_max,
            metrics,
            self.http_newcomers.has_room,
        )
        """Connections of HTTP, which are counted apart from the others."""
        self.subscriptions = Tally(
            "subscriptions_max",
            lambda: self.rules,
            lambda: self.limits.subscriptions_max,
            metrics,
        )
        self.waiting = Tally(
            "waiting_max", lambda: self.rules, lambda: self.limits.waiting_max, metrics
        )
        """HTTP requests that wait for news."""
        self.output_bytes = 0
        """Bytes of output that are queued for all connections."""
        self._creating: set[str] = set()
        """Topics that publishes are creating, while there is a limit of their number."""
        self._creating_max = _CREATING_MIN
        self._promised: Counter[str] = Counter()
        """Topics among them that batches create, which may take long, with the number of these batches."""
        self.configure(limits)

    def configure(self, limits: Limits) -> None:
        """Use these limits from now on."""
        self.limits = self.refusals.limits = self.strangers.limits = self.held.limits = limits
        self.rules = PeerRules(limits)
        self.throttle.configure(limits, self.rules)

    def why_refused(self, who: Who) -> str:
        """Return the reason why a further connection of this peer is refused; empty if it is accepted."""
        return "the server is stopping" if self.draining else self.tally.refusal(who)

    def newcomers(self, limit: str) -> Newcomers:
        """Return the places of newcomers of one kind. `limit` names the setting that limits their number."""
        return Newcomers(
            limit, lambda: getattr(self.limits, limit), self.metrics.count_limit, self.loop.time
        )

    def make_room(self, who: Who) -> None:
        """End the connection of a stranger if this peer, which was accepted, is one too many."""
        if self.limits.connections_max and self.tally.total >= self.limits.connections_max:
            self.strangers.newcomers.make_room(who.address)

    def may_read(self, unacknowledged_bytes: int) -> bool:
        """True if a connection with this many unacknowledged bytes is read."""
        store = self.broker.store
        if store.pending_bytes > self.limits.publish_bytes_max:
            return unacknowledged_bytes <= CROWDED_BYTES_MAX
        bytes_max = HELD_BACK_BYTES_MAX if store.held_back else UNACKNOWLEDGED_BYTES_MAX
        return unacknowledged_bytes <= bytes_max

    def has_room_for_output(self, queued_bytes: int) -> bool:
        """True if a connection with this much queued output may queue more."""
        limits = self.limits
        if queued_bytes >= limits.output_bytes_max:
            self.metrics.count_limit("output_bytes_max")
            return False
        if self.output_bytes >= limits.output_total_bytes_max:
            self.metrics.count_limit("output_total_bytes_max")
            return False
        return True

    def why_not_created(self, names: Collection[str]) -> str:
        """Return the reason why a publish may not create topics that are missing; empty if it may."""
        limits = self.limits
        if not (limits.topics_max or limits.channels_max):
            return ""
        store = self.broker.store
        new = {name for name in names if not store.look(name).exists}
        missing = new - self._creating
        if not missing:
            return ""
        why = self._limit_of_topics(missing)
        if why or len(self._creating) > self._creating_max:
            # Some of those that were being created exist now, or their publish was never stored.
            self._creating = {
                name
                for name in self._creating
                if not store.look(name).exists and (store.exists(name) or name in self._promised)
            }
            self._creating_max = max(_CREATING_MIN, 2 * len(self._creating))
            missing = new - self._creating
            why = self._limit_of_topics(missing)
        if why:
            self.metrics.count_limit(why)
            return f"{why} is reached"
        self._creating |= missing
        return ""

    def promise(self, names: Collection[str]) -> Collection[str]:
        """Count topics that a batch may create until `keep`. Return those that are missing."""
        limits = self.limits
        if not (limits.topics_max or limits.channels_max):
            return ()
        missing = [name for name in names if not self.broker.store.look(name).exists]
        self._promised.update(missing)
        return missing

    def keep(self, promised: Collection[str]) -> None:
        """Note that a batch has created topics, or never will."""
        for name in promised:
            self._promised[name] -= 1
            if not self._promised[name]:
                del self._promised[name]

    def _limit_of_topics(self, missing: set[str]) -> str:
        """Return the limit that these further topics would exceed; empty if they would not."""
        limits, count = self.limits, self.broker.store.count_topics
        if limits.topics_max and missing:
            coming = len(self._creating) + len(missing)
            if count("") + coming > limits.topics_max:
                return "topics_max"
        if limits.channels_max:
            channels = [name for name in missing if name.startswith(CHANNEL_PREFIX)]
            others = (name for name in self._creating if name.startswith(CHANNEL_PREFIX))
            coming = len(channels) + sum(1 for _ in others) if channels else 0
            if coming and count(CHANNEL_PREFIX) + coming > limits.channels_max:
                return "channels_max"
        return ""

    def tick(self) -> None:
        """Read again from paused connections that are below their limit, because the limit has changed."""
        for connection in list(self.paused):
            connection.read_again()
        self.refusals.tick()
        self._closings.tick()
        self.throttle.tick()
        self.strangers.tick()
        self.held.tick()

    def refused(self, peer: str, why: str) -> None:
        """Count a refused connection. At most one line per second is logged."""
        self._count_refusal("connections_refused_total", f"{peer}: refused, {why}")

    def closes(self, peer: str, address: str, reason: str, *, is_known: bool) -> None:
        """Count a connection that ends because its peer broke the protocol or a limit, and log it."""
        self.metrics.count("connections_closed_for_bad_input_total")
        lines_max = _KNOWN_LINES_MAX if is_known else 1
        self._closings.note(peer, address, reason, lines_max=lines_max)

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
        self._closings.close()
        self.held.close()

    def lost(self, connection: "Connection") -> None:
        if connection in self.open:
            self.open.discard(connection)
            self.tally.add(connection.who, -1)
        self.paused.discard(connection)
        if not self.open:
            self._all_gone.set()
