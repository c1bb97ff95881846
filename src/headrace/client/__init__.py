"""The client SDK: publish and subscribe from Python, asynchronously or blocking."""

from headrace.client.backoff import Backoff, exponential
from headrace.client.blocking import BlockingClient, BlockingSubscription
from headrace.client.client import Client
from headrace.client.connect import connect, connect_blocking
from headrace.client.events import ConnectionState, Message, Missed
from headrace.client.handler import Handler
from headrace.client.options import Options
from headrace.client.subscription import Subscription

__all__ = [
    "Backoff",
    "BlockingClient",
    "BlockingSubscription",
    "Client",
    "ConnectionState",
    "Handler",
    "Message",
    "Missed",
    "Options",
    "Subscription",
    "connect",
    "connect_blocking",
    "exponential",
]
