"""Refusals of Durable Streams: a status, a sentence, and headers that clients understand."""

from collections.abc import Mapping

from starlette.exceptions import HTTPException

NEXT_OFFSET = "Stream-Next-Offset"
CLOSED = "Stream-Closed"
LOST_BYTES = "Stream-Lost-Bytes"


class RefusedError(HTTPException):
    """A request of Durable Streams is refused. Nothing was stored."""

    def __init__(self, status: int, reason: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, reason, dict(headers or {}))
