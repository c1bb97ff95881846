"""HTTP on the WebSocket listener: which requests are accepted, and the answers to all others."""

import http.client
import json
import socket
import time
from contextlib import ExitStack

import pytest
from websockets.exceptions import InvalidStatus
from websockets.extensions.permessage_deflate import ClientPerMessageDeflateFactory
from websockets.headers import build_extension

from headrace.testing import ServerProcess, wait_until
from tests.system.conftest import SMALL, Dial, Start
from tests.system.figg import foreign as foreign_figg
from tests.system.support import held_back, metrics
from tests.system.wombat.foreign import PONG, Closed, Message, Wire, frame, ping, publish

KEY = "dGhlIHNhbXBsZSBub25jZQ=="
ACCEPT = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
"""Example of RFC 6455, section 1.3."""

UPGRADE = {
    "Host": "headrace.example",
    "Upgrade": "websocket",
    "Connection": "Upgrade",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": KEY,
}


def request(line: str = "GET /v1/ws HTTP/1.1", headers: dict[str, str] = UPGRADE) -> bytes:
    lines = [line, *(f"{name}: {value}" for name, value in headers.items() if value)]
    return "\r\n".join([*lines, "", ""]).encode()


class Answer:
    """A server's answer to a request, up to the end of its connection or its headers."""

    def __init__(self, data: bytes) -> None:
        head, _, self.body = data.partition(b"\r\n\r\n")
        first, *rest = head.decode().split("\r\n")
        version, status, self.phrase = first.split(" ", 2)
        assert version == "HTTP/1.1"
        self.status = int(status)
        self.headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in rest)}


def ask(server: ServerProcess, data: bytes) -> Answer | None:
    """Send bytes and read the whole answer; return None if it is empty."""
    with socket.create_connection(server.ws, timeout=30) as connection:
        connection.sendall(data)
        received = b""
        try:
            while more := connection.recv(65536):
                received += more
                if received.startswith(b"HTTP/1.1 101") and b"\r\n\r\n" in received:
                    break
        except ConnectionResetError:
            pass
    return Answer(received) if received else None


def answer(server: ServerProcess, data: bytes) -> Answer:
    found = ask(server, data)
    assert found is not None
    if found.status != 101:
        assert found.headers["connection"] == "close"
        is_head = data.startswith(b"HEAD ")
        assert len(found.body) == (0 if is_head else int(found.headers["content-length"]))
        assert int(found.headers["content-length"]) > 0, "everyone is told why"
    return found


# The handshake


def test_the_handshake_of_the_rfc_is_answered_as_the_rfc_says(server: ServerProcess) -> None:
    found = answer(server, request())
    assert found.status == 101
    assert found.headers["sec-websocket-accept"] == ACCEPT
    assert found.headers["upgrade"].lower() == "websocket"
    assert found.headers["connection"].lower() == "upgrade"
    assert "sec-websocket-extensions" not in found.headers
    assert "sec-websocket-protocol" not in found.headers


@pytest.mark.parametrize(
    "changed",
    [
        {"Connection": "keep-alive, Upgrade"},
        {"Connection": "upgrade , keep-alive"},
        {"Connection": "keep-alive\r\nConnection: Upgrade"},
        {"Upgrade": "WebSocket"},
        {"Upgrade": "h2c, websocket"},
        {"Host": "[::1]:8120"},
        {"Sec-WebSocket-Protocol": "wombat, chat"},
        {"Sec-WebSocket-Extensions": "permessage-deflate; client_max_window_bits"},
        {"Cookie": "x" * 8000, "User-Agent": "Mozilla/5.0 (é)"},
        {"X-Empty": " "},
    ],
    ids=str,
)
def test_what_browsers_and_proxies_make_of_the_handshake_is_accepted(
    server: ServerProcess, changed: dict[str, str]
) -> None:
    found = answer(server, request(headers=UPGRADE | changed))
    assert found.status == 101
    assert "sec-websocket-extensions" not in found.headers
    protocol = "wombat" if "Sec-WebSocket-Protocol" in changed else None
    assert found.headers.get("sec-websocket-protocol") == protocol


