"""Bytes of the records that are kept under each prefix with a quota, and numbers of topics. Counts only.

A meter counts the bytes between the starts and the ends of its topics, and the bytes that wait for their
commit. Elsewhere: who has to wait for room (`server/peers/throttle.py`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from headrace.model import CHANNEL_PREFIX, Position, Span

_NAMES_MAX = 65_536
"""Topic names whose meters are remembered."""


class Kept(NamedTuple):
    """Kept range of one topic."""

    name: str
    start: Position
    end: Position


class Meter:
    """The bytes kept under one prefix."""

    __slots__ = ("bytes", "bytes_max", "pending", "prefix")

    def __init__(self, prefix: str, bytes_max: int) -> None:
        self.prefix = prefix
        self.bytes_max = bytes_max
        self.bytes = 0
        self.pending = 0
        """Bytes that wait for their commit."""

    @property
    def is_full(self) -> bool:
        return self.bytes + self.pending >= self.bytes_max


class Quotas:
    """All meters of a store."""

    def __init__(self) -> None:
        self.meters: dict[str, Meter] = {}
        """By prefix."""
        self._of: dict[str, tuple[Meter, ...]] = {}
        self.freed: Callable[[Meter], None] = lambda meter: None
        """Called when there may be room again under a prefix that was full."""

    def set(self, quotas: Mapping[str, int], kept: Callable[[str], Iterable[Kept]]) -> None:
        """Use these quotas, by prefix, from now on. `kept` yields the topics with a prefix."""
        full = [meter for meter in self.meters.values() if meter.is_full]
        meters: dict[str, Meter] = {}
        for prefix, bytes_max in quotas.items():
            meter = self.meters.get(prefix)
            if meter is None:
                meter = Meter(prefix, bytes_max)
                meter.bytes = sum(Span.between(one.start, one.end).bytes for one in kept(prefix))
            meter.bytes_max = bytes_max
            meters[prefix] = meter
        before, self.meters, self._of = self.meters, meters, {}
        for meter in before.values():
            if meter in full and not (meter.prefix in meters and meter.is_full):
                self.freed(meter)

    def of(self, name: str) -> tuple[Meter, ...]:
        """Return the meters of a topic."""
        found = self._of.get(name)
        if found is None:
            if len(self._of) >= _NAMES_MAX:
                self._of.clear()
            found = tuple(one for one in self.meters.values() if name.startswith(one.prefix))
            self._of[name] = found
        return found

    def appending(self, name: str, records: Sequence[bytes | memoryview]) -> None:
        """Count records that wait for their commit."""
        if self.meters and (meters := self.of(name)):
            size = sum(map(len, records))
            for meter in meters:
                meter.pending += size

    def appended(self, name: str, size: int) -> None:
        """Count bytes that are committed now."""
        for meter in self.of(name):
            # A meter may be younger than the request.
            meter.pending = max(0, meter.pending - size)
            meter.bytes += size

    def deleted(self, name: str, start: Position, to: Position) -> None:
        """Note that the start of a topic has moved."""
        meters = self.of(name)
        if not meters:
            return
        size = Span.between(start, to).bytes
        for meter in meters:
            was_full = meter.is_full
            meter.bytes -= size
            if was_full and not meter.is_full:
                self.freed(meter)


class TopicCounts:
    """Number of topics, of all and of channels."""

    def __init__(self, count: Callable[[str], int]) -> None:
        """`count` returns the number of topics with a prefix."""
        self._counts = {prefix: count(prefix) for prefix in ("", CHANNEL_PREFIX)}

    def of(self, prefix: str) -> int:
        return self._counts[prefix]

    def add(self, name: str, change: int) -> None:
        """Count a topic more, or one less."""
        for prefix in self._counts:
            if name.startswith(prefix):
                self._counts[prefix] += change
