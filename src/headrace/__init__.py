"""Headrace, one durable, ordered, resumable message log: the names an application uses."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace import channels as channels
    from headrace.client import connect as connect
    from headrace.client import connect_blocking as connect_blocking

__all__ = ["__version__", "channels", "connect", "connect_blocking"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # The client is imported on first use, because the server imports this package too and needs no client.
    if name in ("connect", "connect_blocking"):
        from headrace import client

        return getattr(client, name)
    if name == "channels":
        from importlib import import_module

        return import_module("headrace.channels")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
