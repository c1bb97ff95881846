"""One line of a trace: a decoded message, without its payload unless that is asked for.

Only fields that are known to hold no secret are shown, so that tokens never get into a trace. Elsewhere: the
messages of each protocol (`outlines.py`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

TEXT_MAX = 200
"""Characters of a text in a line."""

PAYLOADS_MAX = 20
"""Payloads in a line, which may stand for thousands of messages."""

PAYLOAD_BYTES_MAX = 1024
"""Bytes of each payload that are shown."""

_SHOWN = frozenset(
    {
        *("topic", "channel", "processor", "reader", "host", "code", "reason", "text", "of"),
        *("offset", "next_offset", "ordinal", "epoch", "serial", "exact", "asked", "start", "end"),
        *("number", "grant", "ahead", "window", "newest", "cursor"),
        *("timestamp", "ms", "added", "synced", "ack", "origin", "from", "max", "messages_max"),
        *("receive", "lease_s", "attempt", "forget", "count", "more", "lost", "retry", "ping_s"),
        *("version", "duplicate", "name"),
    }
)
"""Fields that are shown. All others may be payloads or credentials."""


@dataclass(slots=True)
class Line:
    """A message, or several of the same kind and topic in a row."""

    kind: str
    topic: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    messages: int = 1
    size: int | None = None
    """Size of the payloads; None for messages without."""
    payloads: list[bytes] = field(default_factory=list)

    def shown(self, *, payloads: bool) -> dict[str, Any]:
        """Return the fields of this line for a reader."""
        found: dict[str, Any] = {"kind": self.kind}
        if self.topic is not None:
            found["topic"] = self.topic
        if self.messages != 1:
            found["messages"] = self.messages
        if self.size is not None:
            found["bytes"] = self.size
        found |= self.fields
        if payloads and self.payloads:
            found["payloads"] = [
                one[:PAYLOAD_BYTES_MAX].decode("utf-8", "backslashreplace")
                for one in self.payloads[:PAYLOADS_MAX]
            ]
        return found


def scalars(fields: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields that may be shown: known names with short values."""
    found: dict[str, Any] = {}
    for name, value in dict(fields).items():
        if name not in _SHOWN or value is None:
            continue
        if isinstance(value, str):
            found[name] = value[:TEXT_MAX]
        elif isinstance(value, bool | int | float):
            found[name] = value
    return found
