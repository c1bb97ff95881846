"""Log lines about peers that do the same again and again: the first of an address, and later ones as a sum.

A flood of wrong tokens or bad messages must not become a flood of log lines.
"""

import asyncio
import logging
from dataclasses import dataclass

from headrace.access.quotas import address_of_limits

logger = logging.getLogger(__name__)

SUMMARY_S = 60.0
"""Time between the sums of an address, and time after which a quiet address is forgotten."""
ADDRESSES_MAX = 4096
"""Remembered addresses. Lines about further ones are summed up together."""

_OTHERS = "other addresses"


@dataclass(slots=True)
class _Address:
    since_s: float
    """Time of the last sum, or of the first line."""
    lines: int = 0
    """Lines that were logged in full."""
    unlogged: int = 0
    """Lines since the last sum."""
    last_reason: str = ""


class Summaries:
    def __init__(self, loop: asyncio.AbstractEventLoop, what: str) -> None:
        """`what` names the things that are summed up, such as "connections closed"."""
        self._loop = loop
        self._what = what
        self._addresses: dict[str, _Address] = {}

    def note(
        self, peer: str, address: str, reason: str, *, lines_max: int = 1, also: str = ""
    ) -> None:
        """Log a line, or count it if the address has had `lines_max`. A sum does not show `also`."""
        name = address_of_limits(address)
        if name not in self._addresses and len(self._addresses) >= ADDRESSES_MAX:
            name = _OTHERS
        known = self._addresses.get(name)
        if known is None:
            known = self._addresses[name] = _Address(self._loop.time())
        if known.lines < lines_max and name != _OTHERS:
            known.lines += 1
            logger.warning("%s: closing: %s%s", peer, reason, also)
        else:
            known.unlogged += 1
            known.last_reason = reason

    def tick(self) -> None:
        """Log the sums that are due, and forget quiet addresses."""
        now_s = self._loop.time()
        for name, known in list(self._addresses.items()):
            if now_s >= known.since_s + SUMMARY_S:
                if not known.unlogged:
                    del self._addresses[name]
                self._sum_up(name, known)

    def close(self) -> None:
        """Log the last sums: the server stops."""
        for name, known in self._addresses.items():
            self._sum_up(name, known)
        self._addresses.clear()

    def _sum_up(self, name: str, known: _Address) -> None:
        now_s = self._loop.time()
        if known.unlogged:
            logger.warning(
                "%s: %d more %s in %.0f s, the last: %s",
                name,
                known.unlogged,
                self._what,
                now_s - known.since_s,
                known.last_reason,
            )
        known.unlogged, known.since_s = 0, now_s
