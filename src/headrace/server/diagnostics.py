"""Diagnostics for operators: log lines on standard error, counters for Prometheus, the health check."""

import logging
import sys
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from headrace.access.operations import Operation
from headrace.config.settings import Config, LogFormat
from headrace.log.store import Store
from headrace.model import Refusal
from headrace.printing import masked, one_line, printable_json
from headrace.server.clock import SteadyClock

if TYPE_CHECKING:
    from headrace.server.access import Access

COUNTERS = {
    "connections_total": "Connections of Figg and Wombat clients accepted.",
    "connections_refused_total": "Connections refused because connections_max was reached.",
    "connections_closed_for_bad_input_total": "Connections closed because the peer broke the protocol.",
    "http_requests_refused_total": "HTTP requests that broke a limit of size, number or time.",
    "credentials_refused_total": "Times that credentials were wrong, revoked or expired.",
    "records_published_total": "Records received from publishers.",
    "subscriptions_total": "Subscriptions started.",
    "duplicates_refused_total": "Publishes, events, messages and batches that were received before.",
    "channels_trimmed_total": "Times that the beginning of a channel's log was deleted.",
    "channels_destroyed_total": "Logs of channels destroyed, by an operator or because they had no members.",
    "channels_states_expired_total": "Last states of channels that were deleted because of their age.",
}
GAUGES = {
    "connections": "Open connections of Figg and Wombat clients.",
    "connections_held": "Connections that are held without being read after a refused publish.",
    "http_requests_bytes": "Bytes of HTTP requests that are arriving or not answered yet.",
    "pending_bytes": "Bytes received and not yet committed.",
    "journal_files_waiting": "Full journal files that are not applied to segments yet.",
    "held_back": "1 while publishes are held back, else 0.",
    "clock_jump_seconds": "Seconds of a jump of the wall clock that the server does not follow yet; else 0.",
    "damaged_runs": "Damaged ranges that readers have found since the start.",
    "staged_bytes": "Bytes uploaded for batches and not appended and deleted yet.",
    "batches_pending": "Batches that are decided and not completely appended yet.",
    "damaged_blocks": "Parts of staged files that could not be read when their batch was appended.",
}
REFUSALS_HELP = "Publishes that were refused and would be refused again, by protocol and reason."
REFUSING_PROTOCOLS = ("figg", "wombat")


ACCESS_HELP = "Decisions of access control, by operation and outcome."
OUTCOMES = ("denied", "allowed")


class Metrics:
    def __init__(self) -> None:
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._decisions = dict.fromkeys(product(Operation, OUTCOMES), 0)
        self._refusals = dict.fromkeys(product(REFUSING_PROTOCOLS, Refusal), 0)

    def count(self, name: str, amount: int = 1) -> None:
        self._counts[name] += amount

    def count_refusal(self, protocol: str, why: Refusal) -> None:
        self._refusals[protocol, why] += 1

    def count_access(self, operation: Operation, *, is_allowed: bool) -> None:
        self._decisions[operation, OUTCOMES[is_allowed]] += 1

    def text(self, gauges: dict[str, int]) -> str:
        lines: list[str] = []
        for name, value in self._counts.items():
            lines += _described(name, "counter", COUNTERS[name], {"": value})
        refusals = {
            f'{{protocol="{protocol}",reason="{why}"}}': value
            for (protocol, why), value in self._refusals.items()
        }
        lines += _described("refusals_total", "counter", REFUSALS_HELP, refusals)
        decisions = {
            f'{{operation="{operation}",outcome="{outcome}"}}': value
            for (operation, outcome), value in self._decisions.items()
        }
        lines += _described("access_decisions_total", "counter", ACCESS_HELP, decisions)
        for name, help_text in GAUGES.items():
            lines += _described(name, "gauge", help_text, {"": gauges[name]})
        return "\n".join(lines) + "\n"


def _described(name: str, kind: str, help_text: str, values: dict[str, int]) -> list[str]:
    """Return the lines of a metric. The keys of `values` are labels."""
    head = [f"# HELP headrace_{name} {help_text}", f"# TYPE headrace_{name} {kind}"]
    return head + [f"headrace_{name}{labels} {value}" for labels, value in values.items()]


class Health(NamedTuple):
    store: Store
    clock: SteadyClock
    access: "Access"

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
