"""Values that are read at a scrape: states of connections and subscriptions, the lag of readers, the store.

Elsewhere: what is counted while it happens (`metrics.py`).
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import product
from operator import itemgetter
from typing import NamedTuple

from headrace import __version__
from headrace.broker.broker import SubscriptionState
from headrace.log.embedded import EmbeddedStore
from headrace.log.store import Lag, Store
from headrace.model import LAKE_READER, LAKE_START_READER
from headrace.server.clock import SteadyClock
from headrace.server.http.requests import RequestMemory
from headrace.server.metrics.declarations import LABELLED_GAUGES, READERS_SHOWN_MAX
from headrace.server.peers.connections import Connections

_CURSORS_AT_ONCE = 50
"""Cursors that are looked at before other tasks have their turn: about 50 µs each."""

_PAUSE_SHARE = 20
"""A measurement of all cursors is followed by a pause that is this many times as long."""


class Readings(NamedTuple):
    gauges: Mapping[str, float]
    labelled: Mapping[str, Mapping[tuple[str, ...], float]]
    """By gauge: the value of each combination of labels."""
    limited: Mapping[str, Mapping[str, float]]
    """By gauge: the value of each label that is known now."""


class ReaderLags:
    """The lag of named readers, measured when a scrape asks for it, and not too often."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._again_s = 0.0
        self._measuring: asyncio.Task[None] | None = None
        self.cursors = 0
        self.lake_topics = 0
        self.records: Mapping[str, int] = {}
        """Lag of each reader."""

    async def measure(self) -> None:
        """Measure all lags, unless they were measured a moment ago. Simultaneous scrapes share the work."""
        if self._measuring is None and time.monotonic() >= self._again_s:
            self._measuring = asyncio.create_task(self._measure())
        if self._measuring is not None:
            await asyncio.shield(self._measuring)

    def largest(self) -> dict[str, int]:
        # The lake's cursor of its first export stands still for ever.
        lags = (one for one in self.records.items() if one[0] != LAKE_START_READER)
        return dict(nlargest(READERS_SHOWN_MAX, lags, key=itemgetter(1)))

    async def _measure(self) -> None:
        started_s = time.monotonic()
        try:
            records: defaultdict[str, int] = defaultdict(int)
            topics: Counter[str] = Counter()
            after = ("", "")
            while found := self._store.cursors(after=after, limit=_CURSORS_AT_ONCE):
                for one in found:
                    topic = self._store.look(one.topic)
                    lag = Lag.of(one.position, topic.start, self._store.kept(topic, one.position))
                    records[one.reader] += lag.records
                    topics[one.reader] += 1
                after = found[-1].topic, found[-1].reader
                await asyncio.sleep(0)
            self.records, self.cursors = records, topics.total()
            self.lake_topics = topics[LAKE_READER]
        finally:
            now_s = time.monotonic()
            self._again_s = now_s + _PAUSE_SHARE * (now_s - started_s)
            self._measuring = None


@dataclass
class Instruments:
    """The parts of a server whose values a scrape shows."""

    connections: Connections
    store: EmbeddedStore
    clock: SteadyClock
    requests: RequestMemory
    recovery: Mapping[str, float]
    http_connections: Callable[[], int]
    certificate_expiry: Callable[[], Mapping[str, float]] = dict
    """Returns the time when the certificate of each listener expires, in Unix seconds."""
    traces: Callable[[], int] = int
    lags: ReaderLags = field(init=False)

    def __post_init__(self) -> None:
        self.lags = ReaderLags(self.store)

    def read(self) -> Readings:
        connections, store = self.connections, self.store
        gauges = {
            "connections": len(connections.open),
            "connections_held": len(connections.refusals.held),
            "http_requests_bytes": self.requests.bytes,
            "pending_bytes": store.pending_bytes,
            "journal_files_waiting": store.journal_files_waiting,
            "held_back": int(bool(store.held_back)),
            "ready": int(connections.health.is_ready),
            "clock_jump_seconds": round(self.clock.ahead_ms / 1000),
            "damaged_runs": store.damage_count,
            "staged_bytes": store.staging.bytes,
            "batches_pending": store.batches.pending,
            "damaged_blocks": store.batches.damage_count,
            "cursors": self.lags.cursors,
            "lake_lag_records": self.lags.records.get(LAKE_READER, 0),
            "lake_topics": self.lags.lake_topics,
            "traces": self.traces(),
            **self.recovery,
        }
        return Readings(
            gauges,
            {
                "open_connections": self._connections(),
                "open_subscriptions": self._subscriptions(),
            },
            {
                "reader_lag_records": self.lags.largest(),
                "tls_certificate_expires_seconds": self.certificate_expiry(),
                "info": {__version__: 1},
            },
        )

    def _connections(self) -> dict[tuple[str, ...], float]:
        found = _zeros("open_connections")
        for (protocol, state), count in Counter(
            (one.protocol, one.state) for one in self.connections.open
        ).items():
            found[protocol, state] = count
        found["http", "open"] = self.http_connections()
        return found

    def _subscriptions(self) -> dict[tuple[str, ...], float]:
        found = _zeros("open_subscriptions")
        for (protocol, state), count in self.connections.broker.states.items():
            if state is not SubscriptionState.CLOSED:
                found[protocol, state.value] = count
        return found


def _zeros(name: str) -> dict[tuple[str, ...], float]:
    return dict.fromkeys(product(*LABELLED_GAUGES[name].labels.values()), 0.0)
