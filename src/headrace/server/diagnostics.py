"""Diagnostics on standard error: text for people, or one JSON object per line."""

import json
import logging
import sys
import time

from headrace.config.settings import Config, LogFormat
from headrace.printing import masked, one_line


def set_up(config: Config) -> None:
    handler = logging.StreamHandler(sys.stderr)
    if config.log_format is LogFormat.JSON:
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(_HumanFormatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    set_level(config)
    for library in ("asyncio", "uvicorn", "uvicorn.error"):
        logging.getLogger(library).setLevel(logging.WARNING)


def set_level(config: Config) -> None:
    logging.getLogger().setLevel(config.log_level.value.upper())


class _HumanFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return one_line(masked(super().formatMessage(record)))

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return time.strftime("%H:%M:%S", time.localtime(record.created))


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
        return json.dumps(entry, ensure_ascii=False)