def test_compression_is_offered_in_vain_and_not_missed(dial: Dial) -> None:
    factory = ClientPerMessageDeflateFactory(client_max_window_bits=True)
    offer = build_extension([(factory.name, factory.get_request_params())])
    wire = dial(headers=[("Sec-WebSocket-Extensions", offer)])
    assert "Sec-WebSocket-Extensions" not in wire.response.headers
    assert wire.alive()


@pytest.mark.parametrize("path", ["/v1/ws?", "/v1/ws?token=abc&x=/healthz", "/v1/ws?/v1/ws?"])
def test_a_query_is_allowed(dial: Dial, path: str) -> None:
    assert dial(path=path).alive()


def test_a_handshake_that_comes_one_byte_at_a_time_is_accepted(server: ServerProcess) -> None:
    with socket.create_connection(server.ws, timeout=30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in request():
            connection.sendall(bytes([byte]))
        assert connection.recv(12) == b"HTTP/1.1 101"


@pytest.mark.parametrize("count", [1, 1000])
def test_messages_may_come_in_one_piece_with_the_handshake(
    server: ServerProcess, name: str, count: int
) -> None:
    frames = [frame(publish(name, number, bytes(500))) for number in range(count)]
    with socket.create_connection(server.ws, timeout=30) as connection:
        connection.sendall(request() + b"".join(frames) + frame(ping(42)))
        received = b""
        while not (b"pong" in received and _acked(received, count - 1)):
            more = connection.recv(65536)
            assert more, received
            received += more


def _acked(received: bytes, number: int) -> bool:
    written = number.to_bytes(1 if number < 128 else 2, "big")
    return b"sequence_number" + (b"" if number < 128 else b"\xcd") + written in received


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"Upgrade": ""}, 426),
        ({"Upgrade": "h2c"}, 426),
        ({"Upgrade": "websockets"}, 426),
        ({"Connection": ""}, 426),
        ({"Connection": "keep-alive"}, 426),
        ({"Sec-WebSocket-Version": ""}, 426),
        ({"Sec-WebSocket-Version": "8"}, 426),
        ({"Sec-WebSocket-Version": "14"}, 426),
        ({"Sec-WebSocket-Version": "thirteen"}, 426),
        ({"Sec-WebSocket-Key": ""}, 400),
        ({"Sec-WebSocket-Key": "short"}, 400),
        ({"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZTE="}, 400),
        ({"Sec-WebSocket-Key": "é" * 24}, 400),
        ({"Sec-WebSocket-Key": "*" * 24}, 400),
    ],
    ids=str,
)
def test_a_handshake_that_is_not_one_is_refused_with_a_reason(
    server: ServerProcess, changed: dict[str, str], status: int
) -> None:
    found = answer(server, request(headers=UPGRADE | changed))
    assert found.status == status
    if status == 426:
        wanted = "Sec-WebSocket-Version" if "Sec-WebSocket-Version" in changed else "Upgrade"
        assert found.headers[wanted.lower()] == ("websocket" if wanted == "Upgrade" else "13")


def test_a_browser_that_comes_by_is_told_what_this_is(server: ServerProcess) -> None:
    found = answer(server, request(headers={"Host": "localhost", "Accept": "text/html"}))
    assert found.status == 426
    assert b"WebSocket" in found.body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_a_websocket_is_opened_with_get_alone(server: ServerProcess, method: str) -> None:
    found = answer(server, request(f"{method} /v1/ws HTTP/1.1"))
    assert found.status == 405
    assert found.headers["allow"] == "GET"


def test_a_websocket_is_not_opened_with_http_1_0(server: ServerProcess) -> None:
    """RFC 6455 section 4.2.1 asks for 1.1 or more, because an old proxy would not forward frames."""
    found = answer(server, request("GET /v1/ws HTTP/1.0"))
    assert found.status == 426


