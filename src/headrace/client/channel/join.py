"""Create a channel or a shared connection from a URL. Elsewhere: the API for applications (`client.py`)."""

from typing import Any
from urllib.parse import unquote

from headrace.client.channel.client import ChannelClient
from headrace.client.channel.connection import ProcessorConnection
from headrace.client.channel.options import ChannelOptions
from headrace.client.channel.pool import ChannelPool
from headrace.client.transport.connection import Owner
from headrace.client.transport.websocket import WebSocketTransport
from headrace.client.url import Url, parse_url
from headrace.errors import BadTopicNameError, ConfigError
from headrace.model import CHANNEL_PREFIX, check_topic_name
from headrace.wire import channel as wire
from headrace.wire.channel import ANSWER_BYTES_MAX

SCHEMES = ["channel", "channels"]
DEFAULT_PORT = 8120
DEFAULT_TLS_PORT = 443
"""The server does not support TLS. A load balancer does, and usually listens on this port."""


def make_channel(url: str, options: dict[str, Any]) -> ChannelClient:
    parsed = parse_url(url, SCHEMES)
    checked = ChannelOptions(**options)
    connection = _connection(parsed, checked, is_shared=False)
    return ChannelClient(_name_of(url, parsed.path), connection, checked)


def make_connection(url: str, options: dict[str, Any]) -> ChannelPool:
    """Return a connection that many channels share."""
    parsed = parse_url(url, SCHEMES)
    if parsed.path.removeprefix("/"):
        text = "a connection names no channel: give that to `join`"
        raise ConfigError(f"{url} has a path, and {text}")
    checked = ChannelOptions(**options)
    return ChannelPool(_connection(parsed, checked, is_shared=True), checked)


def _connection(url: Url, options: ChannelOptions, *, is_shared: bool) -> ProcessorConnection:
    tls = url.scheme == "channels"
    if options.ssl is not None and not tls:
        raise ConfigError(f"{url} is not encrypted: `ssl` is for channels://")
    port = url.port or (DEFAULT_TLS_PORT if tls else DEFAULT_PORT)
    address = f"[{url.host}]" if ":" in url.host else url.host

    def dial(owner: Owner) -> WebSocketTransport:
        return WebSocketTransport(
            owner,
            url.host,
            port,
            url=f"{'wss' if tls else 'ws'}://{address}:{port}{wire.PATH}",
            ssl=options.ssl,
            message_bytes_max=ANSWER_BYTES_MAX,
        )

    return ProcessorConnection(url.text, dial, options, is_shared=is_shared)


def _name_of(url: str, path: str) -> str:
    try:
        name = unquote(path.removeprefix("/"), errors="strict")
        if not name:
            raise BadTopicNameError("behind the host there is the channel's name")
        check_topic_name(CHANNEL_PREFIX + name)
    except (UnicodeDecodeError, BadTopicNameError) as error:
        raise ConfigError(f"{url} names no channel: {error}") from None
    return name
