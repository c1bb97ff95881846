"""Functions of the application that the configuration names, as `module:function`."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from headrace.errors import ConfigError
from headrace.printing import quoted


def load_hook(key: str, name: str) -> Callable[..., Any] | None:
    """The function; None when there is none to load. Raises `ConfigError`."""
    if not name:
        return None
    module, _, function = name.partition(":")
    # As with `python -m`: the application's modules lie where the server is started.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key} = {quoted(name)} cannot be loaded: {error}") from None
    if not callable(found):
        raise ConfigError(f"{key} = {quoted(name)} is not a function")
    return found  # type: ignore[no-any-return]
