"""Channels: from a URL to a channel and its connections. What applications see is `channel_client.py`."""

from typing import Any
from urllib.parse import unquote

from headrace.client.channel_client import Channel
from headrace.client.channel_options import ChannelOptions
from headrace.client.connection import Owner
from headrace.client.url import parse_url
from headrace.client.websocket_connection import WebSocketConnection
from headrace.errors import BadTopicNameError, ConfigError
from headrace.model import CHANNEL_PREFIX, check_topic_name
from headrace.wire import channel as wire
from headrace.wire.channel_answers import ANSWER_BYTES_MAX

DEFAULT_PORT = 8120
DEFAULT_TLS_PORT = 443
"""The server speaks no TLS: a load balancer does, where such things usually are."""


def make_channel(url: str, options: dict[str, Any]) -> Channel:
    parsed = parse_url(url, ["channel", "channels"])
    checked = ChannelOptions(**options)
    tls = parsed.scheme == "channels"
    if checked.ssl is not None and not tls:
        raise ConfigError(f"{url} is not encrypted: `ssl` is for channels://")
    name = _name_of(url, parsed.path)
    port = parsed.port or (DEFAULT_TLS_PORT if tls else DEFAULT_PORT)
    address = f"[{parsed.host}]" if ":" in parsed.host else parsed.host

    def make_connection(owner: Owner) -> WebSocketConnection:
        return WebSocketConnection(
            owner,
            parsed.host,
            port,
            url=f"{'wss' if tls else 'ws'}://{address}:{port}{wire.PATH}",
            ssl=checked.ssl,
            message_bytes_max=ANSWER_BYTES_MAX,
        )

    return Channel(url, name, make_connection, checked)


def _name_of(url: str, path: str) -> str:
    try:
        name = unquote(path.removeprefix("/"), errors="strict")
        if not name:
            raise BadTopicNameError("behind the host there is the channel's name")
        check_topic_name(CHANNEL_PREFIX + name)
    except (UnicodeDecodeError, BadTopicNameError) as error:
        raise ConfigError(f"{url} names no channel: {error}") from None
    return name
