"""The URL of a server, as applications write it. The protocols give schemes and paths their meaning."""

from typing import NamedTuple
from urllib.parse import urlsplit

from headrace.errors import ConfigError
from headrace.printing import masked, quoted


class Url(NamedTuple):
    text: str
    scheme: str
    host: str
    port: int | None
    path: str

    def __str__(self) -> str:
        return self.text


def parse_url(text: str, schemes: list[str]) -> Url:
    """Return the parts of a URL; raise ConfigError unless it is `SCHEME://HOST[:PORT][/PATH]`."""
    parts = urlsplit(text)
    shown = quoted(masked(text))
    if parts.scheme not in schemes:
        known = " or ".join(f"{scheme}://" for scheme in schemes)
        hint = " (ws:// is wombat:// here)" if parts.scheme in ("ws", "wss") else ""
        raise ConfigError(f"{shown} must begin with {known}{hint}")
    try:
        port = parts.port
    except ValueError:
        raise ConfigError(f"{shown} has a port that is no port") from None
    if not parts.hostname or any(map(str.isspace, text)):
        raise ConfigError(f"{shown} names no host, or has a space in it")
    if parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"{shown} has more than a host, a port and a path")
    return Url(text, parts.scheme, parts.hostname, port, parts.path)
