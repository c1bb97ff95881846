"""Messages of the token extension of Figg and Wombat. Elsewhere: their bytes (each protocol's codec).

A client that has a token sends AUTH first. The server answers with AUTH_OK, or with AUTH_REFUSED as its last
message. A further AUTH on the same connection renews the credentials.
"""

from typing import Annotated

from msgspec import Meta, Struct

from headrace.model import TOKEN_BYTES_MAX

AUTH, AUTH_OK, AUTH_REFUSED = range(80, 83)
"""Types of messages. Both protocols count their own types from 1, and named readers have 64 to 70."""

REASON_BYTES_MAX = 1024

CREDENTIALS = 1
"""The server does not accept these credentials. The same token will be refused again."""
LATER = 2
"""The server cannot check credentials now. The same token may be accepted later."""
FORBIDDEN = 3
"""The credentials are valid, and do not permit what the client has asked for."""

Code = Annotated[int, Meta(ge=0, lt=1 << 16)]
Milliseconds = Annotated[int, Meta(ge=0)]


class Auth(Struct, frozen=True, gc=False):
    token: Annotated[str, Meta(min_length=1, max_length=TOKEN_BYTES_MAX)]

    def __repr__(self) -> str:
        return "Auth(...)"  # a token must not reach a log


class AuthOk(Struct, frozen=True, gc=False):
    valid_ms: Milliseconds = 0
    """Milliseconds until the credentials expire; 0 if they do not expire."""


class AuthRefused(Struct, frozen=True, gc=False):
    code: Code
    reason: str


ToClient = AuthOk | AuthRefused

TYPES: dict[type[Auth | ToClient], int] = {Auth: AUTH, AuthOk: AUTH_OK, AuthRefused: AUTH_REFUSED}
NAMES = {AUTH: "auth", AUTH_OK: "auth_ok", AUTH_REFUSED: "auth_refused"}