# Plain requests


@pytest.mark.parametrize(
    "path", ["/", "/v1/ws/", "/v1/wsx", "/v1", "/V1/WS", "/v1/topics", "/metrics", "//v1/ws", "*"]
)
@pytest.mark.parametrize("headers", [UPGRADE, {"Host": "localhost"}], ids=["upgrade", "plain"])
def test_there_is_nothing_on_other_paths(
    server: ServerProcess, path: str, headers: dict[str, str]
) -> None:
    found = answer(server, request(f"GET {path} HTTP/1.1", headers))
    assert found.status in (400, 404) if path == "*" else 404


def test_health_is_asked_for_as_on_the_http_listener(server: ServerProcess) -> None:
    for method in ("GET", "HEAD"):
        connection = http.client.HTTPConnection(*server.ws, timeout=30)
        connection.request(method, "/healthz")
        found = connection.getresponse()
        assert found.status == 200
        assert found.headers["Content-Type"] == "application/json"
        body = found.read()
        if method == "GET":
            assert json.loads(body) == {"status": "ok"}
        else:
            assert body == b""
        connection.close()


def test_health_says_why_publishes_are_held_back(start: Start) -> None:
    server = start(config=SMALL)
    with Wire(server.ws, timeout_s=30) as publisher:
        much = [publish("t", number, bytes(100_000)) for number in range(80)]
        with held_back(server, lambda: publisher.send(*much)):
            found = answer(server, request("GET /healthz HTTP/1.1", {"Host": "x"}))
            assert found.status == 503
            assert "journal" in json.loads(found.body)["status"]
        publisher.wait_ack("t", 79)
    found = answer(server, request("GET /healthz HTTP/1.1", {"Host": "x"}))
    assert found.status == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /healthz HTTP/1.0\r\n\r\n",
        b"GET /healthz HTTP/1.0\r\nHost: x\r\nConnection: keep-alive\r\n\r\n",
        b"GET /healthz?verbose=1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nfoo",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nHEAD /nothing HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["1.0", "1.0 keep-alive", "query", "h2c", "body", "pipelined", "pipelined with others"],
)
def test_health_is_answered_to_any_way_of_asking(server: ServerProcess, sent: bytes) -> None:
    found = answer(server, sent)
    assert found.status == 200
    assert json.loads(found.body) == {"status": "ok"}


def test_health_takes_no_other_method(server: ServerProcess) -> None:
    found = answer(server, request("POST /healthz HTTP/1.1", {"Content-Length": "0"}))
    assert found.status == 405
    assert found.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0" * 100,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        b"hello\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /v1/ws\r\n\r\n",
        b"GET /v1/ws HTTP/9.9\r\n\r\n",
        b"GET /v1/ws HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /v1/ws HTTP/1.1\r\nHost: \0\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        foreign_figg.publish(b"t", 0, b"foo"),
        bytes(range(256)) * 100,
    ],
    ids=repr,
)
def test_what_is_not_http_is_refused_or_closed(
    server: ServerProcess, dial: Dial, garbage: bytes
) -> None:
    found = ask(server, garbage)
    assert found is None or 400 <= found.status < 600
    assert dial().alive()


def test_what_is_not_http_is_told_and_counted_as_on_the_http_listener(start: Start) -> None:
    server = start()
    tls = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)
    for address in (server.ws, server.http):
        for sent, told in (
            (tls, b"this is TLS, and the port is plain"),
            (b"hi\r\n", b"not an HTTP request"),
        ):
            with socket.create_connection(address, timeout=30) as connection:
                connection.sendall(sent)
                assert told in connection.recv(1000)
    counts = metrics(server)
    assert counts["headrace_connections_refused_total"] == 1, "TLS on the WebSocket listener"
    assert counts["headrace_http_requests_refused_total"] == 3


