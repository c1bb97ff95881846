"""Channels from Python: the names an application uses. What they mean is in docs/protocols/channel.md."""

from typing import Unpack

from headrace.client.channel import make_channel, make_connection
from headrace.client.channel_blocking import BlockingChannel
from headrace.client.channel_client import Channel
from headrace.client.channel_events import Message, Missed, Snapshot
from headrace.client.channel_options import ChannelOptions, ChannelOptionsDict
from headrace.client.channel_pool import BlockingConnection, Connection

__all__ = [
    "BlockingChannel",
    "BlockingConnection",
    "Channel",
    "ChannelOptions",
    "Connection",
    "Message",
    "Missed",
    "Snapshot",
    "connect",
    "connect_blocking",
    "join",
    "join_blocking",
]


def join(url: str, **options: Unpack[ChannelOptionsDict]) -> Channel:
    """A channel of a server: `async with join("channel://127.0.0.1:8120/doc/1", processor="laptop-7")`.

    Nothing happens before it is entered (or awaited). The options are the fields of `ChannelOptions`. Raises
    ConfigError for a URL or an option that cannot be meant.
    """
    return make_channel(url, dict(options))


def join_blocking(url: str, **options: Unpack[ChannelOptionsDict]) -> BlockingChannel:
    """A channel for scripts and threads, with the same options.

    It is joined, or has given up with ConnectTimeoutError, when this returns.
    """
    return BlockingChannel(make_channel(url, dict(options)))


def connect(url: str, **options: Unpack[ChannelOptionsDict]) -> Connection:
    """A connection for many channels: `async with connect("channel://127.0.0.1:8120", processor="a") as c`.

    Then `room = await c.join("room")`. The options are the same; those of a channel may be given to `join`.
    """
    return make_connection(url, dict(options))


def connect_blocking(url: str, **options: Unpack[ChannelOptionsDict]) -> BlockingConnection:
    """The same for scripts and threads. It is connected when this returns."""
    return BlockingConnection(make_connection(url, dict(options)))
