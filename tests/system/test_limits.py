"""Limits of a real server, over every protocol. Elsewhere: `tests/server/peers` tests them step by step."""

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import ClientConnection, connect

from headrace.testing import ServerProcess, wait_until
from tests.system.conftest import Start
from tests.system.figg import foreign as figg
from tests.system.logux import raw as logux
from tests.system.support import metrics
from tests.system.wombat import foreign as wombat

WAIT_S = 30
MESSAGES = 30
JOURNAL = '[journal]\nfile_bytes = "1MiB"\nrotate = "50ms"\n'
SLOW = JOURNAL + '[[limits.peer]]\nof = "address"\nrecords_per_s = 1\n'
"""A rate of one record a second: what waits is let go by another configuration, and not by time."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "headrace.toml"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def serve(start: Start, file: Path, text: str) -> ServerProcess:
    file.write_text(text)
    return start(f"--config={file}")


def lift(server: ServerProcess, file: Path) -> None:
    """End all limits. The line in the log says that the server has done so."""
    file.write_text(JOURNAL)
    before = server.stderr.count("SIGHUP: changed")
    server.signal(signal.SIGHUP)
    wait_until(lambda: server.stderr.count("SIGHUP: changed") > before, what="the reload")


def applied(server: ServerProcess, limit: str, of: str = "server") -> int:
    return int(metrics(server)[f'headrace_limits_applied_total{{limit="{limit}",of="{of}"}}'])


def exhaust(server: ServerProcess, stack: ExitStack) -> None:
    """Publish at once what the rate allows in a long time."""
    wire = figg.Wire(server.figg)
    stack.callback(wire.socket.close)
    wire.send(*(figg.publish(b"exhaust", number, b"") for number in range(1000)))
    wire.expect(figg.ACK)


def member(stack: ExitStack, server: ServerProcess) -> ClientConnection:
    host, port = server.ws
    url = f"ws://{host}:{port}/v1/channels"
    # With a bounded queue, this library stops reading before the end of the connection, and `close` waits.
    socket = stack.enter_context(connect(url, close_timeout=WAIT_S, max_queue=None))
    say(socket, type="hello", processor="p")
    say(socket, type="join", channel="c", receive="poll")
    assert [hear(socket)["type"], hear(socket)["type"]] == ["welcome", "joined"]
    return socket


def say(socket: ClientConnection, **fields: Any) -> None:
    socket.send(json.dumps(fields))


def hear(socket: ClientConnection) -> Any:
    return json.loads(socket.recv(WAIT_S))


def test_sends_that_wait_are_stored_although_their_peer_closes_its_websocket(
    start: Start, file: Path, stack: ExitStack
) -> None:
    server = serve(start, file, SLOW)
    exhaust(server, stack)
    socket = member(stack, server)
    reader = {"name": "c", "processor": "q"}  # without a reader, the channel keeps nothing
    httpx.post(f"{server.http_url}/v1/channel/join", params=reader).raise_for_status()
    for number in range(1, MESSAGES + 1):
        say(socket, type="send", channel="c", number=number, payload={"n": number})
    say(socket, type="ping")
    while hear(socket)["type"] != "pong":
        pass
    wait_until(lambda: applied(server, "records_per_s", "address") > 0, what="the wait")
    closing = stack.enter_context(_closing(socket))
    lift(server, file)
    closing.join(WAIT_S)
    assert not closing.is_alive()
    url = f"{server.http_url}/v1/channel/messages"
    asked = {"name": "c", "processor": "q", "max": MESSAGES}
    found = httpx.get(url, params=asked).json()["messages"]
    assert [message["payload"]["n"] for message in found] == list(range(1, MESSAGES + 1))


def test_wombat_publishes_wait_and_its_pings_are_answered(
    start: Start, file: Path, stack: ExitStack
) -> None:
    server = serve(start, file, SLOW)
    exhaust(server, stack)
    wire = wombat.Wire(server.ws)
    stack.callback(wire.socket.close)
    for number in range(MESSAGES):
        wire.send(wombat.publish("w", number, b"%d" % number))
    wire.send(wombat.ping(7))
    assert wire.expect(wombat.PONG).number == 7
    lift(server, file)
    acked = -1.0
    while acked < MESSAGES - 1:
        acked = wire.expect(wombat.ACK).number


def test_logux_events_wait(start: Start, file: Path, stack: ExitStack) -> None:
    server = serve(start, file, SLOW)
    exhaust(server, stack)
    host, port = server.ws
    client = logux.Client(stack, f"ws://{host}:{port}/v1/logux/main")
    client.connect("a:1:1")
    client.say("sync", 1, {"type": "x"}, [1, "a:1:1", 0])
    client.say("ping", 1)
    assert client.hear()[0] == "pong"
    lift(server, file)
    assert client.hear_only("synced") == ["synced", 1]


def test_publishers_for_whom_there_is_no_memory_are_told_to_try_again_when_there_is(
    start: Start, file: Path, stack: ExitStack
) -> None:
    server = serve(start, file, f"[limits]\nheld_bytes_max = 4096\n{SLOW}")
    exhaust(server, stack)
    host, port = server.ws
    channel = member(stack, server)
    client = logux.Client(stack, f"ws://{host}:{port}/v1/logux/main")
    client.connect("a:1:1")
    holder, plain, wire = figg.Wire(server.figg), figg.Wire(server.figg), wombat.Wire(server.ws)
    for one in (holder, plain, wire):
        stack.callback(one.socket.close)
    numbers = count(1)

    def no_memory() -> None:
        wanted = next(numbers)
        wait_until(lambda: applied(server, "held_bytes_max") == wanted, what="no more memory")

    holder.send(figg.publish(b"t", 0, bytes(8192)))
    no_memory()
    plain.send(figg.publish(b"t", 0, b"x"))
    no_memory()
    wire.send(wombat.publish("t", 0, b"x"))
    no_memory()
    say(channel, type="send", channel="c", number=1, payload={})
    no_memory()
    client.say("sync", 1, {"type": "x"}, [1, "a:1:1", 0])
    no_memory()
    httpx.get(f"{server.http_url}/healthz").raise_for_status()
    lift(server, file)
    holder.wait_ack(0)
    assert plain.until_closed() == []
    messages, closed = wire.until_closed()
    assert (messages, closed.code) == ([], 1013)
    with pytest.raises(ConnectionClosedError) as ended:
        hear(channel)
    assert ended.value.rcvd is not None and ended.value.rcvd.code == 1013
    assert client.closed() == 1013


def test_subscriptions_of_logux_are_limited_in_each_of_its_protocols(
    start: Start, file: Path, stack: ExitStack
) -> None:
    text = f'{JOURNAL}[[limits.peer]]\nof = "address"\nsubscriptions_max = 2\n'
    server = serve(start, file, text)
    host, port = server.ws
    url = f"ws://{host}:{port}/v1/logux/main"
    first, second = logux.Client(stack, url), logux.Client(stack, url)
    first.connect("a:1:1")
    second.connect5("b:1:1")
    answers = []
    for number, channel in enumerate(("x", "y"), 1):
        subscribe = {"type": "logux/subscribe", "channel": channel}
        second.say("sync", number, subscribe, {"id": [0, number], "time": 0})
        while (message := second.hear())[0] != "sync":
            pass
        answers.append(message[2])
    assert [one["type"] for one in answers] == ["logux/processed", "logux/undo"]
    assert answers[1]["reason"] == "tooManyChannels"
    third = logux.Client(stack, url)
    third.say("connect", [0, 0], "c:1:1", 0)
    assert third.closed() == 1008
    assert applied(server, "subscriptions_max", "address") == 2
    first.say("ping", 1)
    assert first.hear()[0] == "pong"


def test_a_logux_log_above_topics_max_is_refused_at_once(
    start: Start, file: Path, stack: ExitStack
) -> None:
    server = serve(start, file, f"[limits]\ntopics_max = 1\n{JOURNAL}")
    exhaust(server, stack)
    host, port = server.ws
    client = logux.Client(stack, f"ws://{host}:{port}/v1/logux/main")
    client.connect("a:1:1")
    client.say("sync", 1, {"type": "x"}, [1, "a:1:1", 0])
    assert client.closed() == 1008
    assert applied(server, "topics_max") == 1


def test_a_logux_peer_that_shows_no_credentials_in_time_is_told_so_and_closed(
    start: Start, file: Path, stack: ExitStack
) -> None:
    digest = sha256(b"known").hexdigest()
    token = f'[[access.token]]\nname = "known"\nsha256 = "{digest}"\ngrants = ["all:*"]\n'
    server = serve(start, file, f"{token}[limits]\nauthentication_s = 0.05\n{JOURNAL}")
    host, port = server.ws
    client = logux.Client(stack, f"ws://{host}:{port}/v1/logux/main")
    assert client.hear()[:2] == ["error", "wrong-credentials"]
    assert client.closed() == 1008
    shown = {"Authorization": "Bearer known"}
    text = httpx.get(f"{server.http_url}/metrics", headers=shown).raise_for_status().text
    applications = 'headrace_limits_applied_total{limit="authentication_s",of="server"}'
    assert f"{applications} 1.0" in text.splitlines()


def test_a_channel_above_channels_max_is_refused_and_its_connection_goes_on(
    start: Start, file: Path, stack: ExitStack
) -> None:
    server = serve(start, file, f"[limits]\nchannels_max = 1\n{JOURNAL}")
    socket = member(stack, server)
    say(socket, type="send", channel="c", number=1, payload={})
    assert hear(socket)["type"] == "sent"
    say(socket, type="join", channel="d", receive="poll")
    refused = hear(socket)
    assert (refused["type"], refused["code"]) == ("error", "too-many")
    say(socket, type="send", channel="c", number=2, payload={})
    assert hear(socket)["type"] == "sent"
    answer = httpx.post(
        f"{server.http_url}/v1/channel/join", params={"name": "e", "processor": "q"}
    )
    assert (answer.status_code, answer.json()["code"]) == (429, "too-many")


def test_http_is_told_when_to_send_again(start: Start, file: Path, stack: ExitStack) -> None:
    server = serve(start, file, SLOW)
    url = f"{server.http_url}/v1/channel"
    asked = {"name": "c", "processor": "p"}
    assert httpx.post(f"{url}/join", params=asked).status_code == 200
    exhaust(server, stack)
    answer = httpx.post(f"{url}/messages", params=asked | {"number": 1}, json={})
    assert answer.status_code == 429
    assert answer.json()["code"] == "over-rate" and answer.json()["retry"] is True
    assert int(answer.headers["retry-after"]) > 1
    assert httpx.post(f"{server.http_url}/v1/staged", content=b"").status_code == 429
    assert httpx.get(f"{url}/messages", params=asked).status_code == 200
    lift(server, file)
    assert httpx.post(f"{url}/messages", params=asked | {"number": 1}, json={}).status_code == 201


def test_another_handshake_of_an_address_above_its_limit_gets_an_answer(
    start: Start, file: Path, stack: ExitStack
) -> None:
    text = f'{JOURNAL}[[limits.peer]]\nof = "address"\nconnections_max = 1\n'
    server = serve(start, file, text)
    wire = wombat.Wire(server.ws)
    stack.callback(wire.socket.close)
    host, port = server.ws
    with pytest.raises(Exception, match="503"), connect(f"ws://{host}:{port}/v1/ws"):
        pass
    assert applied(server, "connections_max", "address") == 1


def test_a_quota_ends_when_a_topic_is_deleted(start: Start, file: Path, stack: ExitStack) -> None:
    server = serve(start, file, f'{JOURNAL}[[topics]]\nprefix = "q/"\nquota = "1KiB"\n')
    wire = figg.Wire(server.figg)
    stack.callback(wire.socket.close)
    wire.publish(b"q/1", bytes(2000))
    wire.send(figg.publish(b"q/2", 1, b"waits"))
    assert wire.alive()
    assert applied(server, "quota_bytes") == 1
    httpx.delete(f"{server.http_url}/v1/topic", params={"name": "q/1"}).raise_for_status()
    wire.wait_ack(1)


def _closing(socket: ClientConnection) -> "_Closing":
    return _Closing(socket)


class _Closing:
    """Closes a WebSocket in a thread, because the server answers only when everything is stored."""

    def __init__(self, socket: ClientConnection) -> None:
        self._thread = threading.Thread(target=socket.close, daemon=True)

    def __enter__(self) -> threading.Thread:
        self._thread.start()
        return self._thread

    def __exit__(self, *_: object) -> None:
        self._thread.join(WAIT_S)


def test_connections_of_http_are_limited_by_address_and_by_principal(
    start: Start, file: Path, stack: ExitStack
) -> None:
    shown = {"Authorization": "Bearer a"}
    digest = sha256(b"a").hexdigest()
    text = f'{JOURNAL}[[access.token]]\nname = "a"\nsha256 = "{digest}"\n'
    text += '[[limits.peer]]\nof = "address"\nconnections_max = 3\n'
    text += '[[limits.peer]]\nof = "token:a"\nconnections_max = 1\n'
    server = serve(start, file, text)
    # Connections of other protocols are counted apart.
    wires = [figg.Wire(server.figg) for _ in range(3)]
    for wire in wires:
        stack.callback(wire.socket.close)

    def connect_and_ask(path: str) -> tuple[httpx.Client, httpx.Response]:
        client = stack.enter_context(httpx.Client(base_url=server.http_url, headers=shown))
        return client, client.get(path)

    kept, answer = connect_and_ask("/v1/topics")
    assert answer.status_code == 200
    _, answer = connect_and_ask("/v1/topics")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"].startswith("connections_max of token:a is reached")
    only_one = 'headrace_open_connections{protocol="http",state="open"} 1.0'
    wait_until(lambda: only_one in kept.get("/metrics").text, what="the end of the refused one")
    for _ in range(2):
        assert connect_and_ask("/healthz")[1].status_code == 200
    _, answer = connect_and_ask("/v1/topics")
    assert answer.json()["error"].startswith("connections_max of this address is reached")
    found = kept.get("/metrics").text
    for of in ("address", "principal"):
        assert f'headrace_limits_applied_total{{limit="connections_max",of="{of}"}} 1.0' in found
    assert "headrace_connections_refused_total 2.0" in found
