"""Closed off loopback: listeners that other machines reach, and pages whose host name points at this one."""

import os
import socket

import pytest

from headrace.testing import ServerFailedError, ServerProcess
from headrace.wire.wombat import messages as wombat
from tests.system.access.server import EVERYTHING, Tokens, ask

EVERYWHERE = "0.0.0.0:0"


@pytest.mark.parametrize("listener", ["figg", "ws", "http"])
def test_a_listener_that_other_machines_reach_needs_access_control(tmp_path, listener):
    with pytest.raises(ServerFailedError) as failed:
        ServerProcess(tmp_path / "data", **{listener: EVERYWHERE})
    assert failed.value.returncode == 1
    [line] = failed.value.stderr.splitlines()
    for needed in (f"listen.{listener} = 0.0.0.0", "headrace token create", "--insecure-open"):
        assert needed in line


def test_an_inherited_socket_is_looked_at_too(tmp_path):
    with pytest.raises(ServerFailedError) as failed:
        ServerProcess(tmp_path / "data", figg=EVERYWHERE, inherit=True)
    assert "other machines can reach listen.figg" in failed.value.stderr


def test_with_a_token_it_starts(tmp_path):
    Tokens(tmp_path / "data").add("t", EVERYTHING)
    with ServerProcess(tmp_path / "data", http=EVERYWHERE) as server:
        assert ask(server, None, "GET", "/v1/topics").status_code == 401
        assert ask(server, None, "GET", "/healthz").json() == {"status": "ok"}
        # Where tokens are asked for, any host name will do.
        answer = ask(server, "t", "GET", "/v1/topics", headers={"Host": "log.example.com"})
        assert answer.status_code == 200


def test_insecure_open_overrides_it_and_shows(tmp_path):
    with ServerProcess(tmp_path / "data", "--insecure-open", http=EVERYWHERE) as server:
        assert ask(server, None, "GET", "/healthz").json()["access"] == "insecure-open"
        assert ask(server, None, "GET", "/v1/topics").status_code == 200
        server.wait_stderr("--insecure-open")
        for host, status in (("10.1.2.3:8121", 200), ("evil.example.com", 421)):
            answer = ask(server, None, "GET", "/v1/topics", headers={"Host": host})
            assert answer.status_code == status


def test_a_page_that_points_its_name_at_this_machine_gets_nothing(tmp_path):
    """DNS rebinding: the page's own origin and host agree, and only the name gives it away."""
    names = "--set=listen.hosts=log.example.com"
    with ServerProcess(tmp_path / "data", names) as server:
        for host, is_known in (
            ("localhost", True),
            ("localhost:8121", True),
            ("127.0.0.1:8121", True),
            ("[::1]:8121", True),
            ("app.localhost", True),
            ("LOG.example.com:1", True),
            ("evil.example.com", False),
            ("evil.example.com:8121", False),
            ("10.1.2.3", False),
            ("127.0.0.1.evil.example.com", False),
            ("localhost.evil.example.com", False),
            ("", True),  # no browser sends that
            ("[", False),
        ):
            answer = ask(server, None, "GET", "/v1/topics", headers={"Host": host})
            assert answer.status_code == (200 if is_known else 421), host
            assert answers(server.ws, host).startswith(b"HTTP/1.1 101") is is_known, host


def test_a_page_that_points_its_name_at_this_machine_does_not_get_the_grants_of_everyone(tmp_path):
    Tokens(tmp_path / "data").add("t", EVERYTHING)
    names = ("--set=listen.hosts=log.example.com", "--set=access.anonymous=inspect:* subscribe:*")
    with ServerProcess(tmp_path / "data", *names) as server:
        for host, is_known in (
            ("localhost:8121", True),
            ("10.1.2.3:8121", True),
            ("log.example.com", True),
            ("evil.example.com:8121", False),
        ):
            page = f"Origin: http://{host}\r\n"
            token = "Authorization: Bearer t\r\n"
            answer = ask(server, None, "GET", "/v1/topics", headers={"Host": host})
            assert answer.status_code == (200 if is_known else 421), host
            assert ask(server, "t", "GET", "/v1/topics", headers={"Host": host}).status_code == 200
            assert answers(server.ws, host, page).startswith(b"HTTP/1.1 101") is is_known, host
            assert answers(server.ws, host).startswith(b"HTTP/1.1 101"), "this is not a page"
            assert answers(server.ws, host, page + token).startswith(b"HTTP/1.1 101")
        assert answers(
            server.ws, "evil.example.com", page + "Authorization: Bearer x\r\n"
        ).startswith(b"HTTP/1.1 401")


def answers(address: tuple[str, int], host: str, headers: str = "") -> bytes:
    """Return the beginning of the answer to a handshake for this host, with further headers."""
    with socket.create_connection(address, 30) as peer:
        peer.sendall(
            f"GET {wombat.PATH} HTTP/1.1\r\nHost: {host}\r\n{headers}Upgrade: websocket\r\n"
            "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
        )
        return peer.recv(100)


def test_a_command_without_a_grant_says_which_one_is_missing(tmp_path, headrace):
    Tokens(tmp_path / "data").add("t", ["publish:orders/*"])
    with ServerProcess(tmp_path / "data") as server:
        at = {"HEADRACE_URL": server.figg_url, "HEADRACE_HTTP": server.http_url}
        mine = at | {"HEADRACE_TOKEN": "t"}
        for command, environ, sentence in (
            (
                ["publish", "orders/new", "x", "--timeout=60s"],
                mine,
                'no grant for create of "orders/new"',
            ),
            (["publish", "other", "x", "--timeout=60s"], mine, 'no grant for publish of "other"'),
            (
                ["publish", "other", "x", "--timeout=60s"],
                at,
                'a token is needed for publish of "other"',
            ),
            (["delete", "other", "--yes"], mine, 'no grant for delete of "other"'),
            (["clock"], mine, "no grant for inspect:*"),
            (["clock", "confirm"], mine, "no grant for admin:*"),
        ):
            done = headrace(*command, environ=environ)
            assert done.returncode == 1
            assert sentence in done.stderr
            assert "HEADRACE_TOKEN" in done.stderr
        done = headrace("topics", environ=mine)
        assert (done.returncode, done.stdout) == (0, "")
        assert done.stderr == "no topics yet, or none that the token may inspect\n"


def test_tokens_are_made_beside_a_server_and_the_file_is_checked(tmp_path, headrace):
    at = {**os.environ, "HEADRACE_DATA_DIR": str(tmp_path / "data")}
    made = headrace("token", "create", "a", "--grant", "inspect:*", "--expires", "90d", environ=at)
    assert made.returncode == 0, made.stderr
    token = made.stdout.strip()
    with ServerProcess(tmp_path / "data") as server:
        assert ask(server, token, "GET", "/v1/topics").status_code == 200
        assert token not in server.stderr
    assert headrace("verify", environ=at).returncode == 0
    listed = headrace("token", "list", "--json", environ=at)
    assert '"state": "valid"' in listed.stdout
    assert token not in listed.stdout
    file = tmp_path / "data" / "tokens.json"
    file.write_bytes(file.read_bytes().replace(b"inspect:*", b"inspect:a"))
    for command in (["verify"], ["token", "list"], ["token", "revoke", "a"]):
        answer = headrace(*command, environ=at)
        assert answer.returncode == 1
        assert "tokens.json" in answer.stdout + answer.stderr
