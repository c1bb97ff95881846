"""Requests: limits while they arrive, for both listeners, and what endpoints of the HTTP API read from them.

A parser collects the head of a request, and calls back with each finished part of it. The meter counts these
parts, and also the bytes since the last callback: a header without an end never causes a callback.
"""

import asyncio
import contextlib
from collections.abc import Callable, MutableMapping
from typing import Any, Final, TypeVar

import httptools
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from headrace.access.operations import Operation
from headrace.broker.broker import Broker
from headrace.log.store import ColdError, Store, Topic
from headrace.model import Position, check_topic_name
from headrace.printing import quoted
from headrace.server.http.gate import check
from headrace.server.listeners import TLS_HELLO, TLS_ON_PLAIN_PORT

URL_BYTES_MAX = 65_535
"""Longest URL of the HTTP API, whose list of topics takes many names. Also the parser's limit."""
HEADERS_MAX = 100
"""Most headers of a request, and most trailers of a body."""
HEAD_BYTES_MAX = 16 * 1024
"""Bytes of all headers' names and values. Also the limit of trailers, and of the line before a chunk."""
HELD: Final = "headrace.held"
"""Key of the `HeldRequest` in the ASGI scope of a request."""
HEADER_OVERHEAD_BYTES = 128
"""Memory that a header takes in addition to its bytes."""

_HEAD_PIECE_BYTES = 2 * 1024
"""Bytes of a head that the parser gets at once. A limit may be exceeded by this much before it applies."""
_BODY_PIECE_BYTES = 64 * 1024
"""Bytes of a body that the parser gets at once."""


class RequestRefusedError(Exception):
    """A request breaks a limit. It is answered with a status and a sentence, and its connection ends."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class RequestMeter:
    """Counts the requests of one connection; raises RequestRefusedError above a limit."""

    __slots__ = (
        "_bytes",
        "_called_back",
        "_headers",
        "_silent_bytes",
        "_url_bytes",
        "_url_bytes_max",
        "in_head",
    )

    def __init__(self, url_bytes_max: int = URL_BYTES_MAX) -> None:
        self._url_bytes_max = url_bytes_max
        self.begin()

    def begin(self) -> None:
        """Reset the counts: a request begins, or is expected."""
        self.in_head = True
        self._url_bytes = self._bytes = self._headers = self._silent_bytes = 0
        self._called_back = True

    def url(self, size: int) -> None:
        """Count a part of the URL."""
        self._called_back = True
        self._url_bytes += size
        if self._url_bytes > self._url_bytes_max:
            raise RequestRefusedError(414, f"the URL may have {self._url_bytes_max} bytes")

    def header(self, size: int) -> None:
        """Count a header or a trailer of `size` bytes."""
        self._called_back = True
        self._headers += 1
        self._bytes += size
        kind = "headers" if self.in_head else "trailers"
        if self._headers > HEADERS_MAX:
            raise RequestRefusedError(431, f"a request may have {HEADERS_MAX} {kind}")
        if self._bytes > HEAD_BYTES_MAX:
            raise RequestRefusedError(431, f"all {kind} may have {HEAD_BYTES_MAX} bytes together")

    def head_is_complete(self) -> None:
        """Reset the counts after the head: a body and trailers may follow."""
        self.begin()
        self.in_head = False

    def body(self) -> None:
        """Note that a part of the body has arrived."""
        self._called_back = True

    def feed(self, parser: httptools.HttpRequestParser, data: bytes) -> int | None:
        """Give received data to a parser, which calls back meanwhile. Raise RequestRefusedError if it fails.

        Return the number of bytes that belong to a request for an upgrade of the protocol; else None.
        """
        at, whole = 0, memoryview(data)
        while at < len(data):
            piece = whole[at : at + (_HEAD_PIECE_BYTES if self.in_head else _BODY_PIECE_BYTES)]
            self._called_back = False
            try:
                parser.feed_data(piece)
            except httptools.HttpParserUpgrade as found:
                return at + int(found.args[0])
            except httptools.HttpParserError as error:
                if data.startswith(TLS_HELLO):
                    raise RequestRefusedError(400, TLS_ON_PLAIN_PORT) from None
                raise _refusal_for(error) from None
            at += len(piece)
            # Bytes after the last callback in a piece are not counted, so pieces must be small.
            self._silent_bytes = 0 if self._called_back else self._silent_bytes + len(piece)
            if self._bytes + self._silent_bytes > HEAD_BYTES_MAX:
                self._refuse_silence()
        return None

    def _refuse_silence(self) -> None:
        """Refuse a request with too many bytes since the last finished part."""
        if self.in_head:
            raise RequestRefusedError(431, f"all headers may have {HEAD_BYTES_MAX} bytes together")
        raise RequestRefusedError(
            400, f"trailers, and the line before a chunk, may have {HEAD_BYTES_MAX} bytes"
        )


def _refusal_for(error: httptools.HttpParserError) -> RequestRefusedError:
    if isinstance(error.__context__, RequestRefusedError):
        return error.__context__
    if "overflow" in str(error):  # in a Content-Length, or in the size of a chunk
        return RequestRefusedError(413, "a body cannot be so long")
    if isinstance(error, httptools.HttpParserCallbackError):  # an invalid URL
        return RequestRefusedError(400, "this is not an HTTP request for this server")
    return RequestRefusedError(400, f"this is not an HTTP request: {error}")


class RequestMemory:
    """Memory that the requests of all connections hold: heads and bodies, until they are answered."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0

    def reserve(self, size: int) -> None:
        """Count `size` more bytes. If that is too much, raise RequestRefusedError and count nothing."""
        if self.bytes + size > self.bytes_max:
            raise RequestRefusedError(
                503, "requests of all clients together hold limits.requests_bytes_max: ask again"
            )
        self.bytes += size

    def release(self, size: int) -> None:
        self.bytes -= size
        assert self.bytes >= 0


