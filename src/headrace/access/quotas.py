"""Arithmetic of rates: buckets of tokens, and the order in which publishers that wait for one take turns.

Times are arguments. Elsewhere: the limits of a server and the publishers that they hold back
(`server/peers/throttle.py`), and the bytes that are kept (`log/quota.py`).
"""

import ipaddress
from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

BURST_S = 1.0
"""A rate may be used at once for this time: short bursts are not slowed."""

_ROUNDING = 1e-6
"""Tokens by which sums of floating-point numbers may be off."""

_ROUNDING_S = 1e-6
"""Seconds by which sums of times may be off."""

T = TypeVar("T", bound=Hashable)


class Bucket:
    """A bucket of tokens. It may be overdrawn: a publish is stored whole, and the next one waits longer.

    A bucket that is open takes any amount. So a publish that is larger than a burst is late and not stuck.
    """

    __slots__ = ("_at_s", "_level", "_per_s")

    def __init__(self, per_s: float, now_s: float) -> None:
        self._per_s = per_s
        self._level = self._full
        self._at_s = now_s

    @property
    def _full(self) -> float:
        return max(1.0, self._per_s * BURST_S)

    def change(self, per_s: float, now_s: float) -> None:
        """Use another rate from now on. A debt stays."""
        self._refill(now_s)
        self._per_s = per_s
        self._level = min(self._level, self._full)

    def is_open(self, now_s: float) -> bool:
        self._refill(now_s)
        return self._level >= 1 - _ROUNDING

    def take(self, amount: float) -> None:
        self._level -= amount

    def opens_in_s(self, now_s: float) -> float:
        """Return the seconds until the bucket is open; 0 if it is."""
        return 0.0 if self.is_open(now_s) else (1 - self._level) / self._per_s + _ROUNDING_S

    def is_full(self, now_s: float) -> bool:
        """True if nothing was taken lately: a new bucket would be the same."""
        self._refill(now_s)
        return self._level >= self._full

    def _refill(self, now_s: float) -> None:
        if now_s > self._at_s:
            self._level = min(self._full, self._level + (now_s - self._at_s) * self._per_s)
            self._at_s = now_s


class FairQueue(Generic[T]):
    """Queue of publishers that wait for one limit, in an order that gives each of them the same share of it.

    This is start-time fair queuing: each turn begins, in virtual time, where the last turn of the same item
    ended, or at the present virtual time if that is later. A turn is as long as its cost. The turn that
    begins first is next. So an item with large turns gets fewer of them.
    """

    def __init__(self) -> None:
        self._turns: list[tuple[float, int, T]] = []
        self._waiting: dict[T, int] = {}
        """The number of the turn of each item. Other turns in the heap are void."""
        self._ends: dict[T, float] = {}
        self._now = 0.0
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, item: T) -> bool:
        return item in self._waiting

    def push(self, item: T, cost: float) -> None:
        """Add an item that is not waiting, with the cost of its next turn."""
        assert item not in self._waiting
        begin = max(self._now, self._ends.get(item, 0.0))
        self._ends[item] = begin + cost
        self._count += 1
        self._waiting[item] = self._count
        heappush(self._turns, (begin, self._count, item))

    def pop(self) -> T:
        """Remove and return the item whose turn it is."""
        while True:
            begin, number, item = heappop(self._turns)
            if self._waiting.get(item) == number:
                break
        del self._waiting[item]
        self._now = begin
        if not self._waiting:
            # The next ones start equal, but the item that goes now may come back at once.
            self._turns.clear()
            self._ends = {item: self._ends[item]}
        elif len(self._ends) > 2 * len(self._waiting) + 8:
            self._ends = {one: end for one, end in self._ends.items() if end > self._now}
        return item

    def discard(self, item: T) -> None:
        """Forget an item, which may be waiting."""
        self._waiting.pop(item, None)
        self._ends.pop(item, None)
        if len(self._turns) > 2 * len(self._waiting) + 8:
            self._turns = [turn for turn in self._turns if self._waiting.get(turn[2]) == turn[1]]
            heapify(self._turns)


def address_of_limits(address: str) -> str:
    """Return the address that a peer's limits are counted under.

    A single machine has a whole /64 network of IPv6 addresses, so all of that counts as one.
    """
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address.strip("[]").partition("%")[0])
    except ValueError:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    if parsed.is_loopback:
        return str(parsed)
    return str(ipaddress.IPv6Network((int(parsed) >> 64 << 64, 64)))
