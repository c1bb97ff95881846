"""An application's reducer, for tests; it has no dependencies."""

from typing import Any


def gather(state: Any, message: Any) -> Any:
    return [*(state or ()), message]
