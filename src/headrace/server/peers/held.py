"""Memory for publishes that wait for a rate or a quota, and publishers for whose publishes there is none.

While little of `limits.held_bytes_max` is used, a publisher that waits is read on, for its PINGs. Above
`CROWDED_SHARE`, a connection with a publish that waits is not read until less is used, and if its peer leaves
meanwhile, its publishes do not wait for long. Above the limit, the server drops what
such a connection has brought and *parks* it: it reads nothing more, keeps the socket open, and ends the
connection when there is memory. Nothing dropped was acknowledged, so its client connects again and sends it
again. The limit is exceeded by one read at most.

Elsewhere: who has to wait (`throttle.py`), and the commands that wait (`connection.py`).
"""

import asyncio
from itertools import islice
from typing import Protocol

from headrace.config.settings import Limits
from headrace.server.loop import Turns
from headrace.server.metrics.metrics import Metrics
from headrace.server.peers.departures import Departures, UnreadPeer

HELD_BACK_BYTES_MAX = 72 << 20
"""Bytes of publishes that wait, above which a connection is not read; also while commits are held back.

It is the largest window of a client, 256 of the largest payloads, so that a PING behind them is still read
and answered.
"""
CROWDED_SHARE = 3 / 4
"""Share of `limits.held_bytes_max` above which each connection may hold one read."""
PARKED_S_MAX = 60.0
"""Longest time for which a connection is parked. Its peer may be gone without a word."""
AT_ONCE_MAX = 250
"""Parked connections that end, and others that are read again, in one `tick`."""
TOO_MUCH = "too many publishes of all clients wait for a rate or a quota: connect again"
"""Reason for the end of a parked connection."""


class WaitingPeer(UnreadPeer, Protocol):
    """The part of a connection that is known here."""

    def hear_again(self) -> None:
        """Read again, if there is memory for it."""


class HeldMemory:
    """The memory of one server for publishes that wait."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, turns: Turns, limits: Limits, metrics: Metrics
    ) -> None:
        self._turns = turns
        self.limits = limits
        self._metrics = metrics
        self.bytes = 0
        self._parked: dict[UnreadPeer, int] = {}
        """Parked connections, the first first, each with the memory that its publishes would take."""
        self._unread: dict[WaitingPeer, None] = {}
        """Connections that are not read because of the memory for their publishes, which wait."""
        self._departures = Departures(loop)

    @property
    def parked(self) -> int:
        """Number of parked connections."""
        return len(self._parked)

    @property
    def is_crowded(self) -> bool:
        """True if most of the memory is used."""
        return self.bytes > CROWDED_SHARE * self.limits.held_bytes_max

    @property
    def connection_bytes_max(self) -> int:
        """Memory above which one connection is not read."""
        return 0 if self.is_crowded else min(HELD_BACK_BYTES_MAX, self.limits.held_bytes_max)

    def is_full_for(self, own_bytes: int) -> bool:
        """True if a connection that holds this much may hold nothing more, because of the others."""
        return self.bytes - own_bytes > self.limits.held_bytes_max

    def stop_reading(self, peer: WaitingPeer) -> None:
        """Note a connection that is not read until `reads_again`."""
        if self.is_crowded:
            self._metrics.count_limit("held_bytes_max")
        self._unread[peer] = None
        self._departures.watch(peer)

    def reads_again(self, peer: WaitingPeer) -> None:
        del self._unread[peer]
        self._departures.forget(peer)

    def park(self, peer: UnreadPeer, weight: int) -> None:
        """Note a connection that ends when there is memory for its publishes, or when its peer leaves."""
        self._metrics.count_limit("held_bytes_max")
        self._parked[peer] = weight
        self._departures.watch(peer)

    def release(self, peer: UnreadPeer) -> None:
        """Forget a connection, which may be parked."""
        if self._parked.pop(peer, None) is not None:
            self._departures.forget(peer)

    def tick(self) -> None:
        """Use memory that is free again. Called every moment."""
        if not self.is_crowded:
            for waiting in list(islice(self._unread, AT_ONCE_MAX)):
                self._unread[waiting] = self._unread.pop(waiting)  # the next ones are next
                self._turns.later(waiting.hear_again)
        for parked in self._next_to_end():
            self.release(parked)
            self._turns.later(parked.end_hold)

    def _next_to_end(self) -> list[UnreadPeer]:
        """Return the parked connections for which there is memory, the first first."""
        room = CROWDED_SHARE * self.limits.held_bytes_max - self.bytes
        is_empty = not self.bytes
        found: list[UnreadPeer] = []
        for peer, weight in islice(self._parked.items(), AT_ONCE_MAX):
            if weight > room and not is_empty:
                break
            room, is_empty = room - weight, False
            found.append(peer)
        return found

    def close(self) -> None:
        self._parked.clear()
        self._departures.close()
