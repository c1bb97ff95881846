"""The JWTs that a server accepts: the keys of `access.jwt.key_file`, and the rules of the settings.

Elsewhere: what is checked (`access/jwt.py`), and who asks (`server/access.py`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.access.grants import parse_all
from headrace.access.principals import Principal
from headrace.config.jwt import JwtSettings
from headrace.errors import BadKeyError, ConfigError

if TYPE_CHECKING:
    from headrace.access.jwt import JwtRules, Keys

KEY_FILE = "access.jwt.key_file"
KEY_FILE_BYTES_MAX = 1 << 20

Verify = Callable[[str, int], Principal | str]
"""Return the principal that a JWT proves at a time in Unix milliseconds, or the reason why it proves none."""


def load_jwt(settings: JwtSettings) -> Verify | None:
    """Read the keys, and return the check of JWTs; None if no keys are configured. Raises ConfigError."""
    if not settings.key_file:
        return None
    try:
        from headrace.access import jwt
    except ImportError:
        raise ConfigError(
            f"{KEY_FILE} needs the extra `jwt`: pip install 'headrace[jwt]'"
        ) from None
    keys, rules = _keys(settings), _rules(settings)
    return lambda token, now_ms: jwt.verify(token, keys, rules, now_ms)


def _keys(settings: JwtSettings) -> "Keys":
    from headrace.access.jwt import read_keys

    file = Path(settings.key_file)
    try:
        with file.open("rb") as opened:
            data = opened.read(KEY_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{KEY_FILE}: cannot read {file}: {error.strerror}") from None
    if len(data) > KEY_FILE_BYTES_MAX:
        raise ConfigError(f"{KEY_FILE}: {file} is larger than {KEY_FILE_BYTES_MAX} bytes")
    try:
        return read_keys(data, settings.algorithms)
    except BadKeyError as error:
        raise ConfigError(f"{KEY_FILE}: {file}: {error}") from None


def _rules(settings: JwtSettings) -> "JwtRules":
    from headrace.access.jwt import JwtRules

    return JwtRules(
        issuer=settings.issuer,
        audience=settings.audience,
        leeway_s=settings.leeway_s,
        grants_claim=settings.grants_claim,
        roles_claim=settings.roles_claim,
        roles={role.name: parse_all(role.grants) for role in settings.role},
    )
