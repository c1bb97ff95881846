"""Results of a check of the log: ranges, damage and their wording. Checks nothing itself."""

from msgspec import Struct


class VerifiedRange(Struct, frozen=True):
    """Consecutive records without a gap."""

    offset: int
    end: int
    ordinal: int
    end_ordinal: int

    def __str__(self) -> str:
        return f"offsets {self.offset} to {self.end}, ordinals {self.ordinal} to {self.end_ordinal}"


class Damage(Struct, frozen=True):
    """A place on disk whose content differs from what was written."""

    file: str
    """Path relative to the data directory."""
    reason: str
    topic: str | None = None
    """None if the damage does not belong to one topic."""
    range: VerifiedRange | None = None
    """Records that cannot be read or trusted because of the damage; None if no records are lost."""

    def __str__(self) -> str:
        lost = f"{self.range}: " if self.range is not None else ""
        return f"{self.file}: {lost}{self.reason}"


class TopicReport(Struct):
    """The checked ranges of one topic, and the damage found."""

    name: str
    epoch: int
    ranges: list[VerifiedRange]
    """Ranges in which every record was read and is correct."""
    end: int
    end_ordinal: int
    """With `end`: the topic's end, also if the topic has no records any more."""
    records: int
    bytes: int
    segments: int
    journal_records: int
    """Number of the records that are only in the journal."""
    damages: list[Damage]


class Report(Struct):
    topics: list[TopicReport]
    damages: list[Damage]
    """Damage that does not belong to one topic."""
    notes: list[str]
    """Facts that an operator may want to know and that are not damage."""
    damaged: bool


class Findings:
    """Collects ranges and damage, and joins neighbours of the same kind."""

    def __init__(self, topic: str | None = None) -> None:
        self.topic = topic
        self.ranges: list[VerifiedRange] = []
        self.damages: list[Damage] = []
        self.records = 0
        self.bytes = 0

    def good(self, part: VerifiedRange) -> None:
        self.records += part.end_ordinal - part.ordinal
        self.bytes += part.end - part.offset
        if self.ranges and (joined := _join(self.ranges[-1], part)):
            self.ranges[-1] = joined
        elif part.end > part.offset:
            self.ranges.append(part)

    def bad(self, file: str, reason: str, part: VerifiedRange | None = None) -> None:
        last = self.damages[-1] if self.damages else None
        if last and part and last.range and (last.file, last.reason) == (file, reason):
            joined = _join(last.range, part)
            if joined is not None:
                self.damages[-1] = Damage(file, reason, self.topic, joined)
                return
        self.damages.append(Damage(file, reason, self.topic, part))

    def add(self, other: "Findings") -> None:
        self.damages += other.damages
        counts = self.records + other.records, self.bytes + other.bytes
        for part in other.ranges:
            self.good(part)
        self.records, self.bytes = counts


def _join(first: VerifiedRange, second: VerifiedRange) -> VerifiedRange | None:
    if (first.end, first.end_ordinal) != (second.offset, second.ordinal):
        return None
    return VerifiedRange(first.offset, second.end, first.ordinal, second.end_ordinal)
