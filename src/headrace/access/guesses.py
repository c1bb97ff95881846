"""Wrong credentials by address: how long the answer to the next wrong ones waits. Nobody is locked out.

Credentials that are right are answered at once, whatever came from their address before: clients behind one
proxy share an address, and a client whose token was wrong may show a right one next.
"""

from heapq import heappop, heappush

FREE = 100
"""Wrong credentials of one address that are answered at once. The allowance fills up again with time."""
REFILL_S = 0.6
"""Time in which the allowance grows by one."""
DELAY_MAX_S = 3.0
"""Longest wait of an answer. It is shorter than the time for a handshake."""
DELAYED_MAX = 256
"""Answers that wait at the same time. Further wrong credentials are refused at once."""
ADDRESSES_MAX = 4096
"""Remembered addresses. The one that was wrong the longest time ago is forgotten first."""


class Guesses:
    def __init__(self) -> None:
        self._used: dict[str, tuple[float, float]] = {}
        """By address: the used part of the allowance, and the time when that was so."""
        self._until: list[float] = []
        """Heap of the times when waiting answers are sent."""

    def wrong(self, address: str, now_s: float) -> float | None:
        """Note wrong credentials. Return the seconds that the answer has to wait; None if too many wait."""
        used = self._now(self._used.pop(address, (0.0, now_s)), now_s) + 1
        # Beyond the allowance the debt stays bounded, so that it is paid back within a minute or two.
        self._used[address] = min(used, 2.0 * FREE), now_s
        if len(self._used) > ADDRESSES_MAX:
            del self._used[next(iter(self._used))]
        delay_s = min(DELAY_MAX_S, max(0.0, used - FREE))
        while self._until and self._until[0] <= now_s:
            heappop(self._until)
        if delay_s and len(self._until) >= DELAYED_MAX:
            return None
        if delay_s:
            heappush(self._until, now_s + delay_s)
        return delay_s

    def tick(self, now_s: float) -> None:
        """Forget the addresses whose allowance is full again, oldest first."""
        while self._used:
            address = next(iter(self._used))
            if self._now(self._used[address], now_s) > 0:
                break
            del self._used[address]

    @staticmethod
    def _now(known: tuple[float, float], now_s: float) -> float:
        used, at_s = known
        return max(0.0, used - (now_s - at_s) / REFILL_S)
