"""Channels from Python: the names that an application uses. docs/protocols/channel.md explains them."""

from typing import Unpack

from headrace.client.channel.blocking import BlockingChannel
from headrace.client.channel.blocking import BlockingChannelPool as BlockingConnection
from headrace.client.channel.client import ChannelClient as Channel
from headrace.client.channel.client import ChannelOptions, ChannelOptionsDict
from headrace.client.channel.events import ChannelMessage as Message
from headrace.client.channel.events import MissedMessages as Missed
from headrace.client.channel.events import Snapshot
from headrace.client.channel.pool import ChannelPool as Connection
from headrace.client.connect import channel_client, channel_pool

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
    """Return a channel: `async with join("channel://127.0.0.1:8120/doc/1", processor="laptop-7")`.

    Nothing happens before the channel is entered (or awaited). The options are the fields of
    `ChannelOptions`. Raises ConfigError for an invalid URL or option.
    """
    return channel_client(url, ChannelOptions(**options))


def join_blocking(url: str, **options: Unpack[ChannelOptionsDict]) -> BlockingChannel:
    """Join a channel for scripts and threads, with the same options.

    The channel is joined when this returns. Raises ConnectTimeoutError if it could not be joined in time.
    """
    return BlockingChannel(channel_client(url, ChannelOptions(**options)))


def connect(url: str, **options: Unpack[ChannelOptionsDict]) -> Connection:
    """Return a connection for channels: `async with connect("channel://127.0.0.1:8120", processor="a") as c`.

    Then `room = await c.join("room")`. The options are those of `join` above. Options of a single channel may
    be passed to `c.join`.
    """
    return channel_pool(url, ChannelOptions(**options))


def connect_blocking(url: str, **options: Unpack[ChannelOptionsDict]) -> BlockingConnection:
    """Return a connection for many channels, for scripts and threads. It is connected when this returns."""
    return BlockingConnection(channel_pool(url, ChannelOptions(**options)))
