"""The event loop of the server's tests."""

import asyncio
from collections.abc import Callable

import pytest
import uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Use the kind of loop that a server runs on: transports differ in what they allow when they close."""
    return {"uvloop": uvloop.new_event_loop}
