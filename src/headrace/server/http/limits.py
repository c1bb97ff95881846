"""Limits of HTTP requests, for both listeners. Counts what arrives; the listeners answer.

A parser collects the head of a request and calls back with each finished part of it. The meter counts these
parts, and besides them the bytes since the last call: a header without an end is never called back.
"""

from collections.abc import Iterator, MutableMapping
from typing import Any, Final

URL_BYTES_MAX = 65_535
"""The longest URL of the HTTP API, whose list of topics takes many names. The parser takes no longer one."""
HEADERS_MAX = 100
"""Headers of a request. The trailers of a body may be as many."""
HEAD_BYTES_MAX = 16 * 1024
"""Names and values of all headers together. Trailers, and the line before a chunk, may have as much."""
HELD: Final = "headrace.held"
"""Key of the `HeldRequest` in the ASGI scope of a request."""
HEADER_OVERHEAD_BYTES = 128
"""Memory that a header takes besides its bytes."""

_HEAD_PIECE_BYTES = 2 * 1024
"""What a parser is given of a head at once: so much may arrive beyond a limit before the limit applies."""
_BODY_PIECE_BYTES = 64 * 1024
"""The same for a body."""


class RequestRefusedError(Exception):
    """A request breaks a limit: it is answered with a status and a sentence, and its connection ends."""

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
        """A request begins, or is waited for."""
        self.in_head = True
        self._url_bytes = self._bytes = self._headers = self._silent_bytes = 0
        self._called_back = True

    def url(self, size: int) -> None:
        """A part of the URL has come."""
        self._called_back = True
        self._url_bytes += size
        if self._url_bytes > self._url_bytes_max:
            raise RequestRefusedError(414, f"the URL may have {self._url_bytes_max} bytes")

    def header(self, size: int) -> None:
        """A header, or a trailer, of so many bytes has come."""
        self._called_back = True
        self._headers += 1
        self._bytes += size
        kind = "headers" if self.in_head else "trailers"
        if self._headers > HEADERS_MAX:
            raise RequestRefusedError(431, f"a request may have {HEADERS_MAX} {kind}")
        if self._bytes > HEAD_BYTES_MAX:
            raise RequestRefusedError(431, f"all {kind} may have {HEAD_BYTES_MAX} bytes together")

    def head_is_complete(self) -> None:
        """The head is complete: from now on there may be a body, and trailers."""
        self.begin()
        self.in_head = False

    def body(self) -> None:
        """Something of the body has come."""
        self._called_back = True

    def pieces(self, data: memoryview) -> Iterator[memoryview]:
        """What a parser is given one after the other; its calls back come in between."""
        at = 0
        while at < len(data):
            piece = data[at : at + (_HEAD_PIECE_BYTES if self.in_head else _BODY_PIECE_BYTES)]
            self._called_back = False
            yield piece
            at += len(piece)
            # What follows the last call in a piece is not counted: hence small pieces.
            self._silent_bytes = 0 if self._called_back else self._silent_bytes + len(piece)
            if self._bytes + self._silent_bytes > HEAD_BYTES_MAX:
                self._refuse_silence()

    def _refuse_silence(self) -> None:
        """Nothing was finished by very many bytes."""
        if self.in_head:
            raise RequestRefusedError(431, f"all headers may have {HEAD_BYTES_MAX} bytes together")
        raise RequestRefusedError(
            400, f"trailers, and the line before a chunk, may have {HEAD_BYTES_MAX} bytes"
        )


class RequestMemory:
    """The memory that the requests of all connections hold: heads and bodies, until they are answered."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0

    def hold(self, size: int) -> None:
        """Count `size` more bytes; raises RequestRefusedError, and counts nothing, when that is too much."""
        if self.bytes + size > self.bytes_max:
            raise RequestRefusedError(
                503, "requests of all clients together hold limits.requests_bytes_max: ask again"
            )
        self.bytes += size

    def release(self, size: int) -> None:
        self.bytes -= size
        assert self.bytes >= 0


class HeldRequest:
    """Count of what has come of a request, and of the memory that it holds."""

    __slots__ = ("_memory", "body_bytes", "head_bytes", "is_whole")

    def __init__(self, memory: RequestMemory) -> None:
        self._memory = memory
        self.head_bytes = 0
        self.body_bytes = 0
        """Of its body; an endpoint that does not keep what it takes releases it."""
        self.is_whole = False

    def hold_head(self, size: int) -> None:
        self._memory.hold(size)
        self.head_bytes += size

    def hold_body(self, size: int) -> None:
        self._memory.hold(size)
        self.body_bytes += size

    def release_body(self) -> None:
        self._memory.release(self.body_bytes)
        self.body_bytes = 0

    def release(self) -> None:
        self.release_body()
        self._memory.release(self.head_bytes)
        self.head_bytes = 0


def body_is_taken(scope: MutableMapping[str, Any]) -> None:
    """Release what has come of the body: its endpoint has taken it, and keeps none of it in memory."""
    if HELD in scope:
        scope[HELD].release_body()
