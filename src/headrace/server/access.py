"""The one place that decides who a peer is and what it may do, for every protocol and endpoint.

Connections and endpoints ask here; neither sessions nor the broker know of access control. Rights come from
tokens (of the configuration and of `tokens.json`), and from functions of the application and other proofs
that connections turn into a `Principal`. Elsewhere: grants and tokens themselves (`headrace.access`), the
refusals in the terms of each protocol.

Access control is on if there is anything to check credentials against, and it stays on until the server ends:
neither an empty configuration nor a file that is gone or damaged opens a door.
"""

import importlib
import inspect
import logging
import os
import secrets
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary

from headrace.access import tokens
from headrace.access.certificates import (
    CertificateRule,
    PeerCertificate,
    grants_of,
    principal_of,
)
from headrace.access.grants import Grant, Pattern, configured, parse_all
from headrace.access.guesses import Guesses
from headrace.access.operations import Member, Name, Operation
from headrace.access.principals import OPEN, Kind, Principal, anonymous
from headrace.access.quotas import address_of_limits
from headrace.access.tokens import KnownToken, TokenIndex, Tokens
from headrace.config.protocols import Access as AccessSettings
from headrace.config.settings import Config
from headrace.config.values import Address, is_loopback
from headrace.errors import ConfigError, DamagedTokensError, ListenError
from headrace.log import shared_file
from headrace.log.store import Runner
from headrace.printing import quoted
from headrace.server.jwt import load_jwt
from headrace.server.metrics.metrics import Metrics
from headrace.server.tickets import Tickets

logger = logging.getLogger(__name__)

FILE_CHECK_S = 0.25
"""Interval between looks at the file of tokens."""

MISDIRECTED = (
    "this host name is not known here: ask for localhost or a loopback address, or add it to "
    "listen.hosts"
)
INSECURE_OPEN = "insecure-open"
DAMAGED = "tokens.json is damaged: nobody gets in with a stored token that was not known before"

EXPIRED = "the credentials have expired"
CHANGED = "the credentials were revoked or changed"

_UNKNOWN = "the token is not known here"
_REVOKED = "the token was revoked"
_NO_TICKET = "the ticket is not known, was used before, or is too old: get a new one"
_TOO_MANY = "wrong credentials come too fast: wait, and correct them"

End = Callable[[str], None]
"""Function that ends a connection or a request, with a reason."""


class Refused(NamedTuple):
    """Credentials that are not accepted."""

    reason: str
    delay_s: float = 0.0
    """Time to wait with the answer: somebody at this address has guessed wrong very often."""


