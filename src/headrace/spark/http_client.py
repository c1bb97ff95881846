"""Requests to the HTTP listener of a running server, from drivers and tasks: one connection, kept open."""

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlencode, urlsplit

from headrace.spark.log_view import SourceError
from headrace.spark.options import Place

TIMEOUT_S = 60.0
"""How long a server may be silent in the middle of an answer."""

RETRY_S = 10.0
"""How long a server that cannot be reached is tried again: one that restarts is back by then."""

_PAUSE_S = 0.2
_READ_BYTES = 1 << 20
_UNAUTHORISED = 401
_UNAVAILABLE = 503


class ServerError(SourceError):
    """The server cannot be reached, or refuses."""

    def __init__(self, message: str, status: int = 0, start: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.start = start
        """Offset and ordinal from which on a topic is kept, when something before was asked for."""


class HttpClient:
    """The first of several servers that answers."""

    def __init__(self, place: Place, *, retry_s: float = RETRY_S) -> None:
        self._urls = list(place.urls)
        self._headers = {"Authorization": f"Bearer {place.token}"} if place.token else {}
        self._retry_s = retry_s
        self._connection: http.client.HTTPConnection | None = None

    def json(self, method: str, path: str, query: Mapping[str, object], body: object = None) -> Any:
        """A request that is harmless to repeat, and its answer."""
        data = json.dumps(body).encode() if body is not None else None
        answer = self.send(method, path, query, data)
        try:
            return json.loads(answer)
        except ValueError:
            raise ServerError(
                f"{self._urls[0]} does not answer as Headrace does: is this the address of its "
                "--http listener?"
            ) from None

    def send(
        self, method: str, path: str, query: Mapping[str, object], body: bytes | None = None
    ) -> bytes:
        return b"".join(self.stream(method, path, query, body))

    def stream(
        self, method: str, path: str, query: Mapping[str, object], body: bytes | None = None
    ) -> Iterator[bytes]:
        """The answer in pieces. It is asked for again only while nothing of it has come."""
        target = f"{path}?{urlencode(query, doseq=True)}" if query else path
        response = self._response(method, target, body)
        try:
            while piece := response.read(_READ_BYTES):
                yield piece
            if response.length:
                # The library keeps quiet about it.
                raise http.client.IncompleteRead(b"", response.length)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise ServerError(
                f"{self._urls[0]} broke off in the middle of an answer: {error}"
            ) from None

    def post_stream(self, path: str, pieces: Iterator[bytes]) -> Any:
        """Send a body that is made while it is sent, and cannot be made again."""
        # A connection that was kept may have been closed by now, and only a fresh one is sure.
        self.close()
        try:
            self._connect()
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None
        assert self._connection is not None
        headers = {**self._headers, "Transfer-Encoding": "chunked"}
        try:
            self._connection.request("POST", path, pieces, headers, encode_chunked=True)
            response = self._connection.getresponse()
            return json.loads(self._checked(response).read())
        except (OSError, http.client.HTTPException) as error:
            reason = self._early_answer() or error
            self.close()
            raise ServerError(f"{self._urls[0]} broke off an upload: {reason}") from None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _response(self, method: str, target: str, body: bytes | None) -> http.client.HTTPResponse:
        deadline = time.monotonic() + self._retry_s
        while True:
            try:
                fresh = self._connection is None
                self._connect()
                assert self._connection is not None
                self._connection.request(method, target, body, self._headers)
                return self._checked(self._connection.getresponse())
            except ServerError as error:
                if error.status != _UNAVAILABLE or time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE_S)
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if time.monotonic() > deadline:
                    raise self._unreachable(error) from None
                # A connection that was kept may simply have been closed: that costs no pause.
                if fresh:
                    self._next()
                    time.sleep(_PAUSE_S)

    def _connect(self) -> None:
        """To the first that lets us; it is the first of the list then."""
        if self._connection is not None:
            return
        for left in reversed(range(len(self._urls))):
            try:
                self._connection = _connection(self._urls[0])
                return
            except (OSError, http.client.HTTPException):
                self._next()
                if not left:
                    raise

    def _next(self) -> None:
        self._urls.append(self._urls.pop(0))

    def _unreachable(self, error: Exception) -> ServerError:
        return ServerError(
            f"no server answers at {', '.join(self._urls)}: {error}; is it running, and is this the "
            "address of its --http listener?"
        )

    def _early_answer(self) -> str:
        """What a server said before it closed on us, if anything."""
        try:
            assert self._connection is not None
            self._checked(self._connection.getresponse())
        except ServerError as error:
            return str(error)
        except (AssertionError, OSError, http.client.HTTPException):
            pass
        return ""

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
            reason = text.decode(errors="replace")[:200]
        if response.status == _UNAUTHORISED:
            reason = f"{self._urls[0]} refuses the token: {reason}"
        raise ServerError(reason, response.status, start)


def _connection(address: str) -> http.client.HTTPConnection:
    url = urlsplit(address)
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    made = kind(url.hostname or "", url.port, timeout=TIMEOUT_S)
    made.connect()
    return made
