"""Counters of one server, and their text for Prometheus."""

from collections import Counter


class Metrics:
    """Counts by name; a label is part of the name, as Prometheus writes it."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, name: str, amount: int = 1) -> None:
        self._counts[name] += amount

    def text(self, gauges: dict[str, float]) -> str:
        lines = [f"headrace_{name} {value}" for name, value in sorted(self._counts.items())]
        lines += [f"headrace_{name} {value}" for name, value in sorted(gauges.items())]
        return "\n".join(lines) + "\n"