class Access:
    def __init__(
        self, config: Config, file: Path, now_ms: Callable[[], int], metrics: Metrics
    ) -> None:
        """Read the tokens. `file` is that of stored tokens, which may be missing or damaged."""
        self._file = file
        self._now_ms = now_ms
        self._metrics = metrics
        self._key = secrets.token_bytes(32)
        self._settings = config.access
        self._asks_for_certificates = bool(config.listen.tls.client_ca)
        self._certificate_rules: list[CertificateRule] = []
        self._by_certificate: WeakValueDictionary[PeerCertificate, Principal] = (
            WeakValueDictionary()
        )
        self._certified: WeakSet[Principal] = WeakSet()
        """Principals of certificates whose grants are still the same."""
        self._insecure_open = config.listen.insecure_open
        self._hosts = config.listen.hosts
        self._stored: Tokens = ()
        self._stamp: shared_file.Stamp | None = None
        self.damage = ""
        """Reason why the file of tokens cannot be read; empty if it is sound or missing."""
        self.is_on = False
        self.anonymous: Principal = OPEN
        """Principal of peers without credentials."""
        self._jwt = load_jwt(config.access.jwt)
        """Check of JWTs; None without the keys of an issuer."""
        self._tickets = Tickets()
        self._index = TokenIndex((), self._key)
        self._current: dict[Principal, None] = {}
        """Principals of tokens that are valid, except for their time."""
        self._holders: dict[Principal, dict[End, None]] = {}
        """Connections and requests in progress, by their principal."""
        self._guesses = Guesses()
        self.on_change: Callable[[str, str], None] = lambda action, token: None
        """Called with the action (`token.create`, …) and the token's name when the stored tokens change."""
        self._looking = False
        self._looked_s = 0.0
        self._take(_read(file))
        self._apply()

    # Identification

    def identify(
        self, token: str, address: str, now_s: float, protocol: str
    ) -> Principal | Refused:
        """Return the principal of a peer that shows a token. Without access control, everyone is the same."""
        if not self.is_on:
            return OPEN
        known = self._index.find(token)
        if known is None:
            found = self._by_jwt(token)
            if isinstance(found, Principal):
                return found
            return self._wrong(found, address, now_s, protocol)
        if known.is_revoked or known.principal.is_expired(self._now_ms()):
            self._metrics.count_credentials(protocol)  # no guess: answered at once
            return Refused(_REVOKED if known.is_revoked else EXPIRED)
        return known.principal

    def _by_jwt(self, token: str) -> Principal | str:
        if self._jwt is None or not tokens.is_jwt(token):
            return _UNKNOWN
        return self._jwt(token, self._now_ms())

    def issue_ticket(self, principal: Principal, now_s: float) -> str | None:
        """Return a ticket for the principal's next WebSocket; None if there are too many."""
        return self._tickets.issue(principal, now_s)

    def redeem(self, ticket: str, address: str, now_s: float, protocol: str) -> Principal | Refused:
        """Return the principal of a ticket, which is used up then."""
        if not self.is_on:
            return OPEN
        found = self._tickets.redeem(ticket, now_s)
        if found is None or found is OPEN or not self._is_valid(found):
            return self._wrong(_NO_TICKET, address, now_s, protocol)
        return found

    def _wrong(self, reason: str, address: str, now_s: float, protocol: str) -> Refused:
        self._metrics.count_credentials(protocol)
        delay_s = self._guesses.wrong(address_of_limits(address), now_s)
        return Refused(_TOO_MANY if delay_s is None else reason, delay_s or 0.0)

    def certified(self, certificate: PeerCertificate | None) -> Principal:
        """Return the principal of a peer that has shown no token, but perhaps a certificate."""
        if certificate is None or not self.is_on:
            return self.anonymous
        grants = grants_of(certificate, self._certificate_rules)
        if not grants:
            return self.anonymous
        principal = self._by_certificate.get(certificate)
        if principal is None:
            principal = principal_of(certificate, grants)
            self._by_certificate[certificate] = principal
            self._certified.add(principal)
        return principal

    # Decisions

    def decide(self, principal: Principal, operation: Operation, name: Name) -> bool:
        """Return True if the principal may perform the operation on this name."""
        if principal is OPEN:
            return True
        is_allowed = self._is_valid(principal) and principal.allows(operation, name)
        self._metrics.count_decision(operation, is_allowed=is_allowed)
        return is_allowed

    def has(self, principal: Principal, operation: Operation) -> bool:
        """Return True if the principal may perform the operation on some name."""
        return principal is OPEN or (self._is_valid(principal) and principal.has(operation))

    def may_join_as(self, principal: Principal, processor: str) -> bool:
        """Return True if the principal may join some channel as this processor."""
        return principal is OPEN or (self._is_valid(principal) and principal.may_join_as(processor))

    def _is_valid(self, principal: Principal) -> bool:
        return self.is_current(principal) and not principal.is_expired(self._now_ms())

    def valid_ms(self, principal: Principal) -> int:
        """Return the milliseconds until the principal's credentials expire; 0 if they do not expire."""
        if principal.expires_ms is None:
            return 0
        return max(1, principal.expires_ms - self._now_ms())

    def is_current(self, principal: Principal) -> bool:
        """False if the principal's credentials were revoked or changed."""
        if principal.kind in (Kind.OPEN, Kind.ANONYMOUS):
            return principal is self.anonymous
        if principal.kind is Kind.CERTIFICATE:
            return principal in self._certified
        return principal.kind is not Kind.TOKEN or principal in self._current

    # Expiry and revocation

    def hold(self, principal: Principal, end: End) -> None:
        """Call `end` when the principal's credentials end, until `release` is called."""
        if not self.is_current(principal):
            end(CHANGED)
        else:
            self._holders.setdefault(principal, {})[end] = None

    def release(self, principal: Principal, end: End) -> None:
        holders = self._holders.get(principal)
        if holders is not None:
            holders.pop(end, None)
            if not holders:
                del self._holders[principal]

    def holders(self, principal: Principal) -> int:
        """Return the number of connections and requests of a principal."""
        return len(self._holders.get(principal, ()))

    def tick(self, now_s: float, runner: Runner) -> None:
        """End what has expired, and look for a change of the stored tokens."""
        now_ms = self._now_ms()
        for principal in [one for one in self._holders if one.is_expired(now_ms)]:
            self._end(principal, EXPIRED)
        self._guesses.tick(now_s)
        if not self._looking and now_s - self._looked_s >= FILE_CHECK_S:
            self._looking, self._looked_s = True, now_s
            runner.background(self._look, self._looked)

    def _look(self) -> "_Found | None":
        """Return the file of tokens if it has changed. Runs in a thread."""
        try:
            if shared_file.stamp_of(self._file) == self._stamp:
                return None
        except OSError as error:
            return _Found(self._stamp, None, f"{error.strerror}")
        return _read(self._file)

    def _looked(self, result: object) -> None:
        self._looking = False
        if isinstance(result, _Found):
            self._take(result)
            self._apply()
        elif result is not None:
            logger.error("cannot look for new tokens: %s", result)

    # Changes

    def reload(self, config: Config) -> None:
        """Apply the settings in force, and read the stored tokens again."""
        self._settings, self._hosts = config.access, config.listen.hosts
        try:
            self._jwt = load_jwt(config.access.jwt)
        except ConfigError as error:
            logger.error("SIGHUP: the keys and rules of JWTs stay as they were: %s", error)
        self._asks_for_certificates = bool(config.listen.tls.client_ca)
        self._take(_read(self._file))
        self._apply()

    def _take(self, found: "_Found") -> None:
        """Take over the stored tokens. A damaged or missing file leaves the known ones as they are."""
        is_news = found.damage != self.damage
        self.damage = found.damage
        if found.damage:
            self.is_on = True
            if is_news:
                logger.error(
                    "%s cannot be read: %s; the tokens known so far stay, and no door opens: restore the "
                    "file from a backup, or delete it and make new tokens",
                    self._file,
                    found.damage,
                )
        elif found.tokens is not None:
            self._note_changes(found.tokens)
            self._stored = found.tokens
            self.is_on = True
        elif self._stamp is not None:
            logger.error(
                "%s is gone: its tokens are valid no longer, and access control stays on until the server "
                "is started again",
                self._file,
            )
            self._note_changes(())
            self._stored = ()
        self._stamp = found.stamp

    def _note_changes(self, stored: Tokens) -> None:
        before = {one.sha256: one for one in self._stored}
        after = {one.sha256: one for one in stored}
        for one in stored:
            old = before.get(one.sha256)
            if old is None:
                self.on_change("token.create", one.name)
            elif one.revoked_ms is not None and old.revoked_ms is None:
                self.on_change("token.revoke", one.name)
            elif one != old:
                self.on_change("token.change", one.name)
        for digest, old in before.items():
            if digest not in after:
                self.on_change("token.remove", old.name)

    def _apply(self) -> None:
        settings = self._settings
        self.is_on = self.is_on or self._asks_for_certificates or _asks_for_control(settings)
        before = {known.sha256: known for known in self._index}
        known = [
            KnownToken(
                one.sha256.lower(),
                Principal(Kind.TOKEN, one.name, configured(one.grants, one.user)),
            )
            for one in settings.token
        ]
        known += [
            KnownToken(one.sha256, tokens.principal_of(one), is_revoked=one.revoked_ms is not None)
            for one in self._stored
        ]
        # A token that is the same as before keeps its principal, and so its connections.
        kept = [
            old if (old := before.get(one.sha256)) is not None and old.is_like(one) else one
            for one in known
        ]
        self._index = TokenIndex(kept, self._key)
        self._current = dict.fromkeys(self._index.principals)
        rules = [CertificateRule.parse(one.match, one.grants) for one in settings.certificate]
        self._certificate_rules = rules
        for certificate, principal in list(self._by_certificate.items()):
            if grants_of(certificate, rules) != principal.grants:
                del self._by_certificate[certificate]
                self._certified.discard(principal)
        grants = parse_all(settings.anonymous)
        if not self.is_on:
            self.anonymous = OPEN
        elif self.anonymous is OPEN or self.anonymous.grants != grants:
            self.anonymous = anonymous(grants)
        for principal in list(self._holders):
            if not self.is_current(principal):
                self._end(principal, CHANGED)

    def _end(self, principal: Principal, reason: str) -> None:
        for end in self._holders.pop(principal, {}):
            end(reason)

    # Doors

    def check_listeners(self, listeners: Mapping[str, Address]) -> None:
        """Raise ListenError if other machines reach a listener and there is no access control."""
        reached = {
            name: address for name, address in listeners.items() if not is_loopback(address.host)
        }
        if not reached or self.is_on:
            return
        listed = ", ".join(f"listen.{name} = {address}" for name, address in reached.items())
        if not self._insecure_open:
            raise ListenError(
                f"other machines can reach {listed}, and there is no access control: make a token with "
                f"`headrace token create NAME --grant 'publish:orders/*' --data-dir {self._file.parent}`, or "
                "set [[access.token]] or access.anonymous, or listen on 127.0.0.1 only; --insecure-open "
                "lets everyone do everything"
            )
        logger.warning(
            "%s: everyone who reaches the server may do everything (--insecure-open)", listed
        )

    def knows_host(self, shown: Sequence[str], *, has_credentials: bool) -> bool:
        """Return True if a request with these `Host` headers is answered.

        A page of another site may point its own name at this machine (DNS rebinding). Its requests then look
        like those of a page of this server, except for this header. Such a page has no credentials, so the
        header counts wherever a peer may do something without any. A request without the header is not from
        a page.
        """
        if self.is_on and (has_credentials or not self.anonymous.grants):
            return True
        # A page whose host is an address came from that address, and from no other site.
        any_address = self.is_on or self._insecure_open
        return all(self._hosts.has(one, any_address=any_address) for one in shown)

    @property
    def trouble(self) -> str:
        """Word or sentence for the health check; empty if there is nothing to say."""
        if self.damage:
            return DAMAGED
        return INSECURE_OPEN if self._insecure_open and not self.is_on else ""


