"""The lifecycle is the same for every client: topics, Logux logs, channels, and connections for channels."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import headrace
from headrace.client import ConnectionState
from headrace.client.lifecycle import Lifecycle
from headrace.errors import ClientClosedError, ConnectTimeoutError, LocalProtocolError

Make = Callable[..., Lifecycle[Any]]

NOBODY = "127.0.0.1:1"
MAKES: dict[str, Make] = {
    "figg": lambda **options: headrace.connect(f"figg://{NOBODY}", **options),
    "wombat": lambda **options: headrace.connect(f"wombat://{NOBODY}", **options),
    "logux": lambda **options: headrace.connect(f"logux://{NOBODY}", store=None, **options),
    "channel": lambda **options: headrace.channels.join(
        f"channel://{NOBODY}/room", processor="a", **options
    ),
    "connection": lambda **options: headrace.channels.connect(
        f"channel://{NOBODY}", processor="a", **options
    ),
}


@pytest.fixture(params=MAKES)
def make(request: pytest.FixtureRequest) -> Make:
    return MAKES[request.param]


async def test_a_client_does_nothing_before_it_is_entered(make: Make) -> None:
    client = make()
    assert (client.state, client.latency_s, client.last_error) == ("disconnected", None, "")
    with pytest.raises(LocalProtocolError, match=r"enter the \w+ first"):
        await client.connected()


async def test_a_client_that_was_closed_cannot_be_entered(make: Make) -> None:
    client = make()
    await client.close()
    assert client.state == "closed"
    with pytest.raises(ClientClosedError):
        await client


async def test_entering_fails_if_there_is_no_connection_in_time(make: Make) -> None:
    client = make(connect_timeout_s=0.05)
    with pytest.raises(ConnectTimeoutError, match=r"within 0\.05 s: "):
        await client
    assert client.state == "closed"


async def test_closing_ends_waiting_calls_and_tells_the_state_once(make: Make) -> None:
    states: list[ConnectionState] = []
    client = make(connect_timeout_s=None, backoff=lambda attempt: 60.0)
    client.on("state", states.append)
    async with client:
        waiting = asyncio.ensure_future(client.connected())
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(ClientClosedError):
            await waiting
    await client.close()
    assert client.state == "closed"
    assert states[0] == "connecting"
    assert states.count(ConnectionState.CLOSED) == 1
    assert states[-1] == "closed"


async def test_two_tasks_may_close_at_once(make: Make) -> None:
    client = await make(connect_timeout_s=None)
    await asyncio.gather(client.close(), client.close())
    assert client.state == "closed"


async def test_other_events_are_unknown(make: Make) -> None:
    with pytest.raises(ValueError, match="there is no event 'messages', only state"):
        make().on("messages", print)  # type: ignore[arg-type]
