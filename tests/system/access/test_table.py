"""THE TABLE: every message of every protocol, and every endpoint of HTTP, against every kind of credentials.

The rows are compared with the wire's message types and with the routes of the server's own application: a
new message or endpoint without a row fails here. Each row is tried with no credentials, wrong, expired and
revoked ones, ones without the needed grant, and valid ones. Elsewhere: credentials that end while they are in
use (`test_ends.py`).
"""

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, get_args

import msgspec
import pytest
from starlette.routing import Route

from headrace.access.operations import Operation
from headrace.reader.upload import encode_block_header
from headrace.server.http.api import make_app
from headrace.server.http.gate import OPEN_PATHS
from headrace.testing import ServerProcess
from headrace.wire import channel, readers, tokens
from headrace.wire.figg import messages as figg
from headrace.wire.logux import messages as logux
from headrace.wire.wombat import messages as wombat
from tests.system.access.server import (
    CONFIG,
    EVERYTHING,
    Figg,
    Socket,
    Tokens,
    ask,
    grants_without,
)

REFUSED_ALWAYS = {"none": None, "wrong": "wrong", "expired": "expired", "revoked": "revoked"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("table")
    (directory / "config.toml").write_text(CONFIG)
    made = Tokens(directory / "data")
    made.add("valid", EVERYTHING)
    made.add("expired", EVERYTHING, expires_ms=1)
    made.add("revoked", EVERYTHING)
    made.revoke("revoked")
    for operation in Operation:
        made.add(f"without {operation}", grants_without(operation))
    config = f"--config={directory / 'config.toml'}"
    with ServerProcess(directory / "data", config) as server:
        with Figg(server, "valid") as peer:
            peer.send(figg.encode_publish("table", 0, b"record"))
            assert peer.hear_until(figg.Ack) is not None
        ask(server, "valid", "POST", "/v1/channel/join?name=table&processor=p")
        yield server
        assert "Traceback" not in server.stderr, server.stderr


# HTTP


class Endpoint(NamedTuple):
    """A row: the request, the operations it needs, and the statuses that mean that access was given."""

    query: str = ""
    needs: tuple[Operation, ...] = ()
    statuses: tuple[int, ...] = (200,)
    body: bytes | None = None
    listed: str = ""
    """Name of the list in the answer that shows only what the peer may inspect."""


BLOCK = encode_block_header("table", b"\0\0\0\1x", 1) + b"\0\0\0\1x"
CURSORS = (
    b'{"reader": "r", "positions": [{"topic": "table", "epoch": 0, "offset": 0, "ordinal": 0}]}'
)
P = "?name=table&processor=p"
SPAN = "?topic=table&from=0&to=1"
INSPECT, SUBSCRIBE, DELETE = Operation.INSPECT, Operation.SUBSCRIBE, Operation.DELETE
JOIN, CURSOR, ADMIN = Operation.JOIN, Operation.CURSORS, Operation.ADMIN

STREAM = "/v1/stream/{name:path}"

ENDPOINTS = {
    ("GET", "/healthz"): Endpoint(),
    ("GET", "/readyz"): Endpoint(),
    ("GET", "/openapi.json"): Endpoint(),
    ("POST", "/v1/tickets"): Endpoint(statuses=(201,)),
    ("GET", "/metrics"): Endpoint(needs=(INSPECT,)),
    ("GET", "/v1/status"): Endpoint(needs=(INSPECT,)),
    ("GET", "/v1/clock"): Endpoint(needs=(INSPECT,)),
    ("POST", "/v1/clock/confirm"): Endpoint(needs=(ADMIN,)),
    ("GET", "/v1/trace"): Endpoint("", (ADMIN,), (400,)),
    ("GET", "/v1/topics"): Endpoint("?name=table", (INSPECT,), listed="topics"),
    ("GET", "/v1/topic"): Endpoint("?name=table", (INSPECT,)),
    ("DELETE", "/v1/topic"): Endpoint("?name=gone", (DELETE,), (404,)),
    ("GET", "/v1/position"): Endpoint("?topic=table&last=1", (INSPECT,)),
    ("GET", "/v1/cursors"): Endpoint("?reader=p", (INSPECT,), listed="cursors"),
    ("POST", "/v1/cursors"): Endpoint("", (CURSOR, SUBSCRIBE), body=CURSORS),
    ("DELETE", "/v1/cursors"): Endpoint("?reader=r&topic=table", (CURSOR, SUBSCRIBE)),
    ("GET", "/v1/index"): Endpoint(SPAN, (SUBSCRIBE,)),
    ("GET", "/v1/range"): Endpoint(SPAN, (SUBSCRIBE,)),
    ("GET", "/v1/ranges"): Endpoint(SPAN, (SUBSCRIBE,)),
    ("GET", "/v1/splits"): Endpoint(f"{SPAN}&bytes=10", (SUBSCRIBE,)),
    ("POST", "/v1/staged"): Endpoint("", (Operation.BATCHES, Operation.PUBLISH), body=BLOCK),
    ("POST", "/v1/batches"): Endpoint(
        "", (Operation.BATCHES,), (404,), b'{"producer": "p", "number": 0, "staged": ["none"]}'
    ),
    ("POST", "/v1/channel/join"): Endpoint(P, (JOIN,)),
    ("POST", "/v1/channel/leave"): Endpoint("?name=other&processor=p", (JOIN,)),
    ("GET", "/v1/channel/messages"): Endpoint(P, (JOIN,)),
    ("POST", "/v1/channel/messages"): Endpoint(f"{P}&number=1", (JOIN,), (200, 201), b"1"),
    ("POST", "/v1/channel/ack"): Endpoint(f"{P}&offset=0", (JOIN,)),
    ("GET", "/v1/channel/snapshot"): Endpoint("?name=table", (SUBSCRIBE,), (200, 404)),
    ("PUT", "/v1/channel/snapshot"): Endpoint(f"{P}&offset=0", (JOIN,), (409,), b"1"),
    ("GET", "/v1/channels"): Endpoint("", (INSPECT,), listed="channels"),
    ("GET", "/v1/channel"): Endpoint("?name=table", (INSPECT,)),
    ("POST", "/v1/channel/keep"): Endpoint("?name=table", (DELETE,)),
    ("DELETE", "/v1/channel"): Endpoint("?name=none", (DELETE,), (404,)),
    ("PUT", STREAM): Endpoint("", (Operation.PUBLISH, Operation.CREATE), (201,)),
    ("POST", STREAM): Endpoint("", (Operation.PUBLISH,), (204, 404), b"x"),
    ("GET", STREAM): Endpoint("", (SUBSCRIBE,), (200, 404)),
    ("HEAD", STREAM): Endpoint("", (SUBSCRIBE,), (200, 404)),
    ("DELETE", STREAM): Endpoint("", (DELETE,), (204, 404)),
}


TICKETS = {"/v1/tickets"}
"""Needs credentials and no grant: a ticket stands for the same credentials."""


class Anything:
    """Stands for every part of the server that its routes do not depend on."""

    def __getattr__(self, name: str) -> "Anything":
        return self


def routes() -> set[tuple[str, str]]:
    """Return the method and path of every route of the server's application."""
    anything: Any = Anything()
    parameters = make_app.__code__.co_varnames[: make_app.__code__.co_argcount]
    app = make_app(**dict.fromkeys(parameters, anything))
    found = set()
    for route in app.routes:
        assert isinstance(route, Route), f"{route}: this test knows routes only"
        found |= {
            (method, route.path)
            for method in (route.methods or ())
            if method != "HEAD" or route.path == STREAM
        }
    return found


def test_every_endpoint_has_a_row():
    assert ENDPOINTS.keys() == routes()


@pytest.mark.parametrize(("method", "path"), ENDPOINTS)
def test_an_endpoint_asks_for_access(server, method, path):
    row = ENDPOINTS[method, path]

    url = path.replace("{name:path}", "a%2Fstream") + row.query
    headers = {"Content-Type": "application/octet-stream"} if path == STREAM else {}

    def status(token: str | None) -> int:
        return ask(server, token, method, url, content=row.body, headers=headers).status_code

    for token in REFUSED_ALWAYS.values():
        assert status(token) == (200 if path in OPEN_PATHS else 401)
    for operation in row.needs:
        if row.listed:
            answer = ask(server, f"without {operation}", method, path + row.query)
            assert answer.json()[row.listed] == []
        else:
            assert status(f"without {operation}") == 403
    assert status("valid") in row.statuses
    assert row.needs or path in OPEN_PATHS | TICKETS


# Figg and Wombat

Peer = Figg | Socket


class TopicRow(NamedTuple):
    """A row: what to send, and the operations that it needs. Without any, it does nothing by itself."""

    message: Any
    needs: tuple[Operation, ...] = ()


READ = readers.Read("table", "r", False, 1, 100)

FIGG = {
    figg.Publishes: TopicRow(
        figg.encode_publish("new/figg", 0, b"x"), (Operation.PUBLISH, Operation.CREATE)
    ),
    figg.Attach: TopicRow(figg.encode_attach("table", None), (SUBSCRIBE,)),
    figg.Detach: TopicRow(figg.encode_detach("table")),
    figg.Ping: TopicRow(figg.encode_ping(7)),
    readers.Read: TopicRow(figg.encode_of_reader(READ), (SUBSCRIBE, CURSOR)),
    readers.Handled: TopicRow(figg.encode_of_reader(readers.Handled("table", 1, 0, 0))),
    tokens.Auth: TopicRow(figg.encode_auth("valid")),
}

WOMBAT = {
    wombat.Publishes: TopicRow(
        wombat.encode_publish("new/wombat", 1, b"x"), (Operation.PUBLISH, Operation.CREATE)
    ),
    wombat.Attach: TopicRow(wombat.encode_attach("table", None), (SUBSCRIBE,)),
    wombat.Detach: TopicRow(wombat.encode_detach("table")),
    wombat.Ping: TopicRow(wombat.encode_ping(7)),
    readers.Read: TopicRow(wombat.encode_of_reader(READ), (SUBSCRIBE, CURSOR)),
    readers.Handled: TopicRow(wombat.encode_of_reader(readers.Handled("table", 1, 0, 0))),
    tokens.Auth: TopicRow(wombat.encode_auth("valid")),
}


def test_every_message_of_figg_and_wombat_has_a_row():
    assert set(get_args(figg.ToServer)) - {figg.Bad} == FIGG.keys()
    assert set(get_args(wombat.ToServer)) - {wombat.Bad} == WOMBAT.keys()


PINGS = (998, 999)
"""The second ping is sent after the answer to the first: by then, all before it is decided."""


def reaction_of_figg(server: ServerProcess, token: str | None, row: TopicRow) -> str:
    """Return what became of a message: `done`, `refused`, or `alive` if only the next ping was answered."""
    with Figg(server, token) as peer:
        peer.send(row.message, figg.encode_ping(PINGS[0]))
        while (heard := peer.hear()) is not None:
            if isinstance(heard, tokens.AuthRefused | readers.Lost):
                return "refused"
            if isinstance(heard, figg.Ack | figg.Attached | readers.Reading | readers.Waiting):
                return "done"
            if heard == figg.Pong(PINGS[0]):
                peer.send(figg.encode_ping(PINGS[1]))
            elif heard == figg.Pong(PINGS[1]) and not row.needs:
                return "alive"
        return "refused"


def reaction_of_wombat(server: ServerProcess, token: str | None, row: TopicRow) -> str:
    with Socket(server, wombat.PATH) as peer:
        if token is not None:
            peer.send(wombat.encode_auth(token))
        peer.send(row.message)
        peer.send(wombat.encode_ping(PINGS[0]))
        while (heard := peer.hear()) is not None:
            if heard["type"] in (tokens.AUTH_REFUSED, readers.LOST):
                return "refused"
            if heard["type"] in (wombat.ACK, wombat.ATTACHED, readers.READING, readers.WAITING):
                return "done"
            if heard.get("pong") == {"timestamp": PINGS[0]}:
                peer.send(wombat.encode_ping(PINGS[1]))
            elif heard.get("pong") == {"timestamp": PINGS[1]} and not row.needs:
                return "alive"
        return "refused"


Reaction = Callable[[ServerProcess, str | None, TopicRow], str]


def check_topic_row(server: ServerProcess, row: TopicRow, reaction: Reaction) -> None:
    for kind, token in REFUSED_ALWAYS.items():
        expected = "alive" if kind == "none" and not row.needs else "refused"
        assert reaction(server, token, row) == expected, kind
    for operation in row.needs:
        assert reaction(server, f"without {operation}", row) == "refused", operation
    assert reaction(server, "valid", row) == ("done" if row.needs else "alive")


@pytest.mark.parametrize("kind", FIGG, ids=lambda kind: kind.__name__)
def test_a_message_of_figg_needs_its_grants(server, kind):
    check_topic_row(server, FIGG[kind], reaction_of_figg)


@pytest.mark.parametrize("kind", WOMBAT, ids=lambda kind: kind.__name__)
def test_a_message_of_wombat_needs_its_grants(server, kind):
    check_topic_row(server, WOMBAT[kind], reaction_of_wombat)


# Channels


class ChannelRow(NamedTuple):
    request: dict[str, Any]
    answer: str
    """Type of the answer if access is given. An error is one of another code than `forbidden`."""
    needs: tuple[tuple[Operation, ...], ...] = ((JOIN,),)
    """Operations of which one is enough. Without one of each group, the request is refused."""


CHANNEL: dict[type, ChannelRow] = {
    channel.Hello: ChannelRow({"type": "hello", "processor": "q"}, "welcome", ((JOIN,),)),
    channel.Join: ChannelRow({"type": "join", "channel": "c"}, "joined"),
    channel.Leave: ChannelRow({"type": "leave", "channel": "c"}, "left"),
    channel.Send: ChannelRow({"type": "send", "channel": "c", "number": 1, "payload": 1}, "error"),
    channel.Fetch: ChannelRow({"type": "fetch", "channel": "c"}, "error"),
    channel.Ack: ChannelRow({"type": "ack", "channel": "c", "offset": 0}, "error"),
    channel.UploadRequest: ChannelRow(
        {"type": "upload", "channel": "c", "offset": 0, "payload": 1}, "error"
    ),
    channel.SnapshotRequest: ChannelRow(
        {"type": "snapshot", "channel": "c"}, "snapshot", ((JOIN, SUBSCRIBE),)
    ),
    channel.Ping: ChannelRow({"type": "ping"}, "pong", ()),
}


def test_every_message_of_channels_has_a_row():
    assert set(get_args(channel.Message)) == CHANNEL.keys()


def reaction_of_channel(server: ServerProcess, token: str | None, row: ChannelRow) -> str:
    with Socket(server, channel.PATH) as peer:
        peer.send({"type": "hello", "processor": "q"} | ({} if token is None else {"token": token}))
        heard = peer.hear()
        if heard["type"] == "error":
            assert heard["code"] == "wrong-credentials"
            assert peer.hear() is None
            return "refused"
        if row.answer == "welcome":
            return str(heard["type"])
        peer.send(row.request)
        heard = peer.hear()
        return "refused" if heard.get("code") == "forbidden" else str(heard["type"])


@pytest.mark.parametrize("kind", CHANNEL, ids=lambda kind: kind.__name__)
def test_a_message_of_channels_needs_its_grants(server, kind):
    row = CHANNEL[kind]
    for name, token in REFUSED_ALWAYS.items():
        assert reaction_of_channel(server, token, row) == "refused", name
    assert reaction_of_channel(server, f"without {JOIN}", row) == "refused"
    assert reaction_of_channel(server, "valid", row) == row.answer


# Logux

CREATED = {0: [1, "u:1", 0], 5: {"id": [1, "u:1", 0], "time": 1}}

VERSIONS: dict[str, Callable[[str | None], list[Any]]] = {
    "0.0": lambda token: ["connect", [0, 0], "u:1", 0, *([] if token is None else [token])],
    "0.1": lambda token: ["connect", [0, 1], "u:1", 0, {"credentials": token} if token else {}],
    "5": lambda token: ["connect", 5, "u:1", 0, {"token": token} if token else {}],
}


class LoguxRow(NamedTuple):
    message: list[Any] | None
    needs: tuple[Operation, ...] = ()
    """Operations that the message needs besides those of `connect`."""


LOGUX: dict[type, LoguxRow] = {
    logux.Connect: LoguxRow(None, (Operation.ACT, SUBSCRIBE)),
    logux.Connected: LoguxRow(["connected", [0, 0], "u", [1, 1]]),
    logux.Ping: LoguxRow(["ping", 0]),
    logux.Pong: LoguxRow(["pong", 0]),
    logux.Sync: LoguxRow(["sync", 1], (Operation.PUBLISH, Operation.CREATE)),
    logux.Synced: LoguxRow(["synced", 0]),
    logux.Error: LoguxRow(["error", "wrong-format"]),
    logux.Headers: LoguxRow(["headers", {}]),
    logux.Unknown: LoguxRow(["unknown"]),
}


def test_every_message_of_logux_has_a_row():
    assert set(get_args(logux.Message)) == LOGUX.keys()


def reaction_of_logux(
    server: ServerProcess, token: str | None, version: str, kind: type, log: str
) -> str:
    with Socket(server, f"{logux.PATH}/{log}") as peer:
        peer.send(VERSIONS[version](token))
        heard = peer.hear()
        if heard[0] == "error":
            assert "wrong" in str(heard[1]).lower()
            assert "credentials" in str(heard[1]).lower()
            assert peer.hear() is None
            return "refused"
        if heard[0] == "headers":
            heard = peer.hear()
        assert heard[0] == "connected"
        row = LOGUX[kind]
        if row.message is None:
            return "done"
        if kind is not logux.Sync:
            peer.send(row.message)
            peer.send(["ping", 0])
            while (heard := peer.hear()) is not None and heard[0] != "pong":
                assert heard[0] == "error"
            return "done"
        created = CREATED[5 if version == "5" else 0]
        peer.send([*row.message, {"type": "test"}, created])
        synced = False
        while (heard := peer.hear()) is not None:
            if heard[0] == "synced":
                synced = True
                if version != "5":
                    return "done"
            elif heard[0] == "sync":
                assert synced
                return "refused" if heard[2]["type"] == "logux/undo" else "done"
            elif heard[0] == "error":
                assert not synced
                return "refused"
        return "refused"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", LOGUX, ids=lambda kind: kind.__name__)
def test_a_message_of_logux_needs_its_grants(server, kind, version):
    log = f"{kind.__name__}-{version}"
    for name, token in REFUSED_ALWAYS.items():
        assert reaction_of_logux(server, token, version, kind, log) == "refused", name
    for operation in dict.fromkeys((*LOGUX[logux.Connect].needs, *LOGUX[kind].needs)):
        token = f"without {operation}"
        assert reaction_of_logux(server, token, version, kind, log) == "refused", operation
    assert reaction_of_logux(server, "valid", version, kind, log) == "done"


def test_nothing_of_all_refused_publishes_is_in_the_log(server):
    """Only the rows with valid credentials may have made a topic."""
    for name in ("new/figg", "new/wombat"):
        answer = ask(server, "valid", "GET", f"/v1/topic?name={name}")
        assert answer.status_code == 404 or answer.json()["records"] == 1
    told = msgspec.json.decode(ask(server, "valid", "GET", "/v1/topics?prefix=$logux/").content)
    assert all(topic["records"] == 1 for topic in told["topics"]), json.dumps(told)
