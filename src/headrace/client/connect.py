"""From a URL to a client of its protocol."""

import os
from typing import TYPE_CHECKING, Any, Unpack, overload

from headrace.client import figg
from headrace.client.blocking import BlockingClient
from headrace.client.client import Client
from headrace.client.options import Options, OptionsDict
from headrace.client.url import Url, parse_url
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.client.logux_client import LoguxClient
    from headrace.client.logux_options import LoguxOptionsDict

DEFAULT_URL = f"figg://127.0.0.1:{figg.DEFAULT_PORT}"


@overload
def connect(
    url: str, *, store: str | os.PathLike[str] | None, **options: "Unpack[LoguxOptionsDict]"
) -> "LoguxClient": ...
@overload
def connect(url: str = DEFAULT_URL, **options: Unpack[OptionsDict]) -> Client: ...
def connect(url: str = DEFAULT_URL, **options: Any) -> "Client | LoguxClient":
    """A client of the server at `url`: `async with connect("figg://127.0.0.1:8119") as client`.

    Nothing happens before it is entered (or awaited). The options are the fields of `Options`, and
    with `logux://` those of `LoguxOptions`. Raises ConfigError for a URL or an option that cannot be meant.
    """
    parsed = parse_url(url, [*_PROTOCOLS, *_LOGUX])
    if parsed.scheme in _LOGUX:
        return _logux_client(parsed, options)
    return _PROTOCOLS[parsed.scheme](parsed, Options(**options))


def connect_blocking(url: str = DEFAULT_URL, **options: Unpack[OptionsDict]) -> BlockingClient:
    """A client for scripts and threads, with the same options: `with connect_blocking() as client`.

    It is connected, or has given up with ConnectTimeoutError, when this returns.
    """
    return BlockingClient(topics_client(url, Options(**options)))


def topics_client(url: str, options: Options) -> Client:
    """A client of a protocol that has topics."""
    if url.startswith(tuple(f"{scheme}://" for scheme in _LOGUX)):
        raise ConfigError(f"{url!r} is a log of events, for `headrace.connect` only")
    parsed = parse_url(url, list(_PROTOCOLS))
    return _PROTOCOLS[parsed.scheme](parsed, options)


def _wombat_client(url: Url, options: Options) -> Client:
    # On first use: WebSocket takes as long to import as all the rest.
    from headrace.client import wombat

    return wombat.make_client(url, options)


def _logux_client(url: Url, options: dict[str, Any]) -> "LoguxClient":
    from headrace.client import logux, logux_options

    return logux.make_client(url, logux_options.LoguxOptions(**options))


_PROTOCOLS = {"figg": figg.make_client, "wombat": _wombat_client, "wombats": _wombat_client}
_LOGUX = ("logux", "loguxs")
