"""Wait for the first connection when a client is entered. Independent of the kind of client."""

import asyncio
from collections.abc import Awaitable, Callable

from headrace.errors import ConnectTimeoutError


async def wait_for_connection(
    timeout_s: float | None,
    connected: Callable[[], Awaitable[None]],
    *,
    what: str,
    last_error: Callable[[], str],
) -> None:
    """Wait until `connected` returns; raise ConnectTimeoutError after `timeout_s`. None: do not wait.

    The error's message is `what`, the time and the reason from `last_error`.
    """
    if timeout_s is None:
        return
    try:
        async with asyncio.timeout(timeout_s):
            await connected()
    except TimeoutError:
        reason = last_error() or "no answer"
        raise ConnectTimeoutError(f"{what} within {timeout_s:g} s: {reason}") from None
