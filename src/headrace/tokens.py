"""Tokens as clients handle them: their form, and the addresses to which they may be sent without TLS."""

import ipaddress
from pathlib import Path
from typing import Any

from headrace.errors import OptionError
from headrace.model import TOKEN_BYTES_MAX


def fault_of(token: object) -> str:
    """Return why this cannot be a token, without showing it; empty if it can."""
    if not isinstance(token, str):
        return f"a token is str, not {type(token).__name__}"
    if not 0 < len(token) <= TOKEN_BYTES_MAX:
        return f"a token has 1 to {TOKEN_BYTES_MAX} characters, not {len(token)}"
    if not (token.isascii() and token.isprintable() and " " not in token):
        return "a token consists of printable ASCII characters without spaces"
    return ""


def token_in(file: str | Path, option: str = "token_file") -> str:
    """Return the token in a file, which the option names. Raises OptionError."""
    try:
        token = Path(file).read_text("utf-8").strip()
    except OSError as error:
        raise OptionError(f"{option}: cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise OptionError(f"{option}: {file} is not a text") from None
    if reason := fault_of(token):
        raise OptionError(f"{option}: {file} holds no token: {reason}")
    return token


def exposure_of(peer: Any) -> str:
    """Return why others could read a token that is sent to this peer without TLS; empty if they could not."""
    host = peer[0] if isinstance(peer, tuple) and peer else ""
    if _is_loopback(str(host)):
        return ""
    return (
        f"the token is not sent to {host or 'this address'} without TLS, because others could read it: use "
        "TLS, or allow it with insecure_token=True (on the command line, --insecure-token; for Spark, the "
        "option insecureToken)"
    )


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
