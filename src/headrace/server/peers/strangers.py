"""Peers that must show credentials and have not. Each may stay for a short time, and send a few bytes.

When the server has no room for a connection, one of them gives way (`newcomers.py`), also one that was
refused and whose connection has not ended yet.

Elsewhere: who a peer is (`server/access.py`), and how a connection ends (`connection.py`).
"""

import asyncio
from typing import Protocol

from headrace.config.settings import Limits
from headrace.server.peers.newcomers import Newcomers


class UnknownPeer(Protocol):
    """The part of a connection that is known here."""

    def __hash__(self) -> int: ...

    def end_stranger(self, limit: str) -> None:
        """End the connection, which has reached this limit."""

    def give_way(self) -> None:
        """End the connection at once: another peer gets its place."""


class _Visit:
    """Time and bytes that a peer has used of its limits."""

    __slots__ = ("bytes", "opened_s")

    def __init__(self, opened_s: float) -> None:
        self.opened_s = opened_s
        self.bytes = 0


class Strangers:
    """All such peers of one server."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, limits: Limits, newcomers: Newcomers
    ) -> None:
        self._loop = loop
        self.limits = limits
        self.newcomers = newcomers
        self._visits: dict[UnknownPeer, _Visit] = {}
        """By peer. The first came first."""

    def __len__(self) -> int:
        return len(self._visits)

    def add(self, peer: UnknownPeer, address: str) -> None:
        self._visits[peer] = _Visit(self._loop.time())
        self.newcomers.add(peer, address)

    def forget(self, peer: UnknownPeer) -> None:
        """Forget a peer: it has shown its credentials, or it is gone."""
        self._visits.pop(peer, None)
        self.newcomers.leave(peer)

    def heard(self, peer: UnknownPeer, size: int) -> None:
        """Note that `size` bytes of any peer were received and handled."""
        if self._visits and (visit := self._visits.get(peer)) is not None:
            visit.bytes += size
            if visit.bytes > self.limits.authentication_bytes_max:
                self._end(peer, "authentication_bytes_max")

    def tick(self) -> None:
        """End the peers whose time is over."""
        until_s = self._loop.time() - self.limits.authentication_s
        for peer, visit in list(self._visits.items()):
            if visit.opened_s > until_s:
                break
            self._end(peer, "authentication_s")

    def _end(self, peer: UnknownPeer, limit: str) -> None:
        del self._visits[peer]
        peer.end_stranger(limit)
