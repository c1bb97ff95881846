"""JSON Web Tokens: the keys of the issuer, and what a token proves about its bearer. Needs the extra `jwt`.

PyJWT reads keys and checks signatures. The rules of this file decide which key and which algorithm may check
which token:

- Each key is used with the algorithms of its own type only. So a public key never becomes an HMAC secret, and
  `none` is an algorithm of no key.
- A token chooses among the server's keys by `kid`. Keys and addresses of keys in a token are ignored.
- A token must say when it expires.

Elsewhere: reading the file of the keys, and the time. Both are arguments.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from jwt import PyJWK, PyJWS
from jwt.exceptions import PyJWTError

from headrace.access.grants import Grant
from headrace.access.principals import Kind, Principal
from headrace.access.tokens import GRANTS_MAX, is_jwt
from headrace.errors import BadGrantError, BadKeyError
from headrace.model import TOKEN_BYTES_MAX
from headrace.printing import quoted

KEYS_MAX = 64
"""Keys in one file."""
ROLES_MAX = 1000
"""Roles of one token that are looked at."""
NAME_CHARACTERS_MAX = 255
RSA_BITS_MIN = 2048

_ALGORITHMS: dict[str, tuple[str, ...]] = {
    "RSA": ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    "P-256": ("ES256",),
    "P-384": ("ES384",),
    "P-521": ("ES512",),
    "Ed25519": ("EdDSA",),
    "secret": ("HS256", "HS384", "HS512"),
}
"""By kind of key: the algorithms that it may be used with. The first is the default."""
KNOWN = frozenset(name for names in _ALGORITHMS.values() for name in names)
"""All algorithms that may be configured."""
_CURVES = {"secp256r1": "P-256", "secp384r1": "P-384", "secp521r1": "P-521"}
_SECRET_BYTES_MIN = {"HS256": 32, "HS384": 48, "HS512": 64}
_PRIVATE_FIELDS = ("d", "p", "q", "dp", "dq", "qi", "oth")
_SECONDS_MAX = 253_402_300_800
"""The year 10000, in Unix seconds."""

_PEM = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----.*?-----END \1-----", re.DOTALL)


class Key(NamedTuple):
    """A key, and the algorithms that it may be used with."""

    id: str | None
    algorithms: tuple[str, ...]
    key: Any

    def __repr__(self) -> str:
        return f"Key({self.id!r}, {self.algorithms!r})"  # the key may be a secret


Keys = tuple[Key, ...]


@dataclass(frozen=True)
class JwtRules:
    """Rules for tokens: the claims that a token must have, and the grants that it then gives."""

    issuer: str = ""
    """Required `iss`; empty: any."""
    audience: str = ""
    """Required element of `aud`; empty: the token must have no `aud`."""
    leeway_s: float = 0.0
    """Difference of clocks that is tolerated."""
    grants_claim: str = "headrace"
    """Claim with a list of grants; empty: none."""
    roles_claim: str = ""
    """Claim with roles; a dot leads into an object. Empty: none."""
    roles: Mapping[str, tuple[Grant, ...]] = field(default_factory=dict)


# Keys


def read_keys(data: bytes, algorithms: Sequence[str] = ()) -> Keys:
    """Return the keys in a file: public keys or certificates in PEM, or a JWKS.

    `algorithms` are those that are accepted; empty: the default of each key. Raises BadKeyError.
    """
    for name in algorithms:
        if name not in KNOWN:
            raise BadKeyError(
                f"there is no algorithm {quoted(name)}: use some of {', '.join(sorted(KNOWN))}"
            )
    found = _in_pem(data) if b"-----BEGIN " in data else _in_jwks(data)
    if len(found) > KEYS_MAX:
        raise BadKeyError(f"there are {len(found)} keys, and at most {KEYS_MAX} are allowed")
    keys = [_pinned(one, algorithms) for one in found]
    for name in algorithms:
        if not any(name in key.algorithms for key in keys):
            raise BadKeyError(f"no key is of the type that the algorithm {name} needs")
    usable = tuple(key for key in keys if key.algorithms)
    if not usable:
        raise BadKeyError("there is no key for signatures")
    ids = [key.id for key in usable if key.id is not None]
    if len(ids) > len(set(ids)):
        raise BadKeyError("two keys have the same kid")
    return usable


def _pinned(key: Key, accepted: Sequence[str]) -> Key:
    """Return the key with the algorithms that it may be used with here."""
    if not accepted:
        return key._replace(algorithms=key.algorithms[:1])
    return key._replace(algorithms=tuple(name for name in key.algorithms if name in accepted))


def _in_pem(data: bytes) -> list[Key]:
    found = []
    for block in _PEM.finditer(data):
        label = block[1]
        try:
            if label == b"CERTIFICATE":
                public: Any = x509.load_pem_x509_certificate(block[0]).public_key()
            elif b"PRIVATE KEY" in label:
                raise BadKeyError("it holds a private key: the server needs the public key only")
            else:
                public = load_pem_public_key(block[0])
        except (ValueError, UnsupportedAlgorithm):
            raise BadKeyError(f"its {label.decode().lower()} cannot be read") from None
        found.append(Key(None, _algorithms_of(public, "the key"), public))
    if not found:
        raise BadKeyError("it holds no complete key in PEM")
    return found


def _in_jwks(data: bytes) -> list[Key]:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        raise BadKeyError("it is neither PEM nor a JWKS, which is JSON") from None
    listed = content.get("keys", [content]) if isinstance(content, dict) else None
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise BadKeyError('it is no JWKS: an object with a list of "keys"')
    for one in listed:
        if any(part in one for part in _PRIVATE_FIELDS):
            raise BadKeyError("it holds a private key: the server needs the public keys only")
    return [_of_jwk(one) for one in listed if _is_for_signatures(one)]


def _is_for_signatures(jwk: dict[str, Any]) -> bool:
    operations = jwk.get("key_ops")
    return jwk.get("use", "sig") == "sig" and (
        not isinstance(operations, list) or "verify" in operations
    )


def _of_jwk(jwk: dict[str, Any]) -> Key:
    key_id = jwk.get("kid")
    if not isinstance(key_id, str | None):
        raise BadKeyError("the kid of a key is not a text")
    name = "a key without kid" if key_id is None else f"the key {quoted(key_id)}"
    own = jwk.get("alg")
    if own is not None and own not in KNOWN:
        raise BadKeyError(f"{name} is for an algorithm that is not supported")
    try:
        # Without `alg`, the library goes by the type of the key.
        made = PyJWK({field: value for field, value in jwk.items() if field != "alg"})
    except (PyJWTError, ValueError, TypeError, KeyError):
        raise BadKeyError(f"{name} cannot be read") from None
    algorithms = _algorithms_of(made.key, name)
    if own is not None:
        if own not in algorithms:
            raise BadKeyError(f"{name} is not of the type that its algorithm {own} needs")
        algorithms = (own,)
    return Key(key_id, algorithms, made.key)


def _algorithms_of(key: Any, name: str) -> tuple[str, ...]:
    """Return the algorithms of a key's type. Raises BadKeyError for a weak or private key."""
    if isinstance(key, bytes):
        strong = [one for one in _ALGORITHMS["secret"] if len(key) >= _SECRET_BYTES_MIN[one]]
        if not strong:
            raise BadKeyError(f"{name} has {len(key)} bytes, and at least 32 are needed")
        return tuple(strong)
    if isinstance(key, rsa.RSAPublicKey):
        if key.key_size < RSA_BITS_MIN:
            raise BadKeyError(
                f"{name} has {key.key_size} bits, and at least {RSA_BITS_MIN} are needed"
            )
        return _ALGORITHMS["RSA"]
    if isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in _CURVES:
        return _ALGORITHMS[_CURVES[key.curve.name]]
    if isinstance(key, ed25519.Ed25519PublicKey):
        return _ALGORITHMS["Ed25519"]
    raise BadKeyError(f"{name} is of a type that is not supported")


