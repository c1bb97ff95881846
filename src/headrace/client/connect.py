"""Create the client for a URL: its session, its options and the way to dial.

Protocols other than Figg are imported on first use. Importing WebSocket takes as long as importing everything
else, and most clients need neither SQLite nor the codec of Logux.
"""

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack, overload
from urllib.parse import quote, unquote, urlsplit

from headrace.client.link import LinkOptions, exponential
from headrace.client.topics.blocking import BlockingClient
from headrace.client.topics.client import Client, Options, OptionsDict
from headrace.client.transport import MakeConnection, TcpConnection
from headrace.errors import BadTopicNameError, ConfigError
from headrace.model import CHANNEL_PREFIX, LOGUX_PREFIX, check_topic_name
from headrace.printing import masked, quoted
from headrace.session.figg import FiggClientSession

if TYPE_CHECKING:
    from headrace.client.channel.client import ChannelClient, ChannelOptions
    from headrace.client.channel.pool import ChannelPool
    from headrace.client.logux.client import LoguxClient, LoguxOptionsDict

FIGG_PORT = 8119
WEBSOCKET_PORT = 8120
TLS_PORT = 443
"""Default port of WebSocket with TLS, where load balancers usually listen."""

DEFAULT_URL = f"figg://127.0.0.1:{FIGG_PORT}"

FIGG = ("figg", "figgs")
TOPICS = (*FIGG, "wombat", "wombats")
LOGUX = ("logux", "loguxs")
CHANNELS = ("channel", "channels")
"""URL schemes. Those that end with `s` use TLS."""

HEADER_BYTES_MAX = 4096
"""Bytes that a Wombat or Logux message may have besides those that its protocol limits."""


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
    parsed = parse_url(url, TOPICS + LOGUX)
    if parsed.scheme in LOGUX:
        return _logux_client(parsed, options)
    return _topics_client(parsed, Options(**options))


def connect_blocking(url: str = DEFAULT_URL, **options: Unpack[OptionsDict]) -> BlockingClient:
    """Return a client for scripts and threads: `with connect_blocking() as client`.

    The options are those of `connect`. The call returns a connected client, or raises ConnectTimeoutError.
    """
    return BlockingClient(topics_client(url, Options(**options)))


def topics_client(url: str, options: Options) -> Client:
    """Return a client of a protocol that has topics; raise ConfigError for a Logux URL."""
    if url.startswith(tuple(f"{scheme}://" for scheme in LOGUX)):
        raise ConfigError(f"{url!r} is a Logux log, for `headrace.connect` only")
    return _topics_client(parse_url(url, TOPICS), options)


def channel_client(url: str, options: "ChannelOptions") -> "ChannelClient":
    """Return the member of one channel, with a connection of its own."""
    from headrace.client.channel.client import ChannelClient

    parsed = parse_url(url, CHANNELS)
    name = _name_in(parsed, CHANNEL_PREFIX, "channel")
    return ChannelClient(name, _channel_pool(parsed, options, is_shared=False), options)


def channel_pool(url: str, options: "ChannelOptions") -> "ChannelPool":
    """Return a connection that many channels share."""
    parsed = parse_url(url, CHANNELS)
    if parsed.path.removeprefix("/"):
        raise ConfigError(f"{url} has a path: pass the names of channels to `join` instead")
    return _channel_pool(parsed, options, is_shared=True)


class Url(NamedTuple):
    text: str
    scheme: str
    host: str
    port: int | None
    path: str


def parse_url(text: str, schemes: tuple[str, ...]) -> Url:
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
        raise ConfigError(f"{shown} has an invalid port") from None
    if not parts.hostname or any(map(str.isspace, text)):
        raise ConfigError(f"{shown} has no host, or contains a space")
    if parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"{shown} has more than a host, a port and a path")
    return Url(text, parts.scheme, parts.hostname, port, parts.path)


def _topics_client(url: Url, options: Options) -> Client:
    return _figg_client(url, options) if url.scheme in FIGG else _wombat_client(url, options)


def _figg_client(url: Url, options: Options) -> Client:
    if url.path not in ("", "/"):
        raise ConfigError(f"{url.text} has more than a host and a port")
    if options.resend_s is not None:
        raise ConfigError("resend_s is for wombat:// only: other protocols do not send again")
    session = FiggClientSession(**options.for_session())
    port = url.port or FIGG_PORT
    ssl = options.tls_context(url.text, is_encrypted=url.scheme == "figgs")
    return Client(url.text, session, lambda link: TcpConnection(link, url.host, port, ssl), options)


def _wombat_client(url: Url, options: Options) -> Client:
    from headrace.session.wombat import WombatClientSession
    from headrace.wire.wombat import messages

    path = messages.PATH if url.path in ("", "/") else url.path
    dial = _websocket(url, path, options, messages.MESSAGE_BYTES_MAX + HEADER_BYTES_MAX)
    if options.ping_interval_s is None:
        raise ConfigError(
            "ping_interval_s=None is for figg://: a Wombat server hangs up on clients without pings"
        )
    session = WombatClientSession(**options.for_session())
    options = replace(options, backoff=options.backoff or exponential(jitter=0.0))
    return Client(url.text, session, dial, options)


def _logux_client(url: Url, options: dict[str, Any]) -> "LoguxClient":
    from headrace.client.logux.client import LoguxClient, LoguxOptions
    from headrace.wire.logux import messages

    checked = LoguxOptions(**options)
    log = _name_in(url, LOGUX_PREFIX, "log", "main")
    message_bytes_max = messages.MESSAGE_BYTES_MAX + HEADER_BYTES_MAX
    dial = _websocket(url, f"{messages.PATH}/{quote(log)}", checked, message_bytes_max)
    return LoguxClient(url.text, log, dial, checked)


def _channel_pool(url: Url, options: "ChannelOptions", *, is_shared: bool) -> "ChannelPool":
    from headrace.client.channel.pool import ChannelPool
    from headrace.wire.channel import ANSWER_BYTES_MAX, PATH

    dial = _websocket(url, PATH, options, ANSWER_BYTES_MAX)
    return ChannelPool(url.text, dial, options, is_shared=is_shared)


def _websocket(url: Url, path: str, options: LinkOptions, message_bytes_max: int) -> MakeConnection:
    """Return the way to connect to a path of the server."""
    from headrace.client.websocket import WebSocketTransport

    is_encrypted = url.scheme.endswith("s")
    ssl = options.tls_context(url.text, is_encrypted=is_encrypted)
    port = url.port or (TLS_PORT if is_encrypted else WEBSOCKET_PORT)
    address = f"[{url.host}]" if ":" in url.host else url.host
    place = f"{'wss' if is_encrypted else 'ws'}://{address}:{port}{path}"
    return lambda link: WebSocketTransport(
        link, url.host, port, url=place, ssl=ssl, message_bytes_max=message_bytes_max
    )


def _name_in(url: Url, prefix: str, what: str, default: str = "") -> str:
    """Return the name of a log or a channel in the path of a URL."""
    try:
        name = unquote(url.path.removeprefix("/"), errors="strict") or default
        if not name:
            raise BadTopicNameError(f"the {what}'s name must follow the host")
        check_topic_name(prefix + name)
    except (UnicodeDecodeError, BadTopicNameError) as error:
        raise ConfigError(f"{url.text} names no {what}: {error}") from None
    return name
