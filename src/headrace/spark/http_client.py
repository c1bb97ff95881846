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


class ServerError(SourceError):
    """The server cannot be reached, or refuses."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


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
        return json.loads(self.send(method, path, query, data))

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
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise ServerError(f"{self._urls[0]} broke off in the middle of an answer: {error}") from None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _response(self, method: str, target: str, body: bytes | None) -> http.client.HTTPResponse:
        deadline = time.monotonic() + self._retry_s
        while True:
            try:
                response = self._ask(method, target, body)
                break
            except (OSError, http.client.HTTPException) as error:
                fresh = self._connection is None
                self.close()
                if time.monotonic() > deadline:
                    raise ServerError(
                        f"no server answers at {', '.join(self._urls)}: {error}; is it running, and is "
                        "this the address of its --http listener?"
                    ) from None
                # A connection that was kept may simply have been closed: that costs no pause.
                if fresh:
                    self._urls.append(self._urls.pop(0))
                    time.sleep(_PAUSE_S)
        if response.status >= 400:
            text = response.read(65_536)
            try:
                reason = json.loads(text)["error"]
            except (ValueError, KeyError, TypeError):
                reason = text.decode(errors="replace")[:200]
            if response.status == 401:
                reason = f"{self._urls[0]} refuses the token: {reason}"
            raise ServerError(reason, response.status)
        return response

    def _ask(self, method: str, target: str, body: bytes | None) -> http.client.HTTPResponse:
        if self._connection is None:
            url = urlsplit(self._urls[0])
            kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
            made = kind(url.hostname or "", url.port, timeout=TIMEOUT_S)
            made.connect()
            self._connection = made
        self._connection.request(method, target, body, self._headers)
        return self._connection.getresponse()
