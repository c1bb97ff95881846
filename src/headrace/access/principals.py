"""Principals: who a peer is, and what that peer may do. Elsewhere: how a peer proves who it is."""

from dataclasses import dataclass
from enum import StrEnum

from headrace.access.grants import EVERYTHING, Grant
from headrace.access.operations import Name, Operation


class Kind(StrEnum):
    """Kind of proof. Each kind has a name space of its own: `token:a` and `cert:a` are two principals."""

    ANONYMOUS = "anonymous"
    TOKEN = "token"
    JWT = "jwt"
    CERTIFICATE = "cert"
    APPLICATION = "app"
    """The application's own function `logux.verify` has accepted the peer."""
    OPEN = "open"
    """Access control is off: every peer may do everything."""


@dataclass(frozen=True, eq=False)
class Principal:
    """An identified peer. Two principals are never equal: one that gets other grants is another one."""

    kind: Kind
    name: str
    grants: tuple[Grant, ...]
    expires_ms: int | None = None
    """Time at which the credentials end. None means never."""

    def allows(self, operation: Operation, name: Name) -> bool:
        return self.kind is Kind.OPEN or any(grant.allows(operation, name) for grant in self.grants)

    def has(self, operation: Operation) -> bool:
        """True if the principal may do this with some name."""
        return self.kind is Kind.OPEN or any(
            not grant.operations or operation in grant.operations for grant in self.grants
        )

    def may_join_as(self, processor: str) -> bool:
        """True if the principal may join any channel as this processor."""
        return self.kind is Kind.OPEN or any(
            pattern.matches(processor) for grant in self.grants for pattern in grant.processors
        )

    def is_expired(self, now_ms: int) -> bool:
        return self.expires_ms is not None and now_ms >= self.expires_ms

    def is_like(self, other: "Principal") -> bool:
        """True if both are the same peer with the same rights."""
        return (self.kind, self.name, self.grants, self.expires_ms) == (
            *(other.kind, other.name, other.grants),
            other.expires_ms,
        )

    def __str__(self) -> str:
        """Return the name by which this principal differs from all others. It may hold any characters."""
        return f"{self.kind}:{self.name}" if self.name else str(self.kind)


OPEN = Principal(Kind.OPEN, "", EVERYTHING)


def anonymous(grants: tuple[Grant, ...] = ()) -> Principal:
    """Return the principal of peers without credentials, on a server with access control."""
    return Principal(Kind.ANONYMOUS, "", grants)
