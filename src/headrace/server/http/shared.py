"""Helpers for endpoints of the HTTP API: bodies and numbers with bounds, topics that exist, positions."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from headrace.broker.broker import Broker
from headrace.errors import BadTopicNameError
from headrace.log.store import ColdError, Store, Topic
from headrace.model import Position, check_topic_name
from headrace.printing import quoted

T = TypeVar("T")

BODY_TIMEOUT_S = 10.0
"""Time in which the body of a request must arrive."""


class RefusalWithFacts(HTTPException):
    """An error answer with facts in addition to its sentence."""

    def __init__(self, status: int, error: str, facts: dict[str, object]) -> None:
        super().__init__(status, error)
        self.facts = facts


def number(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) < 1 << 64):
        raise HTTPException(400, f"{name} must be a whole number below 2^64, not {text[:40]!r}")
    return int(text)


def limit(request: Request, most: int) -> int:
    """Return the number of entries that the client wants in one answer, at most `most`."""
    wanted = number(request.query_params.get("limit", str(most)), "limit")
    if not wanted:
        raise HTTPException(400, "limit must be at least 1")
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


def checked_name(name: str) -> str:
    try:
        check_topic_name(name)
    except BadTopicNameError as error:
        raise HTTPException(400, str(error)) from None
    return name


def existing(store: Store, broker: Broker, name: str | None) -> Topic:
    """Return the topic that a parameter names. Raise an HTTP error that says what is wrong with the name."""
    if name is None:
        raise HTTPException(400, "name the topic")
    topic = store.topic(checked_name(name))
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
