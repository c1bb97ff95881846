"""From a URL to a client of its protocol."""

from typing import Unpack

from headrace.client import figg
from headrace.client.blocking import BlockingClient
from headrace.client.client import Client
from headrace.client.options import Options, OptionsDict
from headrace.client.url import Url, parse_url

DEFAULT_URL = f"figg://127.0.0.1:{figg.DEFAULT_PORT}"


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


def _wombat_client(url: Url, options: Options) -> Client:
    # On first use: WebSocket takes as long to import as all the rest.
    from headrace.client import wombat

    return wombat.make_client(url, options)


_PROTOCOLS = {"figg": figg.make_client, "wombat": _wombat_client, "wombats": _wombat_client}


def _client(text: str, options: Options) -> Client:
    url = parse_url(text, list(_PROTOCOLS))
    return _PROTOCOLS[url.scheme](url, options)
