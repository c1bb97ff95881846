"""A reducer of an application, for tests; it needs nothing."""

from typing import Any


def gather(state: Any, message: Any) -> Any:
    return [*(state or ()), message]
