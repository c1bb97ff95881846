"""What a check of the log found: ranges, damages and their words. Checks nothing itself."""

from msgspec import Struct


class Range(Struct, frozen=True):
    """Records that follow each other without a hole."""

    offset: int
    end: int
    ordinal: int
    end_ordinal: int

    def __str__(self) -> str:
        return f"offsets {self.offset} to {self.end}, ordinals {self.ordinal} to {self.end_ordinal}"


class Damage(Struct, frozen=True):
    """Something on disk that is not what was written."""

    file: str
    """Where, relative to the data directory."""
    reason: str
    topic: str | None = None
    """None when it is not of one topic."""
    range: Range | None = None
    """The records that cannot be read or believed because of it; None when none is lost by it."""

    def __str__(self) -> str:
        lost = f"{self.range}: " if self.range is not None else ""
        return f"{self.file}: {lost}{self.reason}"


class TopicReport(Struct):
    """What was checked of one topic, and what was found."""

    name: str
    epoch: int
    ranges: list[Range]
    """Every record in them was read and is right."""
    end: int
    end_ordinal: int
    """Where it ends, also when it has no records any more."""
    records: int
    bytes: int
    segments: int
    journal_records: int
    """How many of the records are in the journal only."""
    damages: list[Damage]


class Report(Struct):
    topics: list[TopicReport]
    damages: list[Damage]
    """What is not of one topic."""
    notes: list[str]
    """What an operator may want to know and is no damage."""
    damaged: bool


class Found:
    """Ranges and damages while they are being found: neighbours of one kind become one."""

    def __init__(self, topic: str | None = None) -> None:
        self.topic = topic
        self.ranges: list[Range] = []
        self.damages: list[Damage] = []
        self.records = 0
        self.bytes = 0

    def good(self, part: Range) -> None:
        self.records += part.end_ordinal - part.ordinal
        self.bytes += part.end - part.offset
        if self.ranges and (joined := _join(self.ranges[-1], part)):
            self.ranges[-1] = joined
        elif part.end > part.offset:
            self.ranges.append(part)

    def bad(self, file: str, reason: str, part: Range | None = None) -> None:
        last = self.damages[-1] if self.damages else None
        if last and part and last.range and (last.file, last.reason) == (file, reason):
            joined = _join(last.range, part)
            if joined is not None:
                self.damages[-1] = Damage(file, reason, self.topic, joined)
                return
        self.damages.append(Damage(file, reason, self.topic, part))

    def add(self, other: "Found") -> None:
        self.damages += other.damages
        counts = self.records + other.records, self.bytes + other.bytes
        for part in other.ranges:
            self.good(part)
        self.records, self.bytes = counts


def _join(first: Range, second: Range) -> Range | None:
    if (first.end, first.end_ordinal) != (second.offset, second.ordinal):
        return None
    return Range(first.offset, second.end, first.ordinal, second.end_ordinal)
