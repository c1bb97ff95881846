"""What endpoints of the HTTP API share: numbers that make sense, topics that exist, positions in JSON."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.exceptions import HTTPException

from headrace.broker.broker import Broker
from headrace.errors import BadTopicNameError
from headrace.log.store import ColdError, Store, Topic
from headrace.model import Position, check_topic_name

T = TypeVar("T")


def number(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) < 1 << 64):
        raise HTTPException(400, f"{name} must be a whole number below 2^64, not {text[:40]!r}")
    return int(text)


def existing(store: Store, broker: Broker, name: str | None) -> Topic:
    """The topic that a parameter names, or an answer that says what is wrong with it."""
    if name is None:
        raise HTTPException(400, "name the topic")
    try:
        check_topic_name(name)
    except BadTopicNameError as error:
        raise HTTPException(400, str(error)) from None
    topic = store.topic(name)
    if not topic.exists:
        if not broker.subscriptions(topic):
            store.forget(topic)
        raise HTTPException(404, f"there is no topic {name!r}")
    return topic


def place(position: Position) -> dict[str, int]:
    return {"offset": position.offset, "ordinal": position.ordinal}


async def warmed(look_up: Callable[[], T]) -> T:
    """The answer, after bringing into memory whatever it needs from the disk."""
    while True:
        try:
            return look_up()
        except ColdError as cold:
            await asyncio.to_thread(cold.warm)
