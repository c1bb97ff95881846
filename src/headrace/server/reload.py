"""SIGHUP: a request to read the settings again, or the end of the server's terminal.

A setting reloads if its description in `config/` says so. All others keep the value that the server was
started with, whatever the file says now. Elsewhere: applying the settings (`server.py`).
"""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from headrace.config.load import RULE_SETTINGS, SETTINGS, Setting
from headrace.config.settings import Config, PrefixRule

TOKENS = "access.token"
RULES = "topics"

_NOT_OF_THE_SERVER = "pipeline."
"""Prefix of the settings of jobs, which the server does not read."""


LoadConfig = Callable[[], Config]
"""Function that reads the settings again from their sources. Raises `ConfigError`."""


class Hangup:
    """Interpretation of SIGHUP: a request to read the settings again, or the end of the server's terminal."""

    def __init__(self) -> None:
        """Ignore SIGHUP from the start of the process until the server is ready."""
        self._has_terminal = _has_terminal()
        self._is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # nohup does this
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    @property
    def is_end_of_terminal(self) -> bool:
        return self._has_terminal and not _has_terminal()

    @property
    def stops(self) -> bool:
        """True if the server stops when the terminal it was started in is closed. False under nohup."""
        return not self._is_ignored


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


class Reload(NamedTuple):
    config: Config
    """Settings in force from now on."""
    changed: list[str]
    """Names of the settings that have another value from now on."""
    waiting: list[str]
    """Names of the changed settings that take effect at the next start."""


def merge(current: Config, wanted: Config) -> Reload:
    """Copy the settings that may change at runtime from `wanted` into `current`."""
    changed: list[str] = []
    waiting: list[str] = []
    config = current
    for key, setting in SETTINGS.items():
        value = _value(wanted, key)
        if value == _value(current, key) or key.startswith(_NOT_OF_THE_SERVER):
            continue
        if setting.reloads:
            changed.append(key)
            config = _replaced(config, key, value)
        else:
            waiting.append(key)
    if wanted.access.token != current.access.token:
        changed.append(TOKENS)
        config = _replaced(config, TOKENS, wanted.access.token)
    rules, waiting_rules = _merged_rules(current.topics, wanted.topics)
    if rules != current.topics:
        changed.append(RULES)
        config = _replaced(config, RULES, rules)
    return Reload(config, changed, waiting + [f"{RULES}.{key}" for key in waiting_rules])


def _merged_rules(
    current: tuple[PrefixRule, ...], wanted: tuple[PrefixRule, ...]
) -> tuple[tuple[PrefixRule, ...], list[str]]:
    """Return the rules in force from now on, and the settings of rules that wait for a restart."""
    before = {rule.prefix: rule for rule in current}
    after = {rule.prefix: rule for rule in wanted}
    kept = [key for key, setting in RULE_SETTINGS.items() if not _rule_reloads(setting)]
    waiting: dict[str, None] = {}
    rules = []
    for prefix in dict.fromkeys([*after, *before]):
        old = before.get(prefix, PrefixRule(prefix=prefix))
        new = after.get(prefix, PrefixRule(prefix=prefix))
        waiting |= dict.fromkeys(key for key in kept if getattr(old, key) != getattr(new, key))
        merged = replace(new, **{key: getattr(old, key) for key in kept})
        # A rule that is no longer in the file stays if it sets something that cannot reload.
        if prefix in after or any(getattr(merged, key) is not None for key in kept):
            rules.append(merged)
    return tuple(rules), list(waiting)


def _rule_reloads(setting: Setting) -> bool:
    return setting.reloads or setting.key == "prefix"


def _value(config: Config, key: str) -> Any:
    section, _, name = key.rpartition(".")
    return getattr(getattr(config, section) if section else config, name)


def _replaced(config: Config, key: str, value: Any) -> Config:
    section, _, name = key.rpartition(".")
    if not section:
        return replace(config, **{name: value})
    changed = replace(getattr(config, section), **{name: value})
    return replace(config, **{section: changed})
