"""Stored tokens: the content of `tokens.json`, and finding the token that a peer shows. Opens no files.

The file holds the SHA-256 of each token and never the token itself. Tokens are random numbers of 256 bits, so
a plain hash cannot be reversed by guessing.

    {"format": 1, "checksum": SHA-256 of the tokens, "tokens": [{"name": …, "sha256": …, "grants": […], …}]}
"""

import base64
import hashlib
import hmac
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from headrace.access.grants import parse_all
from headrace.access.principals import Kind, Principal
from headrace.errors import BadGrantError, BadTokenError, DamagedTokensError
from headrace.printing import quoted

FORMAT = 1

TOKENS_MAX = 10_000
"""Tokens in the file, revoked ones included."""
GRANTS_MAX = 100
"""Grants of one token."""
NAME_CHARACTERS_MAX = 255
FILE_BYTES_MAX = 64 << 20
"""Largest file that is read."""

TOKEN_PREFIX = "hr_"
SECRET_BYTES = 32
"""Random bytes of a token."""
SHOWN_CHARACTERS_MAX = 16 * 1024
"""Longest token that is looked at."""


class StoredToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    name: str
    sha256: str
    grants: tuple[str, ...]
    created_ms: int
    expires_ms: int | None = None
    revoked_ms: int | None = None

    def state(self, now_ms: int) -> str:
        """Return `valid`, `expired` or `revoked`."""
        if self.revoked_ms is not None:
            return "revoked"
        return "expired" if self.expires_ms is not None and now_ms >= self.expires_ms else "valid"


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    checksum: str
    tokens: tuple[StoredToken, ...]


Tokens = tuple[StoredToken, ...]


def decode(data: bytes) -> Tokens:
    """Return the tokens in a file. Raises DamagedTokensError, also for a file of a later version."""
    try:
        file = msgspec.json.decode(data, type=_File)
        if file.format != FORMAT:
            raise DamagedTokensError(
                f"its format is {file.format}, and this version reads {FORMAT}"
            )
        if file.checksum != _checksum(file.tokens):
            raise DamagedTokensError("its checksum is wrong")
        for one in file.tokens:
            parse_all(one.grants)
    except (msgspec.MsgspecError, UnicodeError, BadGrantError) as error:
        raise DamagedTokensError(str(error)) from None
    return file.tokens


def encode(tokens: Tokens) -> bytes:
    file = _File(FORMAT, _checksum(tokens), tokens)
    return msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n"


def _checksum(tokens: Tokens) -> str:
    return hashlib.sha256(msgspec.json.encode(tokens)).hexdigest()


def make_token(secret: bytes) -> str:
    """Return a new token, given `SECRET_BYTES` random bytes."""
    assert len(secret) == SECRET_BYTES
    return TOKEN_PREFIX + base64.urlsafe_b64encode(secret).decode().rstrip("=")


def is_jwt(token: str) -> bool:
    """True if a token has the form of a JWT. Stored tokens never have two dots."""
    return token.count(".") == 2


def hash_of(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def added(
    tokens: Tokens,
    name: str,
    token: str,
    grants: Sequence[str],
    *,
    now_ms: int,
    expires_ms: int | None = None,
) -> Tokens:
    """Return the tokens with one more. A revoked or expired token of the same name is replaced."""
    check_name(name)
    if not grants:
        raise BadGrantError("a token without a grant is of no use: give at least one --grant")
    if len(grants) > GRANTS_MAX:
        raise BadGrantError(
            f"a token may have {GRANTS_MAX} grants: combine them with * in a pattern"
        )
    made = tuple(str(grant) for grant in parse_all(grants))
    for known in tokens:
        if known.name == name and known.state(now_ms) == "valid":
            raise BadTokenError(
                f"there is a token {quoted(name)} already: revoke it first, or choose another name"
            )
    kept = tuple(known for known in tokens if known.name != name)
    if len(kept) >= TOKENS_MAX:
        raise BadTokenError(
            f"there are {TOKENS_MAX} tokens already: `headrace token prune` makes room"
        )
    return (*kept, StoredToken(name, hash_of(token), made, now_ms, expires_ms))


def revoked(tokens: Tokens, name: str, now_ms: int) -> Tokens:
    """Return the tokens with one of them revoked. To revoke a token again changes nothing."""
    if all(known.name != name for known in tokens):
        raise BadTokenError(f"there is no token {quoted(name)}: `headrace token list` shows all")
    return tuple(
        msgspec.structs.replace(known, revoked_ms=now_ms)
        if known.name == name and known.revoked_ms is None
        else known
        for known in tokens
    )


def pruned(tokens: Tokens, now_ms: int) -> Tokens:
    """Return the valid tokens only."""
    return tuple(known for known in tokens if known.state(now_ms) == "valid")


def check_name(name: str) -> None:
    """Raise BadTokenError for a name that could not be printed as it is."""
    if not 1 <= len(name) <= NAME_CHARACTERS_MAX or not name.isprintable() or name != name.strip():
        raise BadTokenError(
            f"a token's name has 1 to {NAME_CHARACTERS_MAX} printable characters and no space at its ends"
        )


def principal_of(stored: StoredToken) -> Principal:
    return Principal(Kind.TOKEN, stored.name, parse_all(stored.grants), stored.expires_ms)


class KnownToken(NamedTuple):
    sha256: str
    principal: Principal
    is_revoked: bool = False

    def is_like(self, other: "KnownToken") -> bool:
        return self.is_revoked == other.is_revoked and self.principal.is_like(other.principal)


class TokenIndex:
    """Tokens by a keyed hash, so that neither order nor duration of a search says anything about a token."""

    def __init__(self, tokens: Iterable[KnownToken], key: bytes) -> None:
        """`key`: random bytes of this process."""
        self._key = key
        self._tokens = {self._hidden(one.sha256.lower()): one for one in tokens}

    def find(self, token: str) -> KnownToken | None:
        """Return what is known of a token that a peer shows; None if the token is unknown."""
        if len(token) > SHOWN_CHARACTERS_MAX:
            return None
        digest = hash_of(token)
        found = self._tokens.get(self._hidden(digest))
        if found is None or not hmac.compare_digest(found.sha256.lower(), digest):
            return None
        return found

    def __iter__(self) -> Iterator[KnownToken]:
        return iter(self._tokens.values())

    @property
    def principals(self) -> list[Principal]:
        """The principals of all tokens that are not revoked."""
        return [one.principal for one in self._tokens.values() if not one.is_revoked]

    def _hidden(self, digest: str) -> bytes:
        return hashlib.blake2b(digest.encode(), key=self._key, digest_size=16).digest()
