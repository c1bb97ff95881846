"""SIGHUP: a request to read the settings again, or the end of the server's terminal.

A setting reloads if its description in `config/` says so. All others keep the value that the server was
started with, whatever the file says now. Elsewhere: applying the settings (`server.py`).
"""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from headrace.config.load import RULE_SETTINGS, SETTINGS, value_of, with_value
from headrace.config.settings import Config, PrefixRule

TOKENS = "access.token"
ROLES = "access.jwt.role"
CERTIFICATES = "access.certificate"
PEERS = "limits.peer"
RULES = "topics"

_JOBS = "pipeline."
"""Prefix of the settings of jobs, which the server does not read."""

_TLS = "listen.tls."

LoadConfig = Callable[[], Config]
"""Function that reads the settings again from their sources. Raises `ConfigError`."""


class Hangup:
    """Interpretation of SIGHUP: a request to read the settings again, or the end of the server's terminal."""

    def __init__(self) -> None:
        """Ignore SIGHUP from the start of the process until the server is ready."""
        self._has_terminal = _has_terminal()
        self.stops = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
        """True if the server stops when the terminal it was started in is closed. False under nohup."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    @property
    def is_end_of_terminal(self) -> bool:
        return self._has_terminal and not _has_terminal()


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
    rules, waiting_rules = _merged_rules(current.topics, wanted.topics)
    values = {key: value_of(wanted, key) for key in SETTINGS if not key.startswith(_JOBS)}
    values |= {
        TOKENS: wanted.access.token,
        ROLES: wanted.access.jwt.role,
        CERTIFICATES: wanted.access.certificate,
        PEERS: wanted.limits.peer,
        RULES: rules,
    }
    different = [key for key, value in values.items() if value != value_of(current, key)]
    waiting = [key for key in different if key in SETTINGS and not SETTINGS[key].reloads]
    if bool(current.listen.tls.cert) is not bool(wanted.listen.tls.cert):
        # Only a listener that began with TLS has it.
        waiting += [key for key in different if key.startswith(_TLS) and key not in waiting]
    changed = [key for key in different if key not in waiting]
    config = current
    for key in changed:
        config = with_value(config, key, values[key])
    return Reload(config, changed, waiting + [f"{RULES}.{key}" for key in waiting_rules])


def _merged_rules(
    current: tuple[PrefixRule, ...], wanted: tuple[PrefixRule, ...]
) -> tuple[tuple[PrefixRule, ...], list[str]]:
    """Return the rules in force from now on, and the settings of rules that wait for a restart."""
    before = {rule.prefix: rule for rule in current}
    after = {rule.prefix: rule for rule in wanted}
    kept = [key for key, one in RULE_SETTINGS.items() if not one.reloads and key != "prefix"]
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
