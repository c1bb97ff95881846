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
    modules = {
        "LogEvent": "store",
        "LogEvents": "client",
        "LoguxClient": "client",
        "LoguxOptions": "options",
    }
    if name in modules:
        from importlib import import_module

        return getattr(import_module(f"headrace.client.logux.{modules[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
