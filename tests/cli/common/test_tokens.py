"""Tokens on the command line: where they come from, and where they are never sent."""

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import tokens
from headrace.cli.common.options import TokenFlags
from headrace.cli.common.output import UsageError
from headrace.cli.common.server import HttpApi, request


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_TOKEN", raising=False)


def test_a_token_comes_from_a_flag_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("in-file\n")
    assert TokenFlags().find() is None
    assert TokenFlags(token="given").find() == "given"
    assert TokenFlags(token_file=str(file)).find() == "in-file"
    monkeypatch.setenv("HEADRACE_TOKEN", "in-environment")
    assert TokenFlags().find() == "in-environment"
    assert TokenFlags(token="given").find() == "given"
    assert TokenFlags(token_file=str(file)).find() == "in-file"


def test_a_client_reads_the_file_again_for_each_connection(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first")
    options = TokenFlags(token_file=str(file)).for_client()
    assert options["token"]() == "first"
    file.write_text("second")
    assert options["token"]() == "second"
    assert TokenFlags(token="given", insecure_token=True).for_client() == {
        "token": "given",
        "insecure_token": True,
    }


def test_a_wrong_use_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        TokenFlags(token="a", token_file="b").find()
    with pytest.raises(UsageError, match=r"cannot read .*missing: No such file"):
        TokenFlags(token_file=str(tmp_path / "missing")).find()
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="is not a text"):
        TokenFlags(token_file=str(tmp_path / "binary")).find()


class Handler(http.server.BaseHTTPRequestHandler):
    shown: list[str | None]

    def do_GET(self) -> None:
        self.shown.append(self.headers["Authorization"])
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def listener() -> Iterator[tuple[str, list[str | None]]]:
    shown: list[str | None] = []
    handler = type("Listener", (Handler,), {"shown": shown})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", shown
        server.shutdown()
        thread.join()


def test_a_token_is_not_sent_over_http_to_another_machine(
    listener: tuple[str, list[str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but loopback can be reached in a test, so loopback counts as another machine here."""
    base, shown = listener
    request(HttpApi(base, "abc"), "GET", "/")
    assert shown == ["Bearer abc"]
    monkeypatch.setattr(tokens, "_is_loopback", lambda host: False)
    with pytest.raises(UsageError, match="--insecure-token"):
        request(HttpApi(base, "abc"), "GET", "/")
    assert shown == ["Bearer abc"]
    request(HttpApi(base), "GET", "/")
    request(HttpApi(base, "abc", insecure_token=True), "GET", "/")
    assert shown == ["Bearer abc", None, "Bearer abc"]
