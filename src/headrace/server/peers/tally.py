"""Counts of what peers have open, with a limit for the server, each address, each principal and connection.

There is one tally of connections, one of those of HTTP, one of subscriptions, and one of requests that
wait. Elsewhere: rates (`throttle.py`), and the refusals themselves, which each protocol expresses in its own
terms.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from headrace.access.principals import Kind, Principal
from headrace.access.quotas import address_of_limits
from headrace.config.settings import Limits, PeerLimits
from headrace.printing import printable
from headrace.server.metrics.metrics import Metrics

SERVER = "server"
ADDRESS = "address"
PRINCIPAL = "principal"
CONNECTION = "connection"


class Who(NamedTuple):
    """The keys under which a peer is counted."""

    address: str
    principal: str = ""
    """Empty without access control. All peers without credentials are one principal."""

    @classmethod
    def of(cls, address: str, principal: Principal) -> "Who":
        return cls.of_address(address).as_principal(principal)

    @classmethod
    def of_address(cls, address: str) -> "Who":
        return cls(address_of_limits(address))

    def as_principal(self, principal: Principal) -> "Who":
        """Return the keys of a peer with this address that has shown who it is."""
        return Who(self.address, "" if principal.kind is Kind.OPEN else str(principal))


class PeerRules:
    """The limits of peers, resolved: a principal's own table comes before the one for all principals."""

    def __init__(self, limits: Limits) -> None:
        self._tables = {one.of: one for one in limits.peer}

    def limit(self, scope: str, name: str, principal: str = "") -> int:
        """Return a limit; 0 if there is none."""
        tables = [self._tables.get(scope)]
        if scope == PRINCIPAL:
            tables.insert(0, self._tables.get(principal))
        values = (getattr(one, name) for one in tables if one is not None)
        return next((value for value in values if value is not None), 0)

    def has(self, name: str) -> bool:
        """True if any table sets this limit."""
        return any(getattr(one, name) for one in self._tables.values())

    def tables(self) -> list[PeerLimits]:
        return list(self._tables.values())


class Tally:
    """Count of open things of one kind, such as connections."""

    def __init__(
        self,
        name: str,
        rules: Callable[[], PeerRules],
        total_max: Callable[[], int],
        metrics: Metrics,
        has_room: Callable[[str], bool] = lambda address: False,
    ) -> None:
        """`name` is that of the limit in every table, and `total_max` returns the limit for all.

        `has_room` is true if something gives way to a peer of an address when that limit is reached.
        """
        self._name = name
        self._rules = rules
        self._total_max = total_max
        self._metrics = metrics
        self._has_room = has_room
        self.total = 0
        self._of: Counter[tuple[str, str]] = Counter()

    def refusal(self, who: Who, own: int = 0) -> str:
        """Return the reason why this peer may not open one more, and count it; empty if it may.

        `own` is the number that its connection has open.
        """
        rules, name = self._rules(), self._name
        total_max = self._total_max()
        if total_max and self.total >= total_max and not self._has_room(who.address):
            return self._refused(SERVER, f"{name} is reached")
        found = self._of[ADDRESS, who.address] if who.address else 0
        if found and (limit := rules.limit(ADDRESS, name)) and found >= limit:
            return self._refused(ADDRESS, f"{name} of this address is reached")
        if who.principal:
            found = self._of[PRINCIPAL, who.principal]
            limit = rules.limit(PRINCIPAL, name, who.principal)
            if limit and found >= limit:
                return self._refused(PRINCIPAL, f"{name} of {printable(who.principal)} is reached")
        limit = rules.limit(CONNECTION, name)
        if limit and own >= limit:
            return self._refused(CONNECTION, f"{name} of a connection is reached")
        return ""

    def excess(self, who: Who) -> str:
        """Return the reason why a principal has too many open, after `move`; empty if it has not."""
        limit = self._rules().limit(PRINCIPAL, self._name, who.principal) if who.principal else 0
        if limit and self._of[PRINCIPAL, who.principal] > limit:
            return self._refused(
                PRINCIPAL, f"{self._name} of {printable(who.principal)} is reached"
            )
        return ""

    def _refused(self, of: str, reason: str) -> str:
        self._metrics.count_limit(self._name, of)
        return reason

    def add(self, who: Who, count: int = 1) -> None:
        """Count more, or fewer if `count` is negative."""
        self.total += count
        for key in self._keys(who):
            self._of[key] += count
            if not self._of[key]:
                del self._of[key]

    def move(self, before: Who, after: Who, count: int) -> None:
        """Count what a peer has open under another name: it has shown who it is."""
        self.add(before, -count)
        self.add(after, count)

    @staticmethod
    def _keys(who: Who) -> list[tuple[str, str]]:
        keys = [(ADDRESS, who.address)] if who.address else []
        return [*keys, (PRINCIPAL, who.principal)] if who.principal else keys
