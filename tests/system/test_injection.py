"""Injection: names and payloads that would begin a log line, forge a header, or command a terminal.

Everything that a stranger chooses and an operator sees is tried: names of topics, readers, channels and
processors, payloads, and what a handshake says. Elsewhere: the functions that quote, alone
(`tests/test_printing.py`).
"""

import json
import os
import pty
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import quote

import httpx
import pytest

from headrace import connect_blocking
from headrace.testing import ServerProcess, wait_until
from tests.system.figg.foreign import publish

HOSTILE = {
    "title": "\x1b]0;owned\x07",
    "colour": "\x1b[31m",
    "C1": "\x9b2J",
    "line": "\r\n12:00:00 INFO forged",
    "header": "\r\nSet-Cookie: forged=1\r\n\r\n<b>",
    "bidi": "\u202egnp.exe\u2066",
    "separator": "\u2028forged\u2029\x85forged",
    "delete": "\x7f\x08\x08",
    "tag": "\U000e0041",
    "table": "forged{} 1\n# TYPE forged counter\nforged",
}
LEVELS = "DEBUG|INFO|WARNING|ERROR"
HUMAN_LINE = re.compile(rf"\d\d:\d\d:\d\d ({LEVELS}) \S")
WEBSOCKET = (
    b"GET %b HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n%b\r\n"
)


@pytest.fixture(scope="module", params=["human", "json"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server in whose log every text has come that a peer can choose, in each format of log lines."""
    directory = tmp_path_factory.mktemp("injection")
    flags = (f"--set=log_format={request.param}", "--set=log_level=debug")
    refuse = "--set=limits.refusal_delay_s=0"
    with ServerProcess(directory / "data", *flags, refuse) as process:
        for text in HOSTILE.values():
            attack(process, text)
        yield process


def attack(server: ServerProcess, text: str) -> None:
    """Say the text wherever the server takes one: names that are accepted, and requests that are not."""
    with connect_blocking(server.figg_url) as client:
        client.publish(f"topic/{text}", text.encode())
    say(
        server.figg, publish(f"${text}".encode(), 1, b"reserved")
    )  # refused, with a line in the log
    position = {"topic": f"topic/{text}", "epoch": 0, "offset": 0, "ordinal": 0}
    url = f"{server.http_url}/v1"
    httpx.post(f"{url}/cursors", json={"reader": f"reader{text}", "positions": [position]})
    member = {"name": f"channel{text}", "processor": f"processor{text}"}
    httpx.post(f"{url}/channel/join", params=member)
    httpx.post(f"{url}/channel/messages", params=member | {"number": 1}, content=json.dumps(text))
    raw = text.encode()
    for path in (b"/v1/logux/" + raw, quote(f"/v1/logux/{text}").encode(), b"/" + raw):
        say(server.ws, WEBSOCKET % (path, b""))
    for header in (b"Origin", b"Host", b"Authorization", b"Sec-WebSocket-Protocol", b"X"):
        safe = raw.replace(b"\r", b"").replace(b"\n", b"")
        for value in (raw, safe, b"http://" + safe):
            say(server.ws, WEBSOCKET % (b"/v1/ws", header + b": " + value + b"\r\n"))
    say(server.figg, raw + b"\r\n\r\n")


def say(address: tuple[str, int], data: bytes) -> bytes:
    """Send bytes, stop sending, and return all that comes."""
    heard = b""
    with socket.create_connection(address, 30) as peer:
        try:
            peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
            while more := peer.recv(65536):
                heard += more
        except ConnectionError:
            pass
    return heard


def test_each_log_line_is_the_servers_own(server: ServerProcess) -> None:
    lines = server.stderr.split("\n")[:-1]
    assert len(lines) > len(HOSTILE)
    for line in lines:
        assert line.isprintable(), repr(line)
        if line.startswith("{"):
            assert {"time", "level", "message"} <= json.loads(line).keys()
        else:
            assert HUMAN_LINE.match(line), line
    assert not any(re.match(r"12:00:00 INFO forged", line) for line in lines)


def test_no_command_prints_what_a_terminal_obeys(server: ServerProcess) -> None:
    commands = [["topics"], ["topics", "--json"], ["channels"], ["channels", "--json"], ["status"]]
    for text in HOSTILE.values():
        commands.append(["inspect", f"topic/{text}"])
        commands.append(["subscribe", f"topic/{text}", "--from-start", "--until-end", "--json"])
    sample = [*commands[:5], *commands[5::3]]
    for command in sample:
        done = run(server, *command)
        assert done.returncode == 0, done.stderr
        for line in (done.stdout + done.stderr).decode().split("\n"):
            assert line.isprintable(), (command, line)
    listed = run(server, "topics", "--json").stdout.decode().splitlines()
    names = {json.loads(line)["name"] for line in listed}
    assert {f"topic/{text}" for text in HOSTILE.values()} <= names


def run(server: ServerProcess, *command: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [sys.executable, "-m", "headrace", *command],
        capture_output=True,
        env=environment(server),
        timeout=120,
    )


def environment(server: ServerProcess) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
    return kept | {"HEADRACE_URL": server.figg_url, "HEADRACE_HTTP": server.http_url}


def test_a_payload_reaches_a_pipe_as_it_is_and_a_terminal_without_commands(
    server: ServerProcess,
) -> None:
    text = HOSTILE["title"] + HOSTILE["C1"] + HOSTILE["bidi"]
    with connect_blocking(server.figg_url) as client:
        client.publish("payload", text.encode())
    command = ["subscribe", "payload", "--from-start", "--count", "1"]
    assert run(server, *command).stdout == text.encode() + b"\n"
    ours, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", *command],
        stdin=subprocess.DEVNULL,
        stdout=its,
        stderr=subprocess.PIPE,
        env=environment(server),
    )
    os.close(its)
    shown = b""
    try:
        while more := os.read(ours, 4096):
            shown += more
    except OSError:
        pass  # so a terminal says that its last process has ended
    os.close(ours)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert shown.decode().rstrip("\r\n").isprintable(), shown
    assert b"\\u001b]0;owned\\u0007" in shown


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_no_answer_has_a_header_that_the_peer_chose(server: ServerProcess, text: str) -> None:
    value = quote(text, safe="")
    raw = text.encode()
    requests = [
        f"GET /v1/topic?name={value}",
        f"GET /v1/topics?prefix={value}",
        f"GET /v1/position?topic={value}&last={value}",
        f"DELETE /v1/topic?name={value}",
        f"GET /v1/channel?name={value}",
        f"GET /v1/channel/messages?name={value}&processor={value}",
        f"GET /{value}",
    ]
    heads = [
        request.encode() + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        for request in requests
    ]
    heads.append(WEBSOCKET % (b"/v1/ws", b"Origin: http://" + raw + b"\r\n"))
    heads.append(WEBSOCKET % (b"/" + quote(text).encode(), b""))
    for address in (server.http, server.ws):
        for head in heads:
            answer = say(address, head)
            assert b"set-cookie" not in answer.partition(b"\r\n\r\n")[0].lower(), answer
            assert answer.count(b"HTTP/1.1 ") <= 2, answer
            if b"\r\n\r\n" in answer and b"text/html" in answer:
                pytest.fail(f"an answer that a browser shows as a page: {answer!r}")


def test_no_name_forges_a_metric(server: ServerProcess) -> None:
    wait_until(lambda: server.running)
    text = httpx.get(f"{server.http_url}/metrics").text
    assert not [line for line in text.split("\n") if line.startswith(("forged", "# TYPE forged"))]
