"""Peers whose publish would be refused again: holds them for a while, and logs and counts refusals.

Such a peer would reconnect and send the same publish again, as fast as it can. A held peer does not: its
socket stays open, but is not read. The delay grows with each refusal of an address. The number of held
sockets is limited, in total and per address; beyond a limit, a peer is closed at once. Elsewhere: closing a
connection (`peers/connection.py`).
"""

import asyncio
from dataclasses import dataclass
from typing import Protocol

from headrace.access.quotas import address_of_limits
from headrace.config.settings import Limits
from headrace.model import Refusal
from headrace.server.metrics.metrics import Metrics
from headrace.server.peers.departures import Departures, UnreadPeer
from headrace.server.peers.summaries import Summaries

FORGOTTEN_AFTER_S = 60.0
"""Time without refusals until an address is forgotten."""
ADDRESSES_MAX = 4096
"""Remembered addresses. The address with the oldest first refusal is forgotten first."""
_CONNECTIONS_SHARE = 4
"""At most one in this many connections is held. Held sockets count as open connections."""


class Peer(UnreadPeer, Protocol):
    """The part of a connection that is known here."""

    protocol: str
    peer: str

    @property
    def address(self) -> str: ...


class Refusals:
    """The refusals of one server."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: Limits, metrics: Metrics) -> None:
        self._loop = loop
        self.limits = limits
        """Replaced when settings are reloaded, with effect from the next refusal on."""
        self._metrics = metrics
        self._addresses: dict[str, _Address] = {}
        self._departures = Departures(loop)
        self._summaries = Summaries(loop, "publishes refused")
        self.held: dict[Peer, _Address] = {}

    def delay_close(self, peer: Peer, reason: str, why: Refusal) -> float:
        """Count a refusal. Return the seconds for which the peer is held: 0.0 closes it at once."""
        now_s = self._loop.time()
        self._metrics.count_refusal(peer.protocol, why)
        address = self._address(address_of_limits(peer.address))
        address.refusals += 1
        address.refused_s = now_s
        held_s = self._delay_s(address)
        if held_s:
            self.held[peer] = address
            address.held += 1
            self._departures.watch(peer)
        held = f"; held for {held_s:g} s, later refusals are logged as a sum" if held_s else ""
        self._summaries.note(peer.peer, peer.address, reason, also=held)
        return held_s

    def release(self, peer: Peer) -> None:
        """Stop holding a peer: its time is over, it has left, or the server stops."""
        address = self.held.pop(peer, None)
        if address is not None:
            address.held -= 1
            self._departures.forget(peer)

    def tick(self) -> None:
        """Log summaries, and forget addresses without recent refusals."""
        self._summaries.tick()
        now_s = self._loop.time()
        for name, address in list(self._addresses.items()):
            if not address.held and now_s >= address.refused_s + FORGOTTEN_AFTER_S:
                del self._addresses[name]

    def close(self) -> None:
        """Log the last summaries and forget all held peers: the server stops."""
        self._summaries.close()
        self._addresses.clear()
        self.held.clear()
        self._departures.close()

    def _address(self, name: str) -> "_Address":
        address = self._addresses.get(name)
        if address is None:
            if len(self._addresses) >= ADDRESSES_MAX:
                del self._addresses[next(iter(self._addresses))]
            address = self._addresses[name] = _Address()
        return address

    def _delay_s(self, address: "_Address") -> float:
        limits = self.limits
        held_max = min(limits.refused_connections_max, limits.connections_max // _CONNECTIONS_SHARE)
        if len(self.held) >= held_max or address.held >= limits.refused_connections_per_address_max:
            return 0.0
        doublings = min(address.refusals - 1, 32)
        return min(limits.refusal_delay_s * (1 << doublings), limits.refusal_delay_max_s)


@dataclass(slots=True)
class _Address:
    """One address: its recent refusals."""

    refusals: int = 0
    refused_s: float = 0.0
    held: int = 0
