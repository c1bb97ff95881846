"""Entering a client: waiting for its first connection, as long as its options say. Knows no client."""

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
    """Nothing to wait for without a time; else raise ConnectTimeoutError when it is over: `what`, and why."""
    if timeout_s is None:
        return
    try:
        async with asyncio.timeout(timeout_s):
            await connected()
    except TimeoutError:
        reason = last_error() or "no answer"
        raise ConnectTimeoutError(f"{what} within {timeout_s:g} s: {reason}") from None
