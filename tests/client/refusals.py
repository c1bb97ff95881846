"""Connection attempts that fail, with enough time to learn the reason."""

import re
from collections.abc import Awaitable, Callable

import pytest

from headrace.errors import ConnectTimeoutError

_TIMES_S = (0.2, 2.0, 20.0)


async def refused(
    connect: Callable[[float], Awaitable[object]], reason: str
) -> ConnectTimeoutError:
    """Connect with a timeout in seconds, and return the error once it gives `reason`.

    A busy machine may need more time for the first attempt, but most tests should not wait longer.
    """
    said = []
    for timeout_s in _TIMES_S:
        with pytest.raises(ConnectTimeoutError) as raised:
            await connect(timeout_s)
        if re.search(reason, str(raised.value)):
            return raised.value
        said.append(str(raised.value))
    pytest.fail(f"the reason is never {reason!r}: {said}")
