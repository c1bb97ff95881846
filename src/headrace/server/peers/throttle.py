"""Rates and quotas: which publish is stored now, and which publisher waits for its turn.

A publisher over a rate, or over the quota of a prefix, is held back as by a full disk: its publishes wait in
its connection, in their order, and nothing is refused. A *gate* is one limit that has to be open: a rate has
a timer, and a quota is told when bytes are freed, so nothing polls. Those that wait at a gate take turns.

A publish is carried out whole once all its gates are open, and charged then. So a rate may be exceeded by one
read per turn, and the next turn comes later. Elsewhere: the arithmetic (`access/quotas.py`, `log/quota.py`),
and the connection that waits (`connection.py`).
"""

import asyncio
import logging
from collections.abc import Collection
from functools import partial
from math import ceil
from typing import NamedTuple, Protocol

from headrace.access.quotas import Bucket, FairQueue
from headrace.config.settings import Limits
from headrace.log.quota import Meter, Quotas
from headrace.server.loop import Turns
from headrace.server.metrics.metrics import Metrics
from headrace.server.peers.tally import ADDRESS, CONNECTION, PRINCIPAL, SERVER, PeerRules, Who

logger = logging.getLogger(__name__)

TIMER_S_MIN = 0.005
"""Shortest timer. What a rate allows meanwhile is used when the timer fires, so no rate is lost."""

SWEEP_S = 10.0
"""Time between searches for gates that nobody uses any more."""

RETRY_AFTER_S_MAX = 60
"""Longest time that an HTTP client is told to wait. For a quota, nobody knows how long it takes."""

RATES = ("records_per_s", "bytes_per_s", "topics_per_s")
QUOTA = "quota_bytes"


class Cost(NamedTuple):
    """What a publish uses."""

    records: int
    bytes: int
    topics: Collection[str]


class Publisher(Protocol):
    """The part of a connection that is known here."""

    peer: str

    def __hash__(self) -> int: ...

    @property
    def who(self) -> Who: ...

    def go_on(self) -> None:
        """Called when it is this publisher's turn: it asks again."""

    def internal_error(self) -> None:
        """Called after an error in `go_on`."""


class ExistingTopics(Protocol):
    """The part of the store that is known here."""

    quotas: Quotas

    def exists(self, name: str) -> bool: ...


class Shared:
    """State that all gates share."""

    def __init__(self, loop: asyncio.AbstractEventLoop, turns: Turns) -> None:
        self.loop = loop
        self.turns = turns
        self.next_up: Publisher | None = None
        """The publisher whose turn it is at some gate. It need not queue behind others at any gate."""


