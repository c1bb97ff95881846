"""Channels from Python: the names an application uses. What they mean is in docs/protocols/channel.md."""

from typing import Unpack

from headrace.client.channel import make_channel
from headrace.client.channel_blocking import BlockingChannel
from headrace.client.channel_client import Channel
from headrace.client.channel_events import Message, Missed, Snapshot
from headrace.client.channel_options import ChannelOptions, ChannelOptionsDict

__all__ = [
    "BlockingChannel",
    "Channel",
    "ChannelOptions",
    "Message",
    "Missed",
    "Snapshot",
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