# Tokens


class _RefusedError(Exception):
    """A token is not accepted. The error becomes a reason before it leaves this module."""


_jws = PyJWS(options={"enforce_minimum_key_length": True})


def verify(token: str, keys: Keys, rules: JwtRules, now_ms: int) -> Principal | str:
    """Return the principal that a token proves, or the reason why it proves none.

    The reason may be shown to the bearer, and holds no part of the token that could control a terminal.
    """
    try:
        claims = _signed_claims(token, keys)
        expires_ms = _check_times(claims, rules.leeway_s, now_ms)
        _check_parties(claims, rules)
        return Principal(Kind.JWT, _name_in(claims), _grants_in(claims, rules), expires_ms)
    except _RefusedError as error:
        return str(error)


def _signed_claims(token: str, keys: Keys) -> dict[str, Any]:
    if len(token) > TOKEN_BYTES_MAX:
        raise _RefusedError(f"the token is longer than {TOKEN_BYTES_MAX} bytes")
    if not is_jwt(token) or not token.isascii():
        raise _RefusedError("the token is not a JWT")
    try:
        header = _jws.get_unverified_header(token)
    except (PyJWTError, ValueError, RecursionError):
        raise _RefusedError("the token is not a JWT") from None
    if header.get("b64", True) is not True:
        raise _RefusedError("the token is not a JWT")
    algorithm = header.get("alg")
    for key in _candidates(keys, algorithm, header.get("kid")):
        try:
            payload = _jws.decode(token, key.key, algorithms=[str(algorithm)])
        except (PyJWTError, ValueError, TypeError):
            continue
        return _object(payload)
    raise _RefusedError("the signature of the token is wrong")


