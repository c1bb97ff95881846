"""How long a client waits before it connects again: a function from attempt to seconds."""

import random
from collections.abc import Callable

Backoff = Callable[[int], float]
"""Seconds to wait after the failed attempt of that number. Attempts count from 0 and start over
once a server has answered, unless it had to be left at once. May be the application's own."""

_DOUBLINGS_MAX = 32


def exponential(first_s: float = 0.1, max_s: float = 10.0, jitter: float = 0.5) -> Backoff:
    """Doubles from `first_s` to `max_s`.

    Up to the share `jitter` of each wait is cut off at random, so that the clients of a restarted
    server do not come back all at once.
    """

    def backoff(attempt: int) -> float:
        wait_s = min(first_s * 2.0 ** min(attempt, _DOUBLINGS_MAX), max_s)
        return wait_s * (1.0 - jitter * random.random())  # spreads load, hides nothing

    return backoff
