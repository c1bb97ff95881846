"""Client certificates: the facts that a verified one states about its holder, and the grants that these give.

A rule is a fact with a pattern as its value, such as `CN:billing` or `URI:spiffe://example.com/*`. Facts are
of the subject (`CN`, `O`, `OU`) or of the alternative names (`DNS`, `URI`, `IP`, `EMAIL`).
Elsewhere: verification, which OpenSSL does in the handshake.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, Self

from headrace.access.grants import Grant, Pattern, parse_all
from headrace.access.principals import Kind, Principal
from headrace.errors import BadGrantError
from headrace.printing import quoted

_OF_SUBJECT = {"commonName": "CN", "organizationName": "O", "organizationalUnitName": "OU"}
_OF_NAMES = {"DNS": "DNS", "URI": "URI", "IP Address": "IP", "email": "EMAIL"}
KINDS = (*_OF_SUBJECT.values(), *_OF_NAMES.values())

_FORM = f"KIND:PATTERN, such as CN:billing, with one of the kinds {', '.join(KINDS)}"


class PeerCertificate(NamedTuple):
    """A certificate that OpenSSL has verified."""

    name: str
    """Name of its holder: the common name, or else the first other fact."""
    facts: tuple[tuple[str, str], ...]
    """Pairs of a kind and a value."""
    expires_ms: int

    @classmethod
    def parse(cls, told: Mapping[str, Any]) -> Self | None:
        """Return the facts in the answer of `ssl.SSLObject.getpeercert`; None if there are none."""
        subject = [pair for several in told.get("subject", ()) for pair in several]
        facts = [(_OF_SUBJECT[key], value) for key, value in subject if key in _OF_SUBJECT]
        names = told.get("subjectAltName", ())
        facts += [(_OF_NAMES[key], value) for key, value in names if key in _OF_NAMES]
        if not facts:
            return None
        common_names = [value for kind, value in facts if kind == "CN"]
        expires = datetime.strptime(told["notAfter"], "%b %d %H:%M:%S %Y GMT").replace(tzinfo=UTC)
        name = common_names[0] if common_names else facts[0][1]
        return cls(name, tuple(facts), int(expires.timestamp() * 1000))


class CertificateRule(NamedTuple):
    """Grants for the holders of certificates with a fact."""

    kind: str
    pattern: Pattern
    grants: tuple[Grant, ...]

    @classmethod
    def parse(cls, text: str, grants: Sequence[str]) -> Self:
        """Return the rule of a setting. Raises BadGrantError: a mistake never makes a rule wider."""
        kind, colon, pattern = text.partition(":")
        if kind not in KINDS or not colon or not pattern:
            raise BadGrantError(f"{quoted(text)} is not {_FORM}")
        if not grants:
            raise BadGrantError(f"the rule for {quoted(text)} has no grants, so it has no effect")
        return cls(kind, Pattern.parse(pattern), parse_all(grants))

    def matches(self, certificate: PeerCertificate) -> bool:
        return any(
            kind == self.kind and self.pattern.matches(value) for kind, value in certificate.facts
        )


def grants_of(certificate: PeerCertificate, rules: Iterable[CertificateRule]) -> tuple[Grant, ...]:
    """Return the grants of all rules that match."""
    found = (grant for rule in rules if rule.matches(certificate) for grant in rule.grants)
    return tuple(dict.fromkeys(found))


def principal_of(certificate: PeerCertificate, grants: tuple[Grant, ...]) -> Principal:
    return Principal(Kind.CERTIFICATE, certificate.name, grants, certificate.expires_ms)