class HeldRequest:
    """Counts of the bytes of a request that have arrived and that it holds in memory."""

    __slots__ = ("_memory", "body_bytes", "head_bytes", "is_whole")

    def __init__(self, memory: RequestMemory) -> None:
        self._memory = memory
        self.head_bytes = 0
        self.body_bytes = 0
        """Bytes of the body in memory. An endpoint that does not keep the data it takes releases them."""
        self.is_whole = False

    def hold_head(self, size: int) -> None:
        self._memory.reserve(size)
        self.head_bytes += size

    def hold_body(self, size: int) -> None:
        self._memory.reserve(size)
        self.body_bytes += size

    def release_body(self) -> None:
        self._memory.release(self.body_bytes)
        self.body_bytes = 0

    def release(self) -> None:
        self.release_body()
        self._memory.release(self.head_bytes)
        self.head_bytes = 0


def body_is_taken(scope: MutableMapping[str, Any]) -> None:
    """Release the body's bytes so far: the endpoint has taken them, and keeps none of them in memory."""
    if HELD in scope:
        scope[HELD].release_body()


T = TypeVar("T")

BODY_TIMEOUT_S = 10.0
"""Time in which the body of a request must arrive."""


class RefusalWithFacts(HTTPException):
    """An error answer with facts in addition to its sentence."""

    def __init__(self, status: int, error: str, facts: dict[str, object]) -> None:
        super().__init__(status, error)
        self.facts = facts


def number(text: str | None, name: str) -> int:
    if text is None:
        raise HTTPException(400, f"{name} is missing")
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) < 1 << 64):
        raise HTTPException(400, f"{name} must be a whole number below 2^64, not {text[:40]!r}")
    return int(text)


def limit(request: Request, most: int, name: str = "limit") -> int:
    """Return the number of entries that the client wants in one answer, at most `most`."""
    wanted = number(request.query_params.get(name, str(most)), name)
    if not wanted:
        raise HTTPException(400, f"{name} must be at least 1")
    return min(wanted, most)


async def body(request: Request, bytes_max: int) -> bytes:
    """Return the body of a request. Refuse a body that has more than `bytes_max` bytes or is late."""
    check_length(request, bytes_max)
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size > bytes_max:
                    raise too_long(bytes_max)
                parts.append(part)
    except TimeoutError:
        raise HTTPException(408, f"the body must come within {BODY_TIMEOUT_S:g} seconds") from None
    except ClientDisconnect:
        raise HTTPException(400, "the body is incomplete") from None
    return b"".join(parts)


def check_length(request: Request, bytes_max: int, advice: str = "") -> None:
    """Refuse a body that is too long before reading any of it, if the request states the length."""
    with contextlib.suppress(ValueError):
        if int(request.headers.get("content-length", "0")) > bytes_max:
            raise too_long(bytes_max, advice)


def too_long(bytes_max: int, advice: str = "") -> HTTPException:
    return HTTPException(413, f"the body may have {bytes_max} bytes{advice}")


def existing(
    request: Request, operation: Operation, store: Store, broker: Broker, name: str | None
) -> Topic:
    """Return the topic that a parameter names, if the request may perform the operation on it.

    Raises an error that says what is wrong with the name.
    """
    if name is None:
        raise HTTPException(400, "name the topic")
    check_topic_name(name)
    check(request, operation, name)  # before anything tells whether the topic exists
    topic = store.topic(name)
    if not topic.exists:
        if not broker.subscriptions(topic):
            store.forget(topic)
        raise HTTPException(404, f"there is no topic {quoted(name)}")
    return topic


def place(position: Position) -> dict[str, int]:
    return {"offset": position.offset, "ordinal": position.ordinal}


async def warmed(look_up: Callable[[], T]) -> T:
    """Return the result of `look_up`, after reading the data that it needs from disk into memory."""
    while True:
        try:
            return look_up()
        except ColdError as cold:
            await asyncio.to_thread(cold.warm)
