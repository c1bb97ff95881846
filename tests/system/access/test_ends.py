"""Access control while a server runs: tokens that begin, change and end; files that vanish or are damaged."""

import contextlib
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest

from headrace.access.guesses import FREE
from headrace.testing import ServerProcess, wait_until
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
    status_of_handshake,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def stored(directory: Path) -> Tokens:
    made = Tokens(directory / "data")
    made.add("kept", EVERYTHING)
    return made


@pytest.fixture
def server(directory: Path, stored: Tokens) -> Iterator[ServerProcess]:
    config = f"--config={directory / 'config.toml'}"
    with ServerProcess(directory / "data", config) as process:
        yield process
        assert "Traceback" not in process.stderr, process.stderr


def published(peer: Figg, topic: str, number: int, payload: bytes = b"x") -> bool:
    peer.send(figg.encode_publish(topic, number, payload))
    return isinstance(peer.hear_until(figg.Ack, tokens.AuthRefused), figg.Ack)


def is_known(server: ServerProcess, token: str) -> bool:
    return ask(server, token, "GET", "/v1/topics").status_code == 200


def test_a_new_token_opens_and_a_revoked_one_ends_all_that_it_has_begun(server, stored):
    assert not is_known(server, "new")
    stored.add("new", EVERYTHING)
    wait_until(lambda: is_known(server, "new"))
    host, port = server.http
    with (
        Figg(server, "kept") as kept,
        Figg(server, "new") as peer,
        Socket(server, wombat.PATH, bearer="new") as ws,
        Socket(server, wombat.PATH) as shown,
        Socket(server, f"{logux.PATH}/log") as log,
        Socket(server, channel.PATH) as member,
        ThreadPoolExecutor(3) as threads,
    ):
        assert published(kept, "topic", 0)
        assert published(peer, "topic", 0)
        ws.send(wombat.encode_attach("topic", None))
        assert ws.hear()["type"] == wombat.ATTACHED
        shown.send(wombat.encode_auth("new"))
        assert shown.hear()["type"] == tokens.AUTH_OK
        log.send(["connect", 5, "u:1", 0, {"token": "new"}])
        assert [log.hear()[0], log.hear()[0]] == ["headers", "connected"]
        member.send({"type": "hello", "processor": "p", "token": "new"})
        assert member.hear()["type"] == "welcome"
        ask(server, "new", "POST", "/v1/channel/join?name=c&processor=q")
        began = threading.Event()

        def upload() -> Iterator[bytes]:
            began.set()
            yield b"HRB1"
            ended.wait(60)

        ended = threading.Event()
        version = ask(server, "kept", "GET", "/v1/topics").json()["version"]
        path = "/v1/channel/messages?name=c&processor=q&wait_s=50"
        waiting = threads.submit(ask, server, "new", "GET", path)
        uploading = threads.submit(
            httpx.post,
            f"http://{host}:{port}/v1/staged",
            content=upload(),
            headers={"Authorization": "Bearer new"},
            timeout=60,
        )
        assert began.wait(30)
        wait_until(lambda: staged_or_waiting(server) == 2)
        stored.revoke("new")
        assert waiting.result(60).status_code == 401
        ended.set()
        # The answer may come in the middle of the body, and the connection ends with it.
        with contextlib.suppress(httpx.TransportError):
            assert uploading.result(60).status_code == 401
        refused = peer.hear_until(tokens.AuthRefused)
        assert refused.code == tokens.CREDENTIALS
        assert "revoked" in refused.reason
        assert ws.hear()["type"] == tokens.AUTH_REFUSED
        assert ws.hear() is None
        assert shown.hear()["type"] == tokens.AUTH_REFUSED
        assert log.hear() == ["error", "wrong-credentials"]
        assert member.hear()["code"] == "wrong-credentials"
        assert published(kept, "topic", 1)
        assert version
    with Figg(server, "new") as peer:
        assert peer.hear_until(tokens.AuthRefused).reason == "the token was revoked"
    assert not is_known(server, "new")


def test_live_readers_of_a_stream_end_with_their_token(server, stored):
    stored.add("new", EVERYTHING)
    wait_until(lambda: is_known(server, "new"))
    ask(server, "kept", "PUT", "/v1/stream/s", headers={"Content-Type": "text/plain"})

    def followers() -> int:
        found: int = ask(server, "kept", "GET", "/v1/topic?name=s").json()["subscribers"]
        return found

    path, shown = "/v1/stream/s?offset=-1&live=", {"Authorization": "Bearer new"}
    with (
        httpx.stream("GET", f"{server.http_url}{path}sse", headers=shown, timeout=60) as events,
        ThreadPoolExecutor(1) as threads,
    ):
        parts = events.iter_text()
        text = ""
        while "upToDate" not in text:
            text += next(parts)
        waiting = threads.submit(ask, server, "new", "GET", f"{path}long-poll")
        wait_until(lambda: followers() == 2)
        stored.revoke("new")
        assert waiting.result(60).status_code == 401
        with contextlib.suppress(httpx.RemoteProtocolError):
            assert not "".join(parts), "an answer that is cut short"
    wait_until(lambda: followers() == 0)