def asked_for(operation: Operation, name: Name) -> str:
    """Return an operation and its name in words; the grant itself if it is about the server."""
    if isinstance(name, Member):
        return f"{operation} of channel {quoted(name.channel)} as {quoted(name.processor)}"
    return f"{operation} of {quoted(name)}" if name else f"{operation}:*"


class _Found(NamedTuple):
    """Content of the file of tokens."""

    stamp: shared_file.Stamp | None
    tokens: Tokens | None
    """None if the file is missing or damaged."""
    damage: str = ""


def _read(file: Path) -> _Found:
    stamp = None
    try:
        stamp = shared_file.stamp_of(file)
        version = shared_file.read(file, tokens.FILE_BYTES_MAX)
        if version is None:
            return _Found(None, None)
        return _Found(version.stamp, tokens.decode(version.data))
    except OSError as error:
        return _Found(stamp, None, str(error.strerror))
    except DamagedTokensError as error:
        return _Found(version.stamp if version else None, None, str(error))


def _asks_for_control(settings: AccessSettings) -> bool:
    return bool(settings.token or settings.anonymous or settings.jwt.key_file)


# Functions of the application


def load_hook(key: str, name: str) -> Any:
    """Return the function that `name` names; None if `name` is empty. Raises `ConfigError`."""
    if not name:
        return None
    module, _, function = name.partition(":")
    # As with `python -m`, the application's modules are in the directory where the server was started.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key} = {quoted(name)} cannot be loaded: {error}") from None
    if not callable(found):
        raise ConfigError(f"{key} = {quoted(name)} is not a function")
    return found