def _candidates(keys: Keys, algorithm: object, key_id: object) -> list[Key]:
    """Return the keys that may have signed a token with this header."""
    if not isinstance(algorithm, str) or all(algorithm not in key.algorithms for key in keys):
        raise _RefusedError("the algorithm of the token is not accepted")
    named = [key for key in keys if key.id is not None]
    if isinstance(key_id, str) and named:
        keys = tuple(key for key in named if key.id == key_id)
        if not keys:
            raise _RefusedError("the key of the token (kid) is not known")
    found = [key for key in keys if algorithm in key.algorithms]
    if not found:
        raise _RefusedError("the algorithm of the token is not that of its key")
    return found


def _object(payload: bytes) -> dict[str, Any]:
    try:
        found = json.loads(payload)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _RefusedError("the token has no claims")
    return found


def _check_times(claims: dict[str, Any], leeway_s: float, now_ms: int) -> int:
    """Check when a token is valid, and return the time at which it expires here."""
    now_s = now_ms / 1000
    expires_s = _seconds(claims, "exp")
    if expires_s is None:
        raise _RefusedError("the token does not say when it expires (exp)")
    expires_ms = int((expires_s + leeway_s) * 1000)
    if now_ms >= expires_ms:
        raise _RefusedError("the token has expired")
    for claim in ("nbf", "iat"):
        begins_s = _seconds(claims, claim)
        if begins_s is not None and begins_s > now_s + leeway_s:
            raise _RefusedError(f"the token is not valid yet ({claim})")
    return expires_ms


def _seconds(claims: dict[str, Any], name: str) -> float | None:
    value = claims.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not 0 <= value < _SECONDS_MAX:
        raise _RefusedError(f"the token has a wrong time ({name})")
    return float(value)


def _check_parties(claims: dict[str, Any], rules: JwtRules) -> None:
    if rules.issuer and claims.get("iss") != rules.issuer:
        raise _RefusedError("the token is from another issuer (iss)")
    audience = claims.get("aud")
    listed = audience if isinstance(audience, list) else [] if audience is None else [audience]
    # RFC 7519, 4.1.3: a token that names its audience is for no one else.
    is_ours = rules.audience in listed if rules.audience else not listed
    if not is_ours:
        raise _RefusedError("the token is for another audience (aud)")


def _name_in(claims: dict[str, Any]) -> str:
    name = claims.get("sub")
    if not isinstance(name, str) or not 1 <= len(name) <= NAME_CHARACTERS_MAX:
        raise _RefusedError("the token names no subject (sub)")
    if not name.isprintable():
        raise _RefusedError("the subject of the token (sub) has a control character")
    return name


def _grants_in(claims: dict[str, Any], rules: JwtRules) -> tuple[Grant, ...]:
    """Return the grants of a token: its own, and those of its roles. Roles without grants are ignored."""
    listed = _texts(claims.get(rules.grants_claim) if rules.grants_claim else None)
    if len(listed) > GRANTS_MAX:
        raise _RefusedError(f"the token has more than {GRANTS_MAX} grants")
    try:
        found = [Grant.parse(text) for text in listed]
    except BadGrantError as error:
        raise _RefusedError(str(error)) from None
    if rules.roles_claim:
        roles = _texts(_at(claims, rules.roles_claim))
        for role in roles[:ROLES_MAX]:
            found += rules.roles.get(role, ())
    return tuple(dict.fromkeys(found))


def _at(claims: dict[str, Any], path: str) -> object:
    """Return the claim with this name, or else the one that a path with dots leads to."""
    if path in claims:
        return claims[path]
    found: object = claims
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _texts(value: object) -> list[str]:
    """Return the texts of a claim: a list, or one text with spaces between them as in `scope`."""
    if value is None:
        return []
    if isinstance(value, str):
        return value.split()
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise _RefusedError("the grants or roles of the token are not texts")
    return value