def staged_or_waiting(server: ServerProcess) -> int:
    """Return the number of requests of the token that the server has begun to carry out."""
    text = ask(server, "kept", "GET", "/metrics").text
    held = [line for line in text.splitlines() if line.startswith("headrace_http_requests_bytes ")]
    member = ask(server, "kept", "GET", "/v1/channel?name=c").json()["members"][0]
    return int(float(held[0].split()[1]) > 0) + int(member["present"])


def test_an_expired_token_ends_its_connection_with_the_protocols_own_message(server, stored):
    stored.add("brief", EVERYTHING, expires_ms=time.time_ns() // 1_000_000 + 3000)
    unknown = "the token is not known here"
    wait_until(lambda: ask(server, "brief", "GET", "/v1/topics").json().get("error") != unknown)
    with Figg(server, "brief") as peer:
        heard = peer.hear_until(tokens.AuthOk, tokens.AuthRefused)
        if isinstance(heard, tokens.AuthOk):
            assert 0 < heard.valid_ms <= 3000
            heard = peer.hear_until(tokens.AuthRefused)
        assert "expired" in heard.reason


def test_the_first_token_closes_an_open_server(directory, tmp_path):
    with ServerProcess(directory / "data") as server:
        with Figg(server) as peer, Socket(server, wombat.PATH) as ws:
            assert published(peer, "topic", 0)
            Tokens(directory / "data").add("first", EVERYTHING)
            assert isinstance(peer.hear_until(tokens.AuthRefused), tokens.AuthRefused)
            assert ws.hear()["type"] == tokens.AUTH_REFUSED
        assert ask(server, None, "GET", "/v1/topics").status_code == 401
        assert ask(server, "first", "GET", "/v1/topics").status_code == 200


def test_no_door_opens_when_the_tokens_vanish_or_are_damaged(server, directory):
    file = directory / "data" / "tokens.json"
    whole = file.read_bytes()
    damaged = whole.replace(b"kept", b"keep")
    file.write_bytes(damaged)
    health = lambda: ask(server, None, "GET", "/healthz").json()  # noqa: E731
    wait_until(lambda: "damaged" in health().get("access", ""))
    assert is_known(server, "kept")  # the last known tokens stay
    assert ask(server, None, "GET", "/v1/topics").status_code == 401
    server.restart()
    assert "damaged" in health()["access"]
    assert not is_known(server, "kept")
    assert ask(server, None, "GET", "/v1/topics").status_code == 401
    file.write_bytes(whole)
    wait_until(lambda: is_known(server, "kept"))
    assert "access" not in health()
    file.unlink()
    wait_until(lambda: not is_known(server, "kept"))
    assert ask(server, None, "GET", "/v1/topics").status_code == 401
    with Figg(server) as peer:
        assert not published(peer, "topic", 0)


def test_a_reload_changes_the_tokens_of_the_configuration(server, directory):
    digest = msgspec.json.encode(tokens_hash("configured")).decode()
    entry = f'[[access.token]]\nname = "c"\nsha256 = {digest}\ngrants = ["inspect:*"]\n'
    file = directory / "config.toml"
    file.write_text(CONFIG + entry)
    server.signal(signal.SIGHUP)
    wait_until(lambda: is_known(server, "configured"))
    assert ask(server, "configured", "DELETE", "/v1/topic?name=x").status_code == 403
    file.write_text(CONFIG + "[access]\nanonymous = ['inspect:*']\n")
    server.signal(signal.SIGHUP)
    wait_until(lambda: not is_known(server, "configured"))
    assert ask(server, None, "GET", "/v1/topics").status_code == 200
    assert ask(server, None, "DELETE", "/v1/topic?name=x").status_code == 401


def tokens_hash(token: str) -> str:
    from headrace.access.tokens import hash_of

    return hash_of(token)


def test_a_header_of_the_handshake_says_who_the_peer_is(server):
    for path in (wombat.PATH, channel.PATH, logux.PATH):
        assert status_of_handshake(server, path, bearer="kept") == 101
        assert status_of_handshake(server, path, bearer="wrong") == 401
        assert status_of_handshake(server, path, headers={"Authorization": "Basic x"}) == 401
    with Socket(server, logux.PATH, bearer="kept") as peer:
        peer.send(["connect", 5, "u:1", 0])
        assert [peer.hear()[0], peer.hear()[0]] == ["headers", "connected"]


def test_a_forbidden_publish_is_counted_and_never_acknowledged_or_stored(server, stored):
    stored.add("orders", ["publish,create:orders/*"])
    wait_until(lambda: ask(server, "orders", "GET", "/v1/topics").status_code == 200)
    with Figg(server, "orders") as peer:
        assert published(peer, "orders/1", 0)
        peer.send(
            figg.encode_publish("orders/1", 1, b"x"),
            figg.encode_publish("other", 2, b"x"),
            figg.encode_publish("orders/1", 3, b"x"),
        )
        heard = peer.hear_until(figg.Ack, tokens.AuthRefused)
        assert heard.code == tokens.FORBIDDEN
        assert '"other"' in heard.reason
    assert ask(server, "kept", "GET", "/v1/topic?name=other").status_code == 404
    assert ask(server, "kept", "GET", "/v1/topic?name=orders/1").json()["records"] == 1
    metrics = ask(server, "kept", "GET", "/metrics").text
    assert 'headrace_refusals_total{protocol="figg",reason="forbidden"} 1' in metrics
    assert 'headrace_access_decisions_total{decision="refused",operation="publish"}' in metrics


def test_a_token_without_the_grant_to_create_publishes_only_to_topics_that_exist(server, stored):
    stored.add("writer", ["publish:*"])
    wait_until(lambda: ask(server, "writer", "GET", "/v1/topics").status_code == 200)
    with Figg(server, "kept") as peer:
        assert published(peer, "topic", 0)
    with Figg(server, "writer") as peer:
        assert published(peer, "topic", 0)
        assert published(peer, "topic", 1)
        ask(server, "kept", "DELETE", "/v1/topic?name=topic")
        assert not published(peer, "topic", 2)


@pytest.mark.parametrize("version", [[0, 0], [0, 1]])
def test_a_client_of_logux_0_does_not_act_as_another_user_by_a_node_id(server, stored, version):
    stored.add("alice", ["as:alice", "publish,subscribe,create:$logux/*"])
    wait_until(lambda: ask(server, "alice", "GET", "/v1/topics").status_code == 200)
    shown = {"credentials": "alice"} if version[1] else "alice"
    with Socket(server, logux.PATH) as peer:
        peer.send(["connect", version, "bob:1", 0, shown])
        assert "credentials" in peer.hear()[1].lower()
    # A number and a string are the same node in the ids of protocol 5.
    for author, answer in (("alice:2", "synced"), ("bob:1", "error"), (5, "error")):
        with Socket(server, logux.PATH) as peer:
            peer.send(["connect", version, "alice:1", 0, shown])
            assert peer.hear()[0] == "connected"
            peer.send(["sync", 1, {"type": "test"}, [1, author, 0]])
            heard = peer.hear()
            while heard[0] in ("pong", "sync"):
                heard = peer.hear()
            assert heard[0] == answer


@pytest.mark.parametrize("asks", ["subscription", "reader"])
def test_no_subscription_outlives_the_credentials_that_allowed_it(server, stored, asks):
    """A peer cannot keep what a token has opened by showing another one before the first is revoked."""
    stored.add("reads", ["subscribe:secret", "cursors:r"])
    stored.add("also reads", ["subscribe:secret", "cursors:r"])
    stored.add("writes", ["publish:other", "subscribe:secret" if asks == "reader" else "cursors:r"])
    wait_until(lambda: is_known(server, "writes"))
    with Figg(server, "reads") as peer, Figg(server, "kept") as kept:
        if asks == "subscription":
            peer.send(figg.encode_attach("secret", None))
            assert peer.hear_until(figg.Attached)
        else:
            peer.send(
                figg.encode_of_reader(
                    readers.Read("secret", "r", newest=False, instance=1, window=1 << 20)
                )
            )
            assert peer.hear_until(readers.Reading)
        peer.send(figg.encode_auth("also reads"))
        assert peer.hear_until(tokens.AuthOk, tokens.AuthRefused) == tokens.AuthOk(0)
        peer.send(figg.encode_auth("writes"))
        refused = peer.hear_until(tokens.AuthOk, tokens.AuthRefused)
        assert isinstance(refused, tokens.AuthRefused)
        assert refused.code == tokens.FORBIDDEN
        stored.revoke("reads")
        assert published(kept, "secret", 0)
        assert peer.hear_until(figg.Data, readers.Records) is None


def test_wrong_credentials_whose_sender_does_not_wait_for_the_answer_do_no_harm(server):
    """The answers of many wrong handshakes wait. The fixture checks that no error was logged."""
    host, port = server.ws
    wrong = (
        f"GET {wombat.PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\nUpgrade: websocket\r\n"
        "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    ).encode()
    waiting = []
    for _ in range(FREE + 5):
        waiting.append(socket.create_connection((host, port), 30))
        waiting[-1].sendall(wrong)
    wait_until(lambda: refused_credentials(server) == len(waiting))
    # The answer to the last one waits longest.
    with socket.create_connection((host, port), 30) as last:
        last.sendall(wrong)
        for one in waiting:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()
        assert last.recv(100).startswith(b"HTTP/1.1 401")
    assert is_known(server, "kept")


def refused_credentials(server: ServerProcess) -> int:
    text = ask(server, "kept", "GET", "/metrics").text
    counts = [line.split() for line in text.splitlines() if "credentials_refused_total{" in line]
    return sum(int(float(count)) for name, count in counts if 'protocol="http"' in name)
