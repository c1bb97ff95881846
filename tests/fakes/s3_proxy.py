"""A proxy in front of an S3 server that delays requests, fails them, or loses their answers.

`bucket.through(proxy)` is the same bucket by way of the proxy. Faults are given for requests whose line, such
as `PUT /bucket-1/lake/file?partNumber=1`, matches a pattern; each fault hits a number of them::

    with S3Proxy(server.endpoint) as proxy:
        proxy.fail(Answer(503, "SlowDown"), "PUT", times=3)
        proxy.fail(LOSE_ANSWER, "PUT .*/commit")  # carried out, but the client does not learn it
        with proxy.hold("PUT .*/commit") as held:
            held.wait()  # until such a request has arrived; the end of the block forwards it

`proxy.seen` has every request. With `proxy.ignore_conditions(KEY, SECRET)`, the store behind it has no
conditional puts.
"""

import hashlib
import hmac
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, NamedTuple, Self
from urllib.parse import urlsplit

WAIT_TIMEOUT_S = 60.0


class Answer(NamedTuple):
    """Answer that the client gets while the server gets nothing."""

    status: int
    code: str = "InternalError"


class Cut(NamedTuple):
    """End of the connection: before the request is forwarded, before its answer, or within its answer."""

    where: Literal["request", "answer", "body"]


LOSE_REQUEST, LOSE_ANSWER, CUT_BODY = Cut("request"), Cut("answer"), Cut("body")


class Seen(NamedTuple):
    line: str
    range: str | None
    """The header `Range`."""
    status: int | None
    """Status that the client got; None if it got none."""


class S3Proxy:
    def __init__(self, endpoint: str) -> None:
        proxy = self

        class Handler(_Handler):
            def fault(self, line: str) -> Answer | Cut | None:
                return proxy._next_fault(line)

            def note(self, seen: Seen) -> None:
                proxy.seen.append(seen)

            def headers_for(self, body: bytes) -> list[tuple[str, str]]:
                if not proxy._keys or "If-None-Match" not in self.headers:
                    return self.headers.items()
                return _without_condition(self, body, *proxy._keys)

        Handler.upstream = urlsplit(endpoint).netloc
        self.seen: list[Seen] = []
        self._faults: list[_Fault] = []
        self._keys: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}
        )
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def fail(self, fault: Answer | Cut, pattern: str = "", *, times: int = 1) -> None:
        """Fail the next requests whose line matches the pattern from its beginning on."""
        with self._lock:
            self._faults.append(_Fault(fault, re.compile(pattern), times))

    @contextmanager
    def hold(self, pattern: str = "") -> Iterator["Held"]:
        """Hold the next matching request until the block ends."""
        held = Held()
        with self._lock:
            self._faults.append(_Fault(held, re.compile(pattern), 1))
        try:
            yield held
        finally:
            held.released.set()

    def ignore_conditions(self, key: str, secret: str) -> None:
        """Forward puts without their condition from now on, signed with these credentials."""
        self._keys = key, secret

    def forget(self) -> None:
        """Forget all faults and all requests."""
        with self._lock:
            self._faults.clear()
            self.seen.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _next_fault(self, line: str) -> Answer | Cut | None:
        with self._lock:
            fault = next(
                (one for one in self._faults if one.times and one.pattern.match(line)), None
            )
            if fault is None:
                return None
            fault.times -= 1
        if not isinstance(fault.what, Held):
            return fault.what
        fault.what.arrived.set()
        fault.what.released.wait(WAIT_TIMEOUT_S)
        return None


class Held:
    """A request that waits in the proxy."""

    def __init__(self) -> None:
        self.arrived, self.released = threading.Event(), threading.Event()

    def wait(self) -> None:
        assert self.arrived.wait(WAIT_TIMEOUT_S), "no such request has arrived"


class _Fault:
    def __init__(self, what: Answer | Cut | Held, pattern: re.Pattern[str], times: int) -> None:
        self.what, self.pattern, self.times = what, pattern, times


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # a client may keep its connection open for ever
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # connections end in any way here


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    upstream: str

    def fault(self, line: str) -> Answer | Cut | None:
        raise NotImplementedError

    def note(self, seen: Seen) -> None:
        raise NotImplementedError

    def headers_for(self, body: bytes) -> list[tuple[str, str]]:
        raise NotImplementedError

    def _forward(self) -> None:
        self.is_noted = False
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.fault(f"{self.command} {self.path}")
        try:
            if isinstance(fault, Answer):
                self._send(fault.status, [("ETag", '"0"')], _xml(fault.code))
            elif fault == LOSE_REQUEST:
                self._cut()
            else:
                self._ask(body, fault)
        except (OSError, HTTPException):
            self._cut()

    def _ask(self, body: bytes, fault: Cut | None) -> None:
        connection = HTTPConnection(self.upstream, timeout=WAIT_TIMEOUT_S)
        try:
            # The client has signed its headers, so the server must get them unchanged.
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers_for(body):
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if fault == LOSE_ANSWER:
            self._cut()
        else:
            # The answer to a HEAD has the length of the object, and no content.
            own = ("Connection",) if self.command == "HEAD" else _OWN
            headers = [(name, value) for name, value in answer.getheaders() if name not in own]
            self._send(answer.status, headers, content, is_cut=fault == CUT_BODY)

    def _send(
        self, status: int, headers: list[tuple[str, str]], content: bytes, *, is_cut: bool = False
    ) -> None:
        self._note(status)
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if is_cut else content)
        self.close_connection = self.close_connection or is_cut

    def _cut(self) -> None:
        self._note(None)
        self.close_connection = True

    def _note(self, status: int | None) -> None:
        # Before anything is sent: a client that has its answer finds its request in the list.
        if not self.is_noted:
            self.note(Seen(f"{self.command} {self.path}", self.headers.get("Range"), status))
        self.is_noted = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _forward  # noqa: N815


_OWN = ("Connection", "Transfer-Encoding", "Content-Length")
"""Headers that the proxy writes itself."""


def _xml(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>from the proxy</Message></Error>".encode()


def _without_condition(
    asked: _Handler, body: bytes, key: str, secret: str
) -> list[tuple[str, str]]:
    """Return the headers of a put without `If-None-Match`, signed anew (version 4 of AWS's signatures)."""
    left_out = ("if-none-match", "authorization")
    kept = {name.lower(): value for name, value in asked.headers.items()}
    kept = {name: value for name, value in kept.items() if name not in left_out}
    kept["x-amz-content-sha256"] = hashlib.sha256(body).hexdigest()
    signed = {
        name: kept[name] for name in sorted(kept) if name.startswith("x-amz-") or name == "host"
    }
    path, _, query = asked.path.partition("?")
    lines = [asked.command, path, query, *(f"{name}:{value}" for name, value in signed.items())]
    request = "\n".join([*lines, "", ";".join(signed), kept["x-amz-content-sha256"]])
    moment = kept["x-amz-date"]
    scope = f"{moment[:8]}/us-east-1/s3/aws4_request"
    hashed = hashlib.sha256(request.encode()).hexdigest()
    signature = f"AWS4{secret}".encode()
    for part in (*scope.split("/"), f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{hashed}"):
        signature = hmac.digest(signature, part.encode(), "sha256")
    kept["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={key}/{scope}, SignedHeaders={';'.join(signed)}, "
        f"Signature={signature.hex()}"
    )
    return list(kept.items())
