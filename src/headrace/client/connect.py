"""Create the client for the protocol of a URL."""

import os
from typing import TYPE_CHECKING, Any, Unpack, overload

from headrace.client.topics import figg
from headrace.client.topics.blocking import BlockingClient
from headrace.client.topics.client import Client
from headrace.client.topics.options import Options, OptionsDict
from headrace.client.url import Url, parse_url
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.client.logux.client import LoguxClient
    from headrace.client.logux.options import LoguxOptionsDict

DEFAULT_URL = f"figg://127.0.0.1:{figg.DEFAULT_PORT}"


@overload
def connect(
    url: str, *, store: str | os.PathLike[str] | None, **options: "Unpack[LoguxOptionsDict]"
) -> "LoguxClient": ...
@overload
def connect(url: str = DEFAULT_URL, **options: Unpack[OptionsDict]) -> Client: ...
def connect(url: str = DEFAULT_URL, **options: Any) -> "Client | LoguxClient":
    """Return a client of the server at `url`: `async with connect("figg://127.0.0.1:8119") as client`.

    The client does nothing before it is entered (or awaited). The options are the fields of `Options`, or
    of `LoguxOptions` for `logux://`. Raises ConfigError for an invalid URL or option.
    """
    parsed = parse_url(url, [*_PROTOCOLS, *_LOGUX])
    if parsed.scheme in _LOGUX:
        return _logux_client(parsed, options)
    return _PROTOCOLS[parsed.scheme](parsed, Options(**options))


def connect_blocking(url: str = DEFAULT_URL, **options: Unpack[OptionsDict]) -> BlockingClient:
    """Return a client for scripts and threads: `with connect_blocking() as client`.

    The options are those of `connect`. The call returns a connected client, or raises ConnectTimeoutError.
    """
    return BlockingClient(topics_client(url, Options(**options)))


def topics_client(url: str, options: Options) -> Client:
    """Return a client of a protocol that has topics; raise ConfigError for a Logux URL."""
    if url.startswith(tuple(f"{scheme}://" for scheme in _LOGUX)):
        raise ConfigError(f"{url!r} is a log of events, for `headrace.connect` only")
    parsed = parse_url(url, list(_PROTOCOLS))
    return _PROTOCOLS[parsed.scheme](parsed, options)


def _wombat_client(url: Url, options: Options) -> Client:
    # Imported on first use: importing WebSocket takes as long as importing everything else.
    from headrace.client.topics import wombat

    return wombat.make_client(url, options)


def _logux_client(url: Url, options: dict[str, Any]) -> "LoguxClient":
    from headrace.client.logux import connect as logux
    from headrace.client.logux import options as logux_options

    return logux.make_client(url, logux_options.LoguxOptions(**options))


_PROTOCOLS = {"figg": figg.make_client, "wombat": _wombat_client, "wombats": _wombat_client}
_LOGUX = ("logux", "loguxs")
