"""Newcomers: peers that are not known yet. They share a limited number of places, and addresses share them.

A peer is a newcomer until its handshake, its request or its credentials are complete. When all places are
taken, the address that holds most of them gives up one: that of the newcomer that has waited longest. So one
address that opens connections and sends nothing on them delays nobody else. Elsewhere: how long a newcomer
may take (`strangers.py`, `server/handshake.py`, `server/tls/transport.py`, `server/http/listener.py`).
"""

from collections.abc import Callable
from typing import Protocol

from headrace.access.quotas import address_of_limits

WAIT_S_MIN = 1.0
"""Time for which a newcomer keeps its place against peers whose address holds as many places."""

GAVE_WAY = "its place was needed, and its address held most of them"
"""Reason for the end of a newcomer's connection."""


class Newcomer(Protocol):
    """The part of a connection that is known here."""

    def __hash__(self) -> int: ...

    def give_way(self) -> None:
        """End the connection at once: another peer gets its place."""


class Newcomers:
    """All newcomers of one kind, such as those in a TLS handshake."""

    def __init__(
        self,
        limit: str,
        places_max: Callable[[], int],
        count_limit: Callable[[str, str], None],
        now_s: Callable[[], float],
    ) -> None:
        """`limit` names the setting that `places_max` returns. `count_limit` counts that it applied."""
        self._limit = limit
        self.places_max = places_max
        self._count_limit = count_limit
        self._now_s = now_s
        self._address: dict[Newcomer, str] = {}
        self._of: dict[str, dict[Newcomer, float]] = {}
        """By address: each newcomer with the time when it came, first come first."""
        self._by_count: dict[int, dict[str, None]] = {}
        """Addresses by the number of places that they hold."""
        self._most = 0
        """The largest number of places that an address holds."""

    def __len__(self) -> int:
        return len(self._address)

    def enter(self, newcomer: Newcomer, address: str) -> bool:
        """Give a newcomer a place. Return False if none is free and nobody gives way."""
        if len(self) >= self.places_max() and not self.make_room(address):
            return False
        self.add(newcomer, address)
        return True

    def add(self, newcomer: Newcomer, address: str) -> None:
        """Give a newcomer a place, also if none is free."""
        if newcomer in self._address:
            return
        address = address_of_limits(address)
        self._address[newcomer] = address
        of_address = self._of.setdefault(address, {})
        of_address[newcomer] = self._now_s()
        self._counted(address, len(of_address) - 1, len(of_address))

    def leave(self, newcomer: Newcomer) -> None:
        """Free the place of a newcomer: it is known now, or gone. Does nothing if it has no place."""
        address = self._address.pop(newcomer, None)
        if address is None:
            return
        of_address = self._of[address]
        del of_address[newcomer]
        if not of_address:
            del self._of[address]
        self._counted(address, len(of_address) + 1, len(of_address))

    def make_room(self, address: str) -> bool:
        """End the connection that gives way to one more of this address. Return False if none does."""
        found = self._gives_way(address)
        if found is None:
            self._count_limit(self._limit, "server")
            return False
        self._count_limit(self._limit, "address")
        self.leave(found)
        found.give_way()
        return True

    def has_room(self, address: str) -> bool:
        """True if `make_room` would find a connection that gives way."""
        return self._gives_way(address) is not None

    def _gives_way(self, address: str) -> Newcomer | None:
        if not self._most:
            return None
        address = address_of_limits(address)
        own = len(self._of.get(address, ()))
        crowd = address if own == self._most else next(iter(self._by_count[self._most]))
        newcomer, since_s = next(iter(self._of[crowd].items()))
        # The shares become more equal, or the newcomer has had its time.
        if self._most > own + 1 or self._now_s() >= since_s + WAIT_S_MIN:
            return newcomer
        return None

    def _counted(self, address: str, before: int, after: int) -> None:
        if before:
            same = self._by_count[before]
            del same[address]
            if not same:
                del self._by_count[before]
        if after:
            self._by_count.setdefault(after, {})[address] = None
        if after > self._most or self._most not in self._by_count:
            self._most = after
