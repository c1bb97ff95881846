"""The client SDK: asynchronous and blocking clients for topics, and Logux logs that work offline."""

from typing import TYPE_CHECKING

from headrace.client.connect import connect, connect_blocking
from headrace.client.link import Backoff, exponential
from headrace.client.topics.blocking import (
    BlockingClient,
    BlockingReaderSubscription,
    BlockingSubscription,
)
from headrace.client.topics.client import Client, Options
from headrace.client.topics.reader import ReaderChange, ReaderSubscription
from headrace.client.topics.subscription import Handler, Message, Subscription
from headrace.session.client import ConnectionState
from headrace.session.topics.events import Missed

if TYPE_CHECKING:
    from headrace.client.logux.client import LogEvents as LogEvents
    from headrace.client.logux.client import LoguxClient as LoguxClient
    from headrace.client.logux.client import LoguxOptions as LoguxOptions
    from headrace.client.logux.store import LogEvent as LogEvent

__all__ = [
    "Backoff",
    "BlockingClient",
    "BlockingReaderSubscription",
    "BlockingSubscription",
    "Client",
    "ConnectionState",
    "Handler",
    "LogEvent",
    "LogEvents",
    "LoguxClient",
    "LoguxOptions",
    "Message",
    "Missed",
    "Options",
    "ReaderChange",
    "ReaderSubscription",
    "Subscription",
    "connect",
    "connect_blocking",
    "exponential",
]


def __getattr__(name: str) -> object:
    # Imported on first use: most clients do not need SQLite.
    if name in ("LogEvent", "LogEvents", "LoguxClient", "LoguxOptions"):
        from headrace.client.logux import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
