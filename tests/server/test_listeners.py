"""Inherited sockets are matched to listeners, and peers at the wrong port are recognised; without sockets."""

import re
from pathlib import Path

import pytest

from headrace.config.settings import Listen
from headrace.config.values import Address
from headrace.errors import ListenError
from headrace.server.listeners import Inherited, assign, inherited_names, recognise
from headrace.wire.figg import messages as figg

DEFAULTS = Listen()
FREE = Listen(
    figg=Address("127.0.0.1", 0), ws=Address("127.0.0.1", 0), http=Address("127.0.0.1", 0)
)


def given(fds: str, names: str | None = None, pid: int = 7) -> dict[str, str]:
    environ = {"LISTEN_PID": str(pid), "LISTEN_FDS": fds}
    return environ if names is None else environ | {"LISTEN_FDNAMES": names}


def sockets(*described: tuple[str, str]) -> list[Inherited]:
    return [
        Inherited(3 + number, name, Address.parse(address))
        for number, (name, address) in enumerate(described)
    ]


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({}, []),
        (given("2", pid=8), []),
        ({"LISTEN_FDS": "3"}, []),
        (given("0"), []),
        (given("0", ""), []),
        (given("2"), ["", ""]),
        (given("3", "figg:ws:http"), ["figg", "ws", "http"]),
        (given("2", ":ws"), ["", "ws"]),
    ],
)
def test_sockets_are_inherited_by_the_process_they_are_for(
    environ: dict[str, str], names: list[str]
) -> None:
    assert inherited_names(environ, 7) == names


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (given("many"), 'LISTEN_FDS is "many"'),
        (given(""), 'LISTEN_FDS is ""'),
        (given("-1"), 'LISTEN_FDS is "-1"'),
        (given("4"), "at most 3 sockets, one for each listener"),
        (given("9" * 30), "at most 3 sockets"),
        (given("3", "figg:ws"), "LISTEN_FDNAMES has 2 names for the 3 inherited sockets"),
        (given("1", ""), "LISTEN_FDNAMES has 0 names for the 1 inherited sockets"),
    ],
)
def test_variables_that_make_no_sense_are_refused(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ListenError, match=words):
        inherited_names(environ, 7)


@pytest.mark.parametrize(
    ("inherited", "listeners"),
    [
        ([("http", "127.0.0.1:1"), ("figg", "[::]:2")], ["http", "figg"]),
        # A listener's name has precedence over a port, and names of units mean nothing.
        ([("ws", "127.0.0.1:8119"), ("headrace.socket", "127.0.0.1:8121")], ["ws", "http"]),
        ([("", "127.0.0.1:8121"), ("", "0.0.0.0:8120"), ("", "[::]:8119")], ["http", "ws", "figg"]),
        ([], []),
    ],
)
def test_a_socket_belongs_to_a_listener_by_name_or_else_by_port(
    inherited: list[tuple[str, str]], listeners: list[str]
) -> None:
    assert assign(sockets(*inherited), DEFAULTS) == listeners


def test_where_ports_are_equal_the_host_decides() -> None:
    settings = Listen(figg=Address("127.0.0.1", 80), ws=Address("127.0.0.2", 80))
    assert assign(sockets(("", "127.0.0.2:80")), settings) == ["ws"]
    with pytest.raises(ListenError, match="belongs to no listener"):
        assign(sockets(("", "127.0.0.3:80")), settings)


@pytest.mark.parametrize(
    ("inherited", "words"),
    [
        (
            [("wombat", "127.0.0.1:99")],
            r"inherited socket 3 \(named \"wombat\", 127\.0\.0\.1:99\) belongs to no listener",
        ),
        ([("", "[::1]:99")], r"inherited socket 3 \(without a name, \[::1\]:99\) belongs to no"),
        ([("figg", "127.0.0.1:1"), ("figg", "[::1]:1")], "3 .* and .* 4 .* both for the .* figg"),
        ([("figg", "127.0.0.1:1"), ("", "127.0.0.1:8119")], "both for the listener figg"),
    ],
)
def test_a_wrong_set_is_refused(inherited: list[tuple[str, str]], words: str) -> None:
    with pytest.raises(ListenError, match=words):
        assign(sockets(*inherited), DEFAULTS)


def test_a_setting_of_port_0_matches_no_socket() -> None:
    with pytest.raises(ListenError, match="belongs to no listener"):
        assign(sockets(("", "127.0.0.1:8119")), FREE)


def test_the_socket_units_fit_the_default_settings() -> None:
    units = sorted((Path(__file__).parents[2] / "deploy" / "systemd").glob("*.socket"))
    texts = [unit.read_text() for unit in units]
    addresses = [re.findall(r"^ListenStream=(.+)$", text, re.MULTILINE)[0] for text in texts]
    names = [re.findall(r"^FileDescriptorName=(.+)$", text, re.MULTILINE)[0] for text in texts]
    unnamed = sockets(*(("headrace.socket", address) for address in addresses))
    assert assign(unnamed, DEFAULTS) == names
    assert sorted(names) == ["figg", "http", "ws"]


# Peers at the wrong port

LISTENERS = {"figg": "h:1", "ws": "h:2", "http": "h:3"}


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_http_is_told_where_http_listens(method):
    found = recognise(f"{method} / HTTP/1.1\r\nHost: x\r\n\r\n".encode(), LISTENERS)
    assert found is not None
    assert found.reason == "this is HTTP, and the port speaks Figg: HTTP listens at h:3"
    head, _, body = found.answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert f"Content-Length: {len(body)}".encode() in head
    assert found.reason.encode() in body


def test_websocket_is_told_where_websocket_listens():
    request = b"GET /v1/ws HTTP/1.1\r\nUpgrade: WebSocket\r\nConnection: Upgrade\r\n\r\n"
    found = recognise(request, LISTENERS)
    assert found is not None
    assert found.reason.endswith("WebSocket listens at h:2")


def test_tls_is_told_that_the_port_is_plain():
    found = recognise(bytes.fromhex("16030100c8010000c40303"), LISTENERS)
    assert found is not None
    assert "this is TLS" in found.reason
    assert found.answer == b""


@pytest.mark.parametrize("kind", range(12))
def test_no_message_of_figg_is_taken_for_a_stranger(kind):
    for size in (0, 8, 0x4745, 0x1603):
        assert recognise(figg.HEADER.pack(kind, 1, size), LISTENERS) is None
