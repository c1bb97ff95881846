"""Calls the function that an application gave for the messages of a topic. When, is for `subscription.py`."""

import asyncio
from collections.abc import Callable
from inspect import isawaitable

from headrace.client.events import Message
from headrace.errors import ClientClosedError

Handler = Callable[[Message], object]
"""Called with each message in turn. What it returns is awaited if it can be, and else ignored."""


def check_handler(handler: object) -> None:
    if handler is not None and not callable(handler):
        raise TypeError(
            f"a handler is a function, not {type(handler).__name__}: "
            "to begin at an offset, subscribe(topic, offset=...)"
        )


async def call_handler(handler: Handler, message: Message, has_ended: Callable[[], bool]) -> bool:
    """Call it and wait for it. Its errors are told to the loop, and then this returns False."""
    try:
        result = handler(message)
        if result is not None and isawaitable(result):
            await result
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # it is us who are to end, and not something that the handler waited for
        _tell(message, error)
        return False
    except Exception as error:  # theirs: the next message is another matter
        # Closing the client under a handler that publishes with it is no fault of the handler.
        if not (isinstance(error, ClientClosedError) and has_ended()):
            _tell(message, error)
        return False
    return True


def _tell(message: Message, error: BaseException) -> None:
    asyncio.get_running_loop().call_exception_handler(
        {"message": f"the handler of {message.topic!r} failed", "exception": error}
    )
