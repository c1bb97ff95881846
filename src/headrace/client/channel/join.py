"""Channels: from a URL to a channel and its connections. What applications see is `channel_client.py`."""

from typing import Any
from urllib.parse import unquote

from headrace.client.channel_client import Channel
from headrace.client.channel_connection import ChannelConnection
from headrace.client.channel_options import ChannelOptions
from headrace.client.channel_pool import Connection
from headrace.client.connection import Owner
from headrace.client.url import Url, parse_url
from headrace.client.websocket_connection import WebSocketConnection
from headrace.errors import BadTopicNameError, ConfigError
from headrace.model import CHANNEL_PREFIX, check_topic_name
from headrace.wire import channel as wire
from headrace.wire.channel_answers import ANSWER_BYTES_MAX

SCHEMES = ["channel", "channels"]
DEFAULT_PORT = 8120
DEFAULT_TLS_PORT = 443
"""The server speaks no TLS: a load balancer does, where such things usually are."""


def make_channel(url: str, options: dict[str, Any]) -> Channel:
    parsed = parse_url(url, SCHEMES)
    checked = ChannelOptions(**options)
    connection = _connection(parsed, checked, is_shared=False)
    return Channel(_name_of(url, parsed.path), connection, checked)


def make_connection(url: str, options: dict[str, Any]) -> Connection:
    """One that many channels share."""
    parsed = parse_url(url, SCHEMES)
    if parsed.path.removeprefix("/"):
        text = "a connection names no channel: give that to `join`"
        raise ConfigError(f"{url} has a path, and {text}")
    checked = ChannelOptions(**options)
    return Connection(_connection(parsed, checked, is_shared=True), checked)


def _connection(url: Url, options: ChannelOptions, *, is_shared: bool) -> ChannelConnection:
    tls = url.scheme == "channels"
    if options.ssl is not None and not tls:
        raise ConfigError(f"{url} is not encrypted: `ssl` is for channels://")
    port = url.port or (DEFAULT_TLS_PORT if tls else DEFAULT_PORT)
    address = f"[{url.host}]" if ":" in url.host else url.host

    def dial(owner: Owner) -> WebSocketConnection:
        return WebSocketConnection(
            owner,
            url.host,
            port,
            url=f"{'wss' if tls else 'ws'}://{address}:{port}{wire.PATH}",
            ssl=options.ssl,
            message_bytes_max=ANSWER_BYTES_MAX,
        )

    return ChannelConnection(url.text, dial, options, is_shared=is_shared)


def _name_of(url: str, path: str) -> str:
    try:
        name = unquote(path.removeprefix("/"), errors="strict")
        if not name:
            raise BadTopicNameError("behind the host there is the channel's name")
        check_topic_name(CHANNEL_PREFIX + name)
    except (UnicodeDecodeError, BadTopicNameError) as error:
        raise ConfigError(f"{url} names no channel: {error}") from None
    return name