@pytest.mark.parametrize(
    ("flood", "status"),
    [
        (b"GET /v1/ws HTTP/1.1\r\nX: " + b"x" * 20_000, 431),
        (b"GET /v1/ws HTTP/1.1\r\n" + b"X: y\r\n" * 102, 431),
        (b"GET /v1/ws HTTP/1.1\r\n" + b"X: y\r\n" * 4000, 431),
        (b"GET /" + b"x" * 10_000, 414),
        (request(headers=UPGRADE | {"Cookie": "x" * 16_384}), 431),
        (b"GET /v1/ws HTTP/1.1\r\n" + b"X: " + b"y" * 4_000_000, 431),
        (b"\r\n" * 10_000, 431),
        (b"GET /v1/ws HTTP/1.1\r\nX: y\r\n z\r\n\r\n", 400),
        (request(headers=UPGRADE | {"Content-Length": "100000"}), 413),
        (request(headers=UPGRADE | {"Content-Length": "9" * 30}), 413),
        (request("POST /healthz HTTP/1.1", {"Content-Length": "9" * 19}) + bytes(4_000_000), 413),
    ],
    ids=[
        *("a value", "102 headers", "many headers", "a path", "a whole request", "4 MB"),
        *("empty lines", "a folded header", "a body", "an absurd body", "and much of it"),
    ],
)
def test_a_request_beyond_a_limit_is_refused(
    server: ServerProcess, dial: Dial, flood: bytes, status: int
) -> None:
    assert answer(server, flood).status == status
    assert dial().alive()


def test_a_request_that_does_not_arrive_is_given_up_after_5_seconds(server: ServerProcess) -> None:
    """This holds however busy the peer looks. Only this test waits for the timeout."""
    begun = time.monotonic()
    with ExitStack() as stack:
        silent, slow, late = (
            stack.enter_context(socket.create_connection(server.ws, timeout=0.1)) for _ in range(3)
        )
        late.sendall(request()[:-2])
        slowly = iter(request(headers=UPGRADE | {"Cookie": "x" * 1000}))
        waiting = [silent, slow, late]
        said = dict.fromkeys(waiting, b"")
        while waiting and time.monotonic() - begun < 60:
            connection = waiting.pop(0)
            data = bytes([next(slowly)]) if connection is slow else b""
            if _is_over(connection, data, said):
                assert time.monotonic() - begun > 4.5
            else:
                waiting.append(connection)
        assert not waiting
    assert said[silent] == b""
    assert said[slow][:12] == said[late][:12] == b"HTTP/1.1 408"


def _is_over(connection: socket.socket, data: bytes, said: dict[socket.socket, bytes]) -> bool:
    try:
        if not said[connection]:
            connection.sendall(data)
        more = connection.recv(1000)
        said[connection] += more
        return not more
    except TimeoutError:
        return False
    except OSError:
        return True


# Origins


def status_for(server: ServerProcess, origin: str | None, host: str = "headrace.example") -> int:
    changed = {"Host": host} | ({} if origin is None else {"Origin": origin})
    return answer(server, request(headers=UPGRADE | changed)).status


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        (None, "headrace.example"),
        ("http://headrace.example", "headrace.example"),
        ("http://headrace.example:3000", "headrace.example:8120"),
        ("https://headrace.example", "headrace.example:8120"),
        ("http://HEADRACE.example", "Headrace.Example"),
        ("http://127.0.0.1:8080", "127.0.0.1:8120"),
        ("http://localhost:5173", "localhost:8120"),
        ("http://localhost:8000", "127.0.0.1:8120"),
        ("http://[::1]:5173", "[::1]:8120"),
    ],
)
def test_pages_of_the_same_host_may_connect_whatever_their_port(
    server: ServerProcess, origin: str | None, host: str
) -> None:
    assert status_for(server, origin, host) == 101


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://evil.example", "headrace.example"),
        ("http://headrace.example.evil.example", "headrace.example"),
        ("http://evil.example/headrace.example", "headrace.example"),
        ("http://headrace.example@evil.example", "headrace.example"),
        ("http://sub.headrace.example", "headrace.example"),
        ("null", "headrace.example"),
        ("headrace.example", "headrace.example"),
        ("http://[", "headrace.example"),
        ("http://headrace.example, http://evil.example", "headrace.example"),
        ("http://headrace.example\r\nOrigin: http://evil.example", "headrace.example"),
        ("http://headrace.example\r\nOrigin: http://headrace.example", "headrace.example"),
        ("http://evil.example", ""),
        ("file://", ""),
        ("*", "headrace.example"),
    ],
)
def test_pages_of_other_hosts_may_not(server: ServerProcess, origin: str, host: str) -> None:
    found = answer(server, request(headers=UPGRADE | {"Host": host, "Origin": origin}))
    assert found.status == 403
    assert b"origin" in found.body


