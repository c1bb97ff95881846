"""Diagnostics for operators: log lines on standard error, and the checks of health and readiness.

Elsewhere: metrics (`server/metrics/`).
"""

import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.config.settings import Config, LogFormat
from headrace.log.store import Store
from headrace.printing import masked, one_line, printable_json
from headrace.server.clock import SteadyClock

if TYPE_CHECKING:
    from headrace.server.access import Access


@dataclass(slots=True)
class Health:
    store: Store
    clock: SteadyClock
    access: "Access"
    unready: str = "starting"
    """Reason why the server is not ready; empty once it is."""

    @property
    def is_ready(self) -> bool:
        return not self.unready

    def readiness(self) -> tuple[int, dict[str, str]]:
        """Return the status and body of an answer to `/readyz`."""
        return (503, {"status": self.unready}) if self.unready else (200, {"status": "ready"})

    def answer(self) -> tuple[int, dict[str, str]]:
        """Return the status and body of an answer to `/healthz`."""
        reason = self.store.held_back
        body = {"status": reason or "ok"}
        if self.clock.trouble:
            body["clock"] = self.clock.trouble  # publishes are still accepted
        if self.access.trouble:
            body["access"] = self.access.trouble
        return 503 if reason else 200, body


# Log lines


def set_up(config: Config) -> None:
    handler = logging.StreamHandler(sys.stderr)
    is_json = config.log_format is LogFormat.JSON
    human = _HumanFormatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")
    handler.setFormatter(_JsonFormatter() if is_json else human)
    logging.getLogger().handlers[:] = [handler]
    set_level(config)
    for library in ("asyncio", "uvicorn", "uvicorn.error"):
        logging.getLogger(library).setLevel(logging.WARNING)


def set_level(config: Config) -> None:
    logging.getLogger().setLevel(config.log_level.value.upper())


class _HumanFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return one_line(masked(super().formatMessage(record)))


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": masked(record.getMessage()),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return printable_json(entry)
