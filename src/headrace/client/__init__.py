"""The client SDK: publish and subscribe from Python, asynchronously or blocking; logs that work offline."""

from typing import TYPE_CHECKING

from headrace.client.backoff import Backoff, exponential
from headrace.client.blocking import (
    BlockingClient,
    BlockingReaderSubscription,
    BlockingSubscription,
)
from headrace.client.client import Client
from headrace.client.connect import connect, connect_blocking
from headrace.client.events import ConnectionState, Message, Missed
from headrace.client.handler import Handler
from headrace.client.options import Options
from headrace.client.reader import ReaderChange, ReaderSubscription
from headrace.client.subscription import Subscription

if TYPE_CHECKING:
    from headrace.client.logux_client import LoguxClient as LoguxClient
    from headrace.client.logux_events import LogEvents as LogEvents
    from headrace.client.logux_options import LoguxOptions as LoguxOptions
    from headrace.client.logux_store import LogEvent as LogEvent

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
    # On first use: most clients have no need of SQLite.
    modules = {
        "LogEvent": "logux_store",
        "LogEvents": "logux_events",
        "LoguxClient": "logux_client",
        "LoguxOptions": "logux_options",
    }
    if name in modules:
        from importlib import import_module

        return getattr(import_module(f"headrace.client.{modules[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
