"""Guessing tokens on a real server, by every protocol: nobody is let in, and nobody else is locked out.

Elsewhere: how long answers wait (`tests/access/test_guesses.py`), and how tokens are compared
(`tests/access/test_tokens.py`).
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.access.guesses import FREE
from headrace.testing import ServerProcess
from headrace.wire import channel, tokens
from headrace.wire.logux import messages as logux
from headrace.wire.wombat import messages as wombat
from tests.system.access.server import CONFIG, EVERYTHING, Figg, Socket, Tokens, ask


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server at which this address has used up all guesses that are answered at once."""
    directory = tmp_path_factory.mktemp("guessing")
    (directory / "config.toml").write_text(CONFIG)
    Tokens(directory / "data").add("valid", EVERYTHING)
    with ServerProcess(directory / "data", f"--config={directory / 'config.toml'}") as server:
        for number in range(FREE):
            assert ask(server, f"guess-{number}", "GET", "/v1/topics").status_code == 401
        yield server


def by_figg(server: ServerProcess, token: str) -> bool:
    with Figg(server, token) as peer:
        return isinstance(peer.hear(), tokens.AuthOk)


def by_wombat(server: ServerProcess, token: str) -> bool:
    with Socket(server, wombat.PATH) as peer:
        peer.send(wombat.encode_auth(token))
        return bool(peer.hear()["type"] == tokens.AUTH_OK)


def by_logux(server: ServerProcess, token: str) -> bool:
    with Socket(server, f"{logux.PATH}/log") as peer:
        peer.send(["connect", 5, "u:1", 0, {"token": token}])
        return bool(peer.hear()[0] == "headers")


def by_channel(server: ServerProcess, token: str) -> bool:
    with Socket(server, channel.PATH) as peer:
        peer.send({"type": "hello", "processor": "p", "token": token})
        return bool(peer.hear()["type"] == "welcome")


def by_http(server: ServerProcess, token: str) -> bool:
    return ask(server, token, "GET", "/v1/topics").status_code == 200


DOORS: dict[str, Callable[[ServerProcess, str], bool]] = {
    "figg": by_figg,
    "wombat": by_wombat,
    "logux": by_logux,
    "channels": by_channel,
    "http": by_http,
}


@pytest.mark.parametrize("door", DOORS)
def test_a_valid_token_gets_in_at_an_address_that_guesses(server: ServerProcess, door: str) -> None:
    assert DOORS[door](server, "valid")


def test_guesses_of_all_protocols_are_refused_and_counted(server: ServerProcess) -> None:
    before = refused(server)
    with ThreadPoolExecutor(len(DOORS)) as threads:  # each answer waits for a while
        guesses = [threads.submit(enter, server, "a guess too many") for enter in DOORS.values()]
        assert not any(guess.result() for guess in guesses)
    assert refused(server) == before + len(DOORS)


def refused(server: ServerProcess) -> float:
    text = ask(server, "valid", "GET", "/metrics").text
    name = "headrace_credentials_refused_total"
    lines = [line for line in text.splitlines() if line.startswith(name)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