Verify = Callable[[str | int | float, Any], bool | Awaitable[bool]]
"""Function of a peer's node id and credentials that returns True if the peer is accepted."""


def application_principal(user: str, topic: str) -> Principal:
    """Return the principal of a peer of a Logux log that the application itself has accepted."""
    rights = Operation.PUBLISH, Operation.SUBSCRIBE, Operation.CREATE
    grants = (
        Grant((Operation.ACT,), (Pattern.literal(user),)),
        Grant(rights, (Pattern.literal(topic),)),
    )
    return Principal(Kind.APPLICATION, user, grants)


async def verified(verify: Verify, node: str | int | float, shown: Any) -> bool:
    found = verify(node, shown)
    return bool(await found if inspect.isawaitable(found) else found)


def bearer(headers: Sequence[str]) -> str | None:
    """Return the token in the `Authorization` headers of a request; None if there is none, or are several."""
    if len(headers) != 1:
        return None
    scheme, _, token = headers[0].partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        return None
    # Headers were decoded as Latin-1, whatever their encoding is.
    return token.strip().encode("latin-1").decode(errors="replace")


def token_in(shown: Any) -> str | None:
    """Return the token in the credentials of a peer; "" for credentials of another form; None without any."""
    if isinstance(shown, dict):
        shown = shown.get("token")
    if shown is None or shown == "":
        return None
    return shown if isinstance(shown, str) else ""


def user_of(node: str | int | float) -> str:
    """Return the user in a node id, `user:client:tab`."""
    return str(node).partition(":")[0]
