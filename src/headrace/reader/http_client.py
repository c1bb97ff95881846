"""HTTP client for a running server, used by drivers and tasks: one connection, kept open."""

import contextlib
import http.client
import json
import ssl
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

from headrace.errors import OptionError
from headrace.reader.view import LogLocation, SourceError
from headrace.tls import failure
from headrace.tokens import exposure_of

TIMEOUT_S = 60.0
"""Longest silence of a server in the middle of an answer, in seconds."""

RETRY_S = 10.0
"""Time for which requests to an unreachable server are retried. A server that restarts is back by then."""

_PAUSE_S = 0.2
_UNAUTHORISED = 401
_UNAVAILABLE = 503


class ServerError(SourceError):
    """The server cannot be reached, or refuses the request."""

    def __init__(self, message: str, status: int = 0, start: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.start = start
        """Offset and ordinal of the oldest record that is kept, if the request asked for older ones."""

    @property
    def is_away(self) -> bool:
        """True if the server is unreachable or unavailable, so that a later retry may succeed."""
        return self.status in (0, _UNAVAILABLE)


class HttpClient:
    """Client that uses the first of several servers that answers."""

    def __init__(self, place: LogLocation, *, retry_s: float = RETRY_S) -> None:
        self._urls = list(place.urls)
        self._context: ssl.SSLContext | None = None
        self._place = place
        self._retry_s = retry_s
        self._connection: http.client.HTTPConnection | None = None
        self._connected = False
        """True once a connection to a server has succeeded."""

    def json(self, method: str, path: str, query: Mapping[str, object], body: object = None) -> Any:
        """Send a request and return the decoded answer. The body is bytes, or an object to send as JSON."""
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        answer = self.send(method, path, query, body)
        try:
            return json.loads(answer)
        except ValueError:
            raise ServerError(self._not_ours()) from None

    def send(
        self,
        method: str,
        path: str,
        query: Mapping[str, object],
        body: bytes | None = None,
        kind: str = "",
    ) -> bytes:
        """Send a request and return the whole body of the answer.

        A request is sent again if its answer breaks off, so a second copy of it must be harmless. `kind` is
        the content type, if the server needs it.
        """
        target = f"{path}?{urlencode(query, doseq=True)}" if query else path
        deadline = time.monotonic() + self._retry_s
        while True:
            fresh = self._connection is None
            try:
                return self._ask(method, target, body, kind)
            except ServerError as error:
                if error.status != _UNAVAILABLE or time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE_S)
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if time.monotonic() > deadline:
                    raise self._unreachable(error) from None
                # The server may simply have closed an idle connection: reconnect at once.
                if fresh:
                    self._next()
                    time.sleep(_PAUSE_S)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, method: str, target: str, body: bytes | None, kind: str) -> bytes:
        headers = {"Content-Type": kind} if kind else {}
        # The file of a token is read for each request: the server refuses the old token on open connections.
        if token := self._place.find_token():
            headers["Authorization"] = f"Bearer {token}"
        self._connect()
        assert self._connection is not None
        # If the server answers and closes before it has read the whole request, its answer still counts.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.request(method, target, body, headers)
        return self._checked(self._connection.getresponse()).read()

    def _connect(self) -> None:
        """Connect to the first server that accepts, and move it to the front of the list."""
        # After an answer that ends its connection, the library would reconnect without a check of our own.
        if self._connection is not None and self._connection.sock is not None:
            return
        for left in reversed(range(len(self._urls))):
            try:
                self._connection = self._dial(self._urls[0])
                self._connected = True
                return
            except (OSError, http.client.HTTPException):
                self._next()
                if not left:
                    raise

    def _dial(self, address: str) -> http.client.HTTPConnection:
        url = urlsplit(address)
        host = url.hostname or ""
        made = http.client.HTTPConnection(host, url.port, timeout=TIMEOUT_S)
        if url.scheme == "https":
            if self._context is None:
                self._context = self._place.tls.context()
            made = http.client.HTTPSConnection(
                host, url.port, timeout=TIMEOUT_S, context=self._context
            )
        try:
            made.connect()
            self._check_peer(address, made)
        except BaseException:
            made.close()
            raise
        return made

    def _check_peer(self, address: str, connection: http.client.HTTPConnection) -> None:
        """Raise OptionError if others can read the token on this connection."""
        # The address of the connection counts: a name may stand for any machine.
        place, is_clear = self._place, not isinstance(connection, http.client.HTTPSConnection)
        is_checked = is_clear and place.has_token and not place.insecure_token
        if is_checked and (reason := exposure_of(connection.sock.getpeername())):
            raise OptionError(f"{address}: {reason}")

    def _next(self) -> None:
        self._urls.append(self._urls.pop(0))

    def _unreachable(self, error: Exception) -> ServerError:
        if isinstance(error, http.client.IncompleteRead):
            return ServerError(f"{self._urls[0]} broke off in the middle of an answer: {error}")
        if isinstance(error, TimeoutError) and self._connected:
            return ServerError(f"{self._urls[0]} did not answer within {TIMEOUT_S:g} s")
        if isinstance(error, ssl.SSLError):
            return ServerError(failure(error, urlsplit(self._urls[0]).netloc))
        reason = getattr(error, "strerror", None) or error
        return ServerError(
            f"no server answers at {', '.join(self._urls)}: {reason}; is it running, and is this the "
            "address of its --http listener (port 8121 by default)?"
        )

    def _not_ours(self) -> str:
        return (
            f"{self._urls[0]} does not answer as Headrace does: is this the address of its --http "
            "listener?"
        )

    def _checked(self, response: http.client.HTTPResponse) -> http.client.HTTPResponse:
        if response.status < 400:
            return response
        text = response.read(65_536)
        self.close()
        start = None
        try:
            answer = json.loads(text)
            reason = answer["error"]
            if "start" in answer:
                start = answer["start"]["offset"], answer["start"]["ordinal"]
        except (ValueError, KeyError, TypeError):
            reason = f"{self._not_ours()} It says: {text.decode(errors='replace')[:200].strip()}"
        if response.status == _UNAUTHORISED:
            reason = f"{self._urls[0]} refuses the token: {reason}"
        raise ServerError(reason, response.status, start)