def test_a_refused_page_is_logged_with_the_setting_that_lets_it_in(start: Start) -> None:
    server = start("--set=listen.origins=https://app.example")
    assert status_for(server, "http://headrace.example:3000") == 101, "besides the same host"
    assert status_for(server, "http://other.example:3000") == 403
    setting = '["https://app.example", "http://other.example:3000"]'
    wait_until(lambda: f"set listen.origins = {setting}" in server.stderr)


def test_listed_pages_may_connect_and_no_others(start: Start) -> None:
    server = start("--set=listen.origins=no-same-host,https://app.example,http://localhost:3000")
    assert status_for(server, None) == 101
    assert status_for(server, "https://app.example") == 101
    assert status_for(server, "https://APP.example") == 101
    assert status_for(server, "http://localhost:3000") == 101
    for other in (
        "http://app.example",
        "https://app.example:8443",
        "http://localhost:3001",
        "https://app.example.evil.example",
        "http://headrace.example",
        "null",
    ):
        assert status_for(server, other) == 403, other


def test_all_pages_may_connect_where_the_operator_says_so(start: Start) -> None:
    server = start("--set=listen.origins=*")
    for origin in (None, "https://evil.example", "null", "file://", "anything"):
        assert status_for(server, origin) == 101


# Limits


@pytest.fixture
def crowded(start: Start) -> ServerProcess:
    return start("--set=limits.connections_max=4")


def test_a_connection_too_many_is_told_so(crowded: ServerProcess) -> None:
    with ExitStack() as stack:
        wires = [stack.enter_context(Wire(crowded.ws)) for _ in range(3)]
        figg_wire = stack.enter_context(foreign_figg.Wire(crowded.figg))
        assert figg_wire.alive(), "connections of all protocols count together"
        for _ in range(3):
            with pytest.raises(InvalidStatus) as refused:
                Wire(crowded.ws)
            assert refused.value.response.status_code == 503
            assert b"connections_max" in refused.value.response.body
        assert all(wire.alive() for wire in wires)
        health = answer(crowded, request("GET /healthz HTTP/1.1", {"Host": "x"}))
        assert health.status == 200
        figg_wire.close()
        wait_until(lambda: _let_in(crowded), 30, "room for a new connection")
        assert all(wire.alive() for wire in wires)


def test_requests_that_are_not_let_in_take_no_room(crowded: ServerProcess) -> None:
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(crowded.ws, timeout=30))
        with Wire(crowded.ws) as wire:
            assert wire.alive()


def test_a_flood_of_connections_leaves_existing_ones_served(crowded: ServerProcess) -> None:
    with Wire(crowded.ws) as wire, ExitStack() as stack:
        for number in range(300):
            flood = stack.enter_context(socket.create_connection(crowded.ws, timeout=30))
            flood.sendall(request())
            if number % 50 == 0:
                assert wire.alive()
        assert wire.alive()


def _let_in(server: ServerProcess) -> bool:
    try:
        with Wire(server.ws) as wire:
            wire.send(ping(1))
            return wire.receive() == Message(PONG, number=1)
    except (InvalidStatus, Closed, OSError):
        return False
