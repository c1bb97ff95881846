"""Reconnect delay of a client: a function from the attempt's number to seconds."""

import random
from collections.abc import Callable

Backoff = Callable[[int], float]
"""Return the seconds to wait after the failed attempt with this number. Attempts count from 0. They start
over once a server has answered, unless the client had to leave that server at once. An application may pass
its own function."""

_DOUBLINGS_MAX = 32


def exponential(first_s: float = 0.1, max_s: float = 10.0, jitter: float = 0.5) -> Backoff:
    """Return a backoff that doubles from `first_s` to `max_s`.

    A random part of each wait, at most the share `jitter`, is cut off, so that the clients of a restarted
    server do not all reconnect at the same time.
    """

    def backoff(attempt: int) -> float:
        wait_s = min(first_s * 2.0 ** min(attempt, _DOUBLINGS_MAX), max_s)
        return wait_s * (1.0 - jitter * random.random())  # not a secret: it only spreads load

    return backoff
