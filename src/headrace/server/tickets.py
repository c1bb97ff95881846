"""Tickets: short-lived credentials for the URL of one WebSocket handshake. Time is an argument.

A page in a browser can set no header of a WebSocket, and should hold no token that lasts. A server of the
application gets a ticket for it over HTTP. A ticket is good once, so that a URL in a log is of no use.
Elsewhere: who may get a ticket (`http/`), and what its bearer may do (`access.py`).
"""

import hashlib
import secrets
from typing import NamedTuple

from headrace.access.principals import Principal

TICKET_S = 30.0
"""Time for which a ticket is valid."""
TICKETS_MAX = 10_000
"""Tickets that are valid at a time."""
TICKETS_PER_PRINCIPAL_MAX = 1_000
TICKET_CHARACTERS_MAX = 100
"""Longest ticket that is looked at."""


class _Ticket(NamedTuple):
    principal: Principal
    expires_s: float


class Tickets:
    def __init__(self) -> None:
        self._tickets: dict[bytes, _Ticket] = {}
        """By hash of the ticket, the oldest first."""
        self._counts: dict[str, int] = {}
        """Valid tickets by the name of their principal: each request with a JWT makes a new principal."""

    def __len__(self) -> int:
        return len(self._tickets)

    def issue(self, principal: Principal, now_s: float) -> str | None:
        """Return a new ticket for a principal; None if there are too many."""
        self._forget_old(now_s)
        count = self._counts.get(str(principal), 0)
        if len(self._tickets) >= TICKETS_MAX or count >= TICKETS_PER_PRINCIPAL_MAX:
            return None
        ticket = secrets.token_urlsafe(32)
        self._tickets[_hash(ticket)] = _Ticket(principal, now_s + TICKET_S)
        self._counts[str(principal)] = count + 1
        return ticket

    def redeem(self, ticket: str, now_s: float) -> Principal | None:
        """Return the principal of a ticket, which is used up then; None if it is unknown, used or too old."""
        self._forget_old(now_s)
        if len(ticket) > TICKET_CHARACTERS_MAX:
            return None
        found = self._tickets.pop(_hash(ticket), None)
        if found is None:
            return None
        self._uncount(found.principal)
        return found.principal

    def _forget_old(self, now_s: float) -> None:
        while self._tickets:
            first = next(iter(self._tickets))
            principal, expires_s = self._tickets[first]
            if expires_s > now_s:
                break
            del self._tickets[first]
            self._uncount(principal)

    def _uncount(self, principal: Principal) -> None:
        name = str(principal)
        self._counts[name] -= 1
        if not self._counts[name]:
            del self._counts[name]


def _hash(ticket: str) -> bytes:
    return hashlib.sha256(ticket.encode("utf-8", "surrogatepass")).digest()
