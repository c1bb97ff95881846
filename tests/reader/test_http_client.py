"""Requests to servers that answer badly, late, or not at all: every failure is one clear error."""

import errno
import gc
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from headrace import tokens
from headrace.errors import OptionError
from headrace.reader import http_client
from headrace.reader.http_client import HttpClient, ServerError
from headrace.reader.view import LogLocation
from headrace.testing import hold_port

OK = b"HTTP/1.1 200 OK\r\n"

Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """A server that gives these answers in order, one per connection, and closes each connection."""
    listeners = []

    def make(*answers: bytes, received: list[bytes] | None = None) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def run() -> None:
            for answer in answers:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    request = connection.recv(65536)
                    if received is not None:
                        received.append(request)
                    connection.sendall(answer)

        threading.Thread(target=run, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield make
    for listener in listeners:
        listener.close()


def client(*urls: str, retry_s: float = 0.0, token: str = "") -> HttpClient:
    return HttpClient(LogLocation(urls=urls, token=token), retry_s=retry_s)


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Content-Length: 10\r\n\r\n",
        OK + b"Content-Length: 10\r\n\r\n12345",
        OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\n123",
    ],
)
def test_an_answer_cut_short_is_an_error_and_not_a_short_answer(serve, answer):
    one = client(serve(answer))
    with pytest.raises(ServerError, match="broke off in the middle of an answer"):
        one.send("GET", "/", {})
    one.close()


def test_an_answer_cut_short_is_asked_for_again(serve):
    cut = OK + b"Content-Length: 10\r\n\r\n12345"
    one = client(serve(cut, cut, OK + b"Content-Length: 3\r\n\r\nabc"), retry_s=5)
    assert one.send("GET", "/", {}) == b"abc"
    one.close()


def test_whole_answers_are_given_as_they_are(serve):
    url = serve(OK + b"Content-Length: 3\r\n\r\nabc", OK + b"\r\nto the end")
    one = client(url)
    assert one.send("GET", "/", {}) == b"abc"
    one.close()
    assert one.send("GET", "/", {}) == b"to the end"
    one.close()


def test_something_else_than_a_server_of_ours_is_named_so(serve):
    one = client(serve(OK + b"Content-Length: 6\r\n\r\n<html>"))
    with pytest.raises(ServerError, match="does not answer as Headrace does"):
        one.json("GET", "/v1/topics", {})
    one.close()


def test_a_server_that_is_not_there_is_an_error_that_says_what_to_look_at(serve):
    with (
        hold_port() as closed,
        pytest.raises(ServerError, match=r"no server answers at .*--http listener"),
    ):
        client(f"http://127.0.0.1:{closed.getsockname()[1]}").json("GET", "/", {})


@pytest.mark.parametrize("send", ["json", "upload"])
def test_the_next_server_is_asked_when_the_first_is_gone(serve, send):
    with hold_port() as gone:
        address = f"http://127.0.0.1:{gone.getsockname()[1]}"
        one = client(address, serve(OK + b"Content-Length: 2\r\n\r\n{}"))
        found = one.json("GET", "/", {}) if send == "json" else one.json("POST", "/", {}, b"x")
        assert found == {}
        one.close()


def test_a_server_that_is_busy_is_asked_again(serve):
    busy = b'HTTP/1.1 503 x\r\nContent-Length: 17\r\n\r\n{"error": "busy"}'
    one = client(serve(busy, busy, OK + b"Content-Length: 2\r\n\r\n{}"), retry_s=5)
    assert one.json("GET", "/", {}) == {}
    one.close()
    with pytest.raises(ServerError, match="busy"):
        client(serve(busy)).json("GET", "/", {})


def test_a_refusal_has_its_sentence_status_and_start(serve):
    body = b'{"error": "gone", "start": {"offset": 7, "ordinal": 1}}'
    head = b"HTTP/1.1 410 Gone\r\nContent-Length: %d\r\n\r\n" % len(body)
    with pytest.raises(ServerError, match=r"^gone$") as caught:
        client(serve(head + body)).json("GET", "/", {})
    assert (caught.value.status, caught.value.start) == (410, (7, 1))


def test_a_refused_token_is_told_and_not_shown(serve):
    body = b'{"error": "the token is not known here"}'
    head = b"HTTP/1.1 401 x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with pytest.raises(
        ServerError, match="refuses the token: the token is not known here"
    ) as caught:
        client(serve(head + body), token="hush").json("GET", "/", {})
    assert "hush" not in str(caught.value)


def test_a_token_is_not_sent_where_others_can_read_it(serve, monkeypatch):
    """Nothing but loopback can be reached in a test, so loopback counts as another machine here."""
    monkeypatch.setattr(tokens, "_is_loopback", lambda host: False)
    found = OK + b"Content-Length: 2\r\n\r\n{}"
    for second in ((), ("https://127.0.0.1:1",)):
        url = serve(found)
        with pytest.raises(OptionError, match=f"^{url}: the token is not sent to .*insecureToken"):
            client(url, *second, token="hush").json("GET", "/", {})
    with closing(client(serve(found))) as one:
        assert one.json("GET", "/", {}) == {}
    place = LogLocation(urls=(serve(found),), token="hush", insecure_token=True)
    with closing(HttpClient(place, retry_s=0.0)) as one:
        assert one.json("GET", "/", {}) == {}


def test_every_connection_is_checked_before_the_token_is_sent(serve, monkeypatch):
    """A name may stand for another machine when the client connects again."""
    received = []
    found = OK + b"Content-Length: 2\r\nConnection: close\r\n\r\n{}"
    url = serve(found, found, received=received)
    with closing(client(url, token="hush")) as one:
        assert one.json("GET", "/", {}) == {}
        monkeypatch.setattr(tokens, "_is_loopback", lambda host: False)
        with pytest.raises(OptionError, match=f"^{url}: the token is not sent to "):
            one.json("GET", "/", {})
    assert b"hush" in received[0]
    assert b"hush" not in b"".join(received[1:])


def test_a_server_that_is_gone_before_it_is_checked_leaves_no_socket_open(serve, monkeypatch):
    """Warnings of sockets that nobody closed are errors."""

    def gone(peer: object) -> str:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(http_client, "exposure_of", gone)
    with pytest.raises(ServerError, match="not connected"):
        client(serve(OK), token="hush").json("GET", "/", {})
    gc.collect()


def test_the_file_of_a_token_is_read_for_each_request(serve, tmp_path):
    file, sent = tmp_path / "token", []
    found = OK + b"Content-Length: 2\r\n\r\n{}"
    place = LogLocation(urls=(serve(found, found, received=sent),), token_file=str(file))
    with closing(HttpClient(place, retry_s=0.0)) as one:
        with pytest.raises(OptionError, match=r"token_file: cannot read .*: No such file"):
            one.json("GET", "/", {})
        for token in ("first", "second"):
            file.write_text(f"{token}\n")
            assert one.json("GET", "/", {}) == {}
            assert b"\r\nAuthorization: Bearer %b\r\n" % token.encode() in sent[-1]
            one.close()
        file.write_text("")
        with pytest.raises(OptionError, match="holds no token: a token has 1 to"):
            one.json("GET", "/", {})


def test_a_task_gets_the_token_and_not_the_name_of_its_file(tmp_path):
    file = tmp_path / "token"
    file.write_text("hush")
    place = LogLocation(urls=("http://h",), token_file=str(file), insecure_token=True)
    sent = pickle.dumps(place)
    assert str(file).encode() not in sent
    assert pickle.loads(sent) == place._replace(token="hush", token_file="")
    assert "hush" not in repr(pickle.loads(sent))