class Gate:
    """One limit, and those that wait for it."""

    def __init__(self, name: str, of: str, shared: Shared) -> None:
        self.name = name
        """Name of the limit's setting."""
        self.of = of
        """`server`, `connection`, `address` or `principal`."""
        self._shared = shared
        self._waiting: FairQueue[Publisher] = FairQueue()
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None

    def opens_in_s(self) -> float | None:
        """Return the seconds until the gate is open: 0 if it is, None if nobody knows."""
        raise NotImplementedError

    def lets(self, peer: Publisher | None) -> bool:
        """True if a publisher may pass now. One that did not wait queues behind those that do."""
        has_turn = peer is not None and peer is self._shared.next_up
        return (has_turn or not self._waiting) and self.opens_in_s() == 0

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    def wait(self, peer: Publisher, amount: float) -> None:
        self._waiting.push(peer, amount)
        self.go_on()

    def forget(self, peer: Publisher) -> None:
        self._waiting.discard(peer)
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._scheduled = False

    def go_on(self) -> None:
        """See to it that the next one has its turn when the gate is open."""
        if self._scheduled or not self._waiting:
            return
        delay_s = self.opens_in_s()
        if delay_s is None:
            return
        self._scheduled = True
        if delay_s:
            self._timer = self._shared.loop.call_later(max(delay_s, TIMER_S_MIN), self._opened)
        else:
            self._shared.turns.later(self._turn)

    def _opened(self) -> None:
        self._timer = None
        self._shared.turns.later(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        if self._waiting and self.opens_in_s() == 0:
            peer = self._shared.next_up = self._waiting.pop()
            try:
                ask_again(peer)
            finally:
                self._shared.next_up = None
        self.go_on()


def ask_again(peer: Publisher) -> None:
    """Let a publisher go on. The others must have their turns also after an internal error in that."""
    try:
        peer.go_on()
    except Exception:
        logger.exception("%s: internal error in a publish that was held back", peer.peer)
        peer.internal_error()


class RateGate(Gate):
    """A rate."""

    def __init__(self, name: str, of: str, per_s: int, shared: Shared) -> None:
        super().__init__(name, of, shared)
        self._bucket = Bucket(per_s, shared.loop.time())

    def opens_in_s(self) -> float:
        return self._bucket.opens_in_s(self._shared.loop.time())

    def take(self, amount: float) -> None:
        self._bucket.take(amount)

    @property
    def is_idle(self) -> bool:
        return super().is_idle and self._bucket.is_full(self._shared.loop.time())


class QuotaGate(Gate):
    """The quota of a prefix."""

    def __init__(self, meter: Meter, shared: Shared) -> None:
        super().__init__(QUOTA, SERVER, shared)
        self._meter = meter

    def opens_in_s(self) -> float | None:
        return None if self._meter.is_full else 0.0


class Throttle:
    """All gates of one server."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        turns: Turns,
        topics: ExistingTopics,
        metrics: Metrics,
    ) -> None:
        self._shared = Shared(loop, turns)
        self._topics = topics
        self._metrics = metrics
        self._gates: dict[tuple[str, object, str], RateGate] = {}
        """By scope, the key in that scope, and the name of the rate."""
        self._quotas: dict[Meter, QuotaGate] = {}
        self._waits_at: dict[Publisher, Gate] = {}
        self._of: dict[Publisher, tuple[Who, list[tuple[RateGate, int]]]] = {}
        """The gates of each publisher, with the index of their rate in `RATES`."""
        self._has_rates = False
        self._counts_topics = False
        self._swept_s = loop.time()
        topics.quotas.freed = self._freed

    @property
    def is_active(self) -> bool:
        """True if there is a rate or a quota."""
        return self._has_rates or bool(self._topics.quotas.meters)

    def configure(self, limits: Limits, rules: PeerRules) -> None:
        """Use these limits from now on. Debts are forgotten, and all that wait ask again."""
        self._limits, self._rules = limits, rules
        self._has_rates = any(getattr(limits, name) or rules.has(name) for name in RATES)
        self._counts_topics = bool(limits.topics_per_s or rules.has("topics_per_s"))
        self._gates.clear()
        self._of.clear()
        waiting = list(self._waits_at)
        for peer in waiting:
            self.forget(peer)
            self._shared.turns.later(partial(ask_again, peer))

    def admit(self, peer: Publisher, cost: Cost) -> bool:
        """Charge a publish and return True, or return False and call `peer.go_on` when its turn comes."""
        self._waits_at.pop(peer, None)
        rates = self._gates_of(peer)
        amounts = self._amounts(cost)
        for gate, index in rates:
            if amounts[index] and not gate.lets(peer):
                self._hold(peer, gate, amounts[index])
                return False
        for quota in self._quotas_of(cost.topics):
            if not quota.lets(peer):
                self._hold(peer, quota, cost.bytes)
                return False
        for gate, index in rates:
            gate.take(amounts[index])
        if self._shared.next_up is peer:
            self._shared.next_up = None
        return True

    def retry_after_s(self, who: Who, cost: Cost, *, quotas: bool = True) -> int:
        """Charge a publish over HTTP and return 0, or return the seconds after which it may be sent again.

        `quotas`: False if the quotas of its topics do not hold it back.
        """
        if not self.is_active:
            return 0
        rates = self._gates_at(who)
        amounts = self._amounts(cost)
        for gate, index in rates:
            if amounts[index] and not gate.lets(None):
                self._metrics.count_limit(gate.name, gate.of)
                return min(RETRY_AFTER_S_MAX, ceil(gate.opens_in_s()) or 1)
        for quota in self._quotas_of(cost.topics) if quotas else ():
            if not quota.lets(None):
                self._metrics.count_limit(quota.name, quota.of)
                return RETRY_AFTER_S_MAX
        for gate, index in rates:
            gate.take(amounts[index])
        return 0

    def charge(self, who: Who, cost: Cost) -> None:
        """Charge what has come over HTTP already."""
        amounts = self._amounts(cost)
        for gate, index in self._gates_at(who):
            gate.take(amounts[index])

    def _gates_at(self, who: Who) -> list[tuple[RateGate, int]]:
        return [(self._gate(*key), index) for key, index in self._keys(who, None)]

    def forget(self, peer: Publisher) -> None:
        """Forget a publisher: it does not wait any more."""
        gate = self._waits_at.pop(peer, None)
        if gate is not None:
            gate.forget(peer)

    def lost(self, peer: Publisher) -> None:
        """Forget a publisher that is gone."""
        self.forget(peer)
        self._of.pop(peer, None)
        for name in RATES:
            self._gates.pop((CONNECTION, peer, name), None)

    def tick(self) -> None:
        """Drop gates that nobody uses: a new one would be the same."""
        if self._shared.loop.time() >= self._swept_s + SWEEP_S:
            self._swept_s = self._shared.loop.time()
            idle = [key for key, gate in self._gates.items() if gate.is_idle]
            if idle:
                for key in idle:
                    del self._gates[key]
                self._of.clear()
            for meter, quota in list(self._quotas.items()):
                if quota.is_idle:
                    del self._quotas[meter]

    def _hold(self, peer: Publisher, gate: Gate, amount: float) -> None:
        self._metrics.count_limit(gate.name, gate.of)
        self._waits_at[peer] = gate
        gate.wait(peer, amount)

    def _amounts(self, cost: Cost) -> tuple[int, int, int]:
        new = 0
        if self._counts_topics:
            new = sum(not self._topics.exists(name) for name in cost.topics)
        return cost.records, cost.bytes, new

    def _gates_of(self, peer: Publisher) -> list[tuple[RateGate, int]]:
        known = self._of.get(peer)
        who = peer.who
        if known is None or known[0] != who:
            gates = [(self._gate(*key), index) for key, index in self._keys(who, peer)]
            known = self._of[peer] = who, gates
        return known[1]

    def _keys(
        self, who: Who, peer: Publisher | None
    ) -> list[tuple[tuple[str, object, str, int], int]]:
        """Return scope, key, name and value of each rate of a publisher, and the rate's index in `RATES`."""
        found: list[tuple[tuple[str, object, str, int], int]] = []
        if not self._has_rates:
            return found
        for index, name in enumerate(RATES):
            limits = (
                (CONNECTION, peer, self._rules.limit(CONNECTION, name) if peer else 0),
                (ADDRESS, who.address, self._rules.limit(ADDRESS, name) if who.address else 0),
                (
                    PRINCIPAL,
                    who.principal,
                    self._rules.limit(PRINCIPAL, name, who.principal) if who.principal else 0,
                ),
                (SERVER, "", getattr(self._limits, name)),
            )
            found += [((scope, key, name, value), index) for scope, key, value in limits if value]
        return found

    def _gate(self, scope: str, key: object, name: str, per_s: int) -> RateGate:
        gate = self._gates.get((scope, key, name))
        if gate is None:
            gate = RateGate(name, scope, per_s, self._shared)
            self._gates[scope, key, name] = gate
        return gate

    def _quotas_of(self, topics: Collection[str]) -> list[QuotaGate]:
        quotas = self._topics.quotas
        if not quotas.meters:
            return []
        meters = dict.fromkeys(meter for name in topics for meter in quotas.of(name))
        return [self._quota(meter) for meter in meters]

    def _quota(self, meter: Meter) -> QuotaGate:
        gate = self._quotas.get(meter)
        if gate is None:
            gate = self._quotas[meter] = QuotaGate(meter, self._shared)
        return gate

    def _freed(self, meter: Meter) -> None:
        gate = self._quotas.get(meter)
        if gate is None:
            return
        if self._topics.quotas.meters.get(meter.prefix) is meter:
            gate.go_on()
        else:
            # There is no such quota any more.
            for peer in [peer for peer, one in self._waits_at.items() if one is gate]:
                self.forget(peer)
                self._shared.turns.later(partial(ask_again, peer))
