"""From a URL to a client of its protocol."""

from collections.abc import Callable
from typing import Unpack
from urllib.parse import urlsplit

from headrace.client import figg
from headrace.client.blocking import BlockingClient
from headrace.client.client import Client
from headrace.client.options import Options, OptionsDict
from headrace.errors import ConfigError

DEFAULT_URL = f"figg://127.0.0.1:{figg.DEFAULT_PORT}"

# Protocol: its default port, and what makes a client from URL, host, port and options.
_PROTOCOLS: dict[str, tuple[int, Callable[[str, str, int, Options], Client]]] = {
    "figg": (figg.DEFAULT_PORT, figg.figg_client),
}


def connect(url: str = DEFAULT_URL, **options: Unpack[OptionsDict]) -> Client:
    """A client of the server at `url`: `async with connect("figg://127.0.0.1:8119") as client`.

    Nothing happens before it is entered (or awaited). The options are the fields of `Options`.
    Raises ConfigError for a URL or an option that cannot be meant.
    """
    return _client(url, Options(**options))


def connect_blocking(url: str = DEFAULT_URL, **options: Unpack[OptionsDict]) -> BlockingClient:
    """A client for scripts and threads, with the same options: `with connect_blocking() as client`.

    It is connected, or has given up with ConnectTimeoutError, when this returns.
    """
    return BlockingClient(_client(url, Options(**options)))


def _client(url: str, options: Options) -> Client:
    parts = urlsplit(url)
    if parts.scheme not in _PROTOCOLS:
        known = ", ".join(f"{scheme}://" for scheme in _PROTOCOLS)
        raise ConfigError(f"{url!r} must begin with {known}")
    default_port, make = _PROTOCOLS[parts.scheme]
    try:
        port = parts.port
    except ValueError:
        raise ConfigError(f"{url!r} has a port that is no port") from None
    if not parts.hostname:
        raise ConfigError(f"{url!r} names no host")
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"{url!r} has more than a host and a port")
    return make(url, parts.hostname, port or default_port, options)
