"""What an audit says: who has which records, what is missing, where accounts differ, and the words. Pure.

Three accounts of a topic are held against each other:

    noted: what batches have written down, in manifests       ┐ each range with its checksum:
    held:  what the files say that the table is made of        ┘ equal, or something is damaged
    log:   what the log has, damaged or not

Whoever reads bytes does that elsewhere, and brings what was found.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from msgspec import Struct

from headrace.log.report import Range
from headrace.model import JUMP
from headrace.pipeline.report_words import counted

LINES_MAX = 100
"""Topics that are told one by one; of more, only how many others there are."""

Kind = Literal["missing", "damaged"]

Joined = Callable[[int, int, int], int]
"""The checksum of two stretches that follow each other: `lake.checksums.joined`."""


class Finding(Struct, frozen=True):
    """Something that is not there, or not what it was."""

    kind: Kind
    reason: str
    file: str | None = None
    """Relative to the data directory, or to the lake."""
    topic: str | None = None
    epoch: int | None = None
    range: Range | None = None
    """The records that it concerns, where these are known."""

    def __str__(self) -> str:
        parts = [
            f"topic {printable(self.topic)}" if self.topic is not None else "",
            f"epoch {self.epoch}" if self.epoch is not None else "",
            str(self.range) if self.range is not None else "",
        ]
        where = [", ".join(filter(None, parts)), self.file or ""]
        return f"{self.kind}: " + ": ".join(filter(None, [*where, self.reason]))


class Held(NamedTuple):
    """Records in the lake, as a manifest or a file says."""

    file: str
    epoch: int
    range: Range
    crc: int

    @property
    def bytes(self) -> int:
        return self.range.end - self.range.offset


class Span(NamedTuple):
    epoch: int
    range: Range


class TopicAudit(Struct):
    """What is known of one topic at the end."""

    name: str
    epoch: int
    log: list[Range]
    """What was read there, and is right."""
    lake: list[Range]
    records: int
    """In either of them."""
    compared_bytes: int
    """In both of them, and found to be the same."""
    findings: list[Finding]

    def __str__(self) -> str:
        parts = []
        if self.lake:
            parts.append(f"lake offsets {_offsets(self.lake)}")
        if self.log:
            parts.append(f"log offsets {_offsets(self.log)}")
        both = joined_ranges([*self.lake, *self.log])
        if not both:
            return f"{printable(self.name)}: empty"
        ordinals = " and ".join(f"{one.ordinal} to {one.end_ordinal}" for one in both)
        return f"{printable(self.name)}: {', '.join(parts)}, ordinals {ordinals}"


class AuditReport(Struct):
    log: str | None
    """Where the log is that was looked at."""
    lake: str | None
    topics: list[TopicAudit]
    findings: list[Finding]
    """What is of no topic that is known."""
    notes: list[str]
    """What one may want to know, and is no loss."""
    segments: int
    files: int
    """Of the lake."""
    lost: bool

    def all_findings(self) -> Iterator[Finding]:
        for topic in self.topics:
            yield from topic.findings
        yield from self.findings

    def lines(self) -> Iterator[str]:
        """For people; the last line is the verdict."""
        yield from map(str, self.all_findings())
        yield from (f"note: {note}" for note in self.notes)
        if self.lost:
            kinds = [one.kind for one in self.all_findings()]
            counts = [f"{kinds.count(kind)} {kind}" for kind in ("missing", "damaged")]
            yield "lost: " + ", ".join(count for count in counts if count[0] != "0")
            return
        if len(self.topics) == 1:
            yield f"nothing lost: {self.topics[0]}"
            return
        for topic in self.topics[:LINES_MAX]:
            yield f"  {topic}"
        others = len(self.topics) - LINES_MAX
        if others > 0:
            yield f"  and {others:,} other topics (--json names them all)"
        yield f"nothing lost: {self._summary()}"

    def _summary(self) -> str:
        records = sum(topic.records for topic in self.topics)
        compared = sum(topic.compared_bytes for topic in self.topics)
        parts = [counted(len(self.topics), "topic"), counted(records, "record")]
        if self.log is not None:
            parts.append(counted(self.segments, "segment"))
        if self.lake is not None:
            parts.append(f"{counted(self.files, 'file')} of the lake")
        if compared:
            parts.append(f"{compared:,} bytes the same in both")
        return ", ".join(parts)


def printable(name: str) -> str:
    """A name as it may be shown: control characters must not reach a terminal."""
    return name if name.isprintable() else repr(name)


# What batches have noted, and what files hold


def compare(
    topic: str,
    noted: Sequence[Held],
    held: Sequence[Held],
    joined: Joined,
    *,
    all_noted: bool = True,
) -> Iterator[Finding]:
    """Where the files of a table are not what batches have put there.

    Without `all_noted` some of the notes cannot be read: rows that are in none of the others say nothing.
    """
    noted, held = sorted(noted, key=_place), sorted(held, key=_place)
    yield from _twice(topic, noted, "two batches have written these records")
    yield from _twice(topic, held, "these rows are in the lake twice")
    places = {place: ordinal for one in (*noted, *held) for place, ordinal in _edges(one)}
    for epoch, part in _without(noted, held, places):
        yield Finding("missing", "no file of the lake has these rows", None, topic, epoch, part)
    for epoch, part in _without(held, noted, places) if all_noted else ():
        yield Finding(
            "damaged", "no batch has noted that it wrote these rows", None, topic, epoch, part
        )
    yield from _differing(topic, noted, held, joined)


def _place(one: Held) -> tuple[int, int]:
    return one.epoch, one.range.offset


def _edges(one: Held) -> Iterator[tuple[tuple[int, int], int]]:
    yield (one.epoch, one.range.offset), one.range.ordinal
    yield (one.epoch, one.range.end), one.range.end_ordinal


def _twice(topic: str, found: Sequence[Held], reason: str) -> Iterator[Finding]:
    """Where ranges begin before the one in front of them has ended."""
    last: Held | None = None
    for one in found:
        if last is not None and one.epoch == last.epoch and one.range.offset < last.range.end:
            # Up to whichever ends first: what is behind that is there once.
            end = min(last.range, one.range, key=lambda part: part.end)
            here = Range(one.range.offset, end.end, one.range.ordinal, end.end_ordinal)
            files = f"{last.file} and {one.file}" if last.file != one.file else one.file
            yield Finding("damaged", reason, files, topic, one.epoch, here)
        if last is None or one.epoch != last.epoch or one.range.end > last.range.end:
            last = one


def _without(
    these: Sequence[Held], those: Sequence[Held], ordinals: dict[tuple[int, int], int]
) -> Iterator[tuple[int, Range]]:
    """What is in `these` and not in `those`, as long stretches."""
    for epoch in dict.fromkeys(one.epoch for one in these):
        spans = _merged([(one.range.offset, one.range.end) for one in these if one.epoch == epoch])
        others = _merged([(one.range.offset, one.range.end) for one in those if one.epoch == epoch])
        for offset, end in _subtracted(spans, others):
            yield (
                epoch,
                Range(offset, end, ordinals[epoch, offset], ordinals[epoch, end]),
            )


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for offset, end in sorted(spans):
        if merged and offset <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((offset, end))
    return merged


def _subtracted(
    spans: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    at = 0
    for offset, end in spans:
        while at < len(others) and others[at][1] <= offset:
            at += 1
        number, position = at, offset
        while position < end:
            begin, stop = others[number] if number < len(others) else (end, end)
            if begin > position:
                yield position, min(begin, end)
            position, number = stop, number + 1


def _differing(
    topic: str, noted: Sequence[Held], held: Sequence[Held], joined: Joined
) -> Iterator[Finding]:
    """Stretches that both have, whose checksums or ordinals are not the same.

    They need not be cut alike: a compaction joins what batches have noted one by one. So both are followed
    until they end at the same place.
    """
    at = other = 0
    while at < len(noted) and other < len(held):
        one, two = noted[at], held[other]
        if _place(one) != _place(two):
            if _place(one) < _place(two):
                at += 1
            else:
                other += 1
            continue
        at, other = at + 1, other + 1
        file = two.file
        while one.range.end != two.range.end:
            if one.range.end < two.range.end:
                following = _following(one, noted, at)
                if following is None:
                    break
                one, at = _join(one, following, joined), at + 1
            else:
                following = _following(two, held, other)
                if following is None:
                    break
                two, other = _join(two, following, joined), other + 1
        else:
            if one.range != two.range:
                reason = "the file says other ordinals than the batch has noted"
                yield Finding("damaged", reason, file, topic, one.epoch, one.range)
            elif one.crc != two.crc:
                reason = "the file says another checksum than the batch has noted"
                yield Finding("damaged", reason, file, topic, one.epoch, one.range)


def _following(one: Held, found: Sequence[Held], at: int) -> Held | None:
    if at < len(found) and _place(found[at]) == (one.epoch, one.range.end):
        return found[at]
    return None


def _join(one: Held, other: Held, joined: Joined) -> Held:
    a, b = one.range, other.range
    return Held(
        one.file,
        one.epoch,
        Range(a.offset, b.end, a.ordinal, b.end_ordinal),
        joined(one.crc, other.crc, other.bytes),
    )


# What log and lake have together


class Coverage(NamedTuple):
    findings: list[Finding]
    notes: list[str]


def cover(
    topic: str, lake: Sequence[Span], log: Sequence[Span] | None, *, is_later: bool = False
) -> Coverage:
    """From the lake's start to the log's end every record is in one of them, or it is missing.

    `log` is None when nobody has looked there, and empty for a topic that is there no more. With `is_later`
    the lake was looked at after the log, and may be ahead of it.
    """
    covering = _Covering(topic, sorted(log or (), key=lambda span: span.range.offset))
    last: Span | None = None
    for epoch in sorted({span.epoch for span in lake}):
        for part in joined_ranges(span.range for span in lake if span.epoch == epoch):
            span = Span(epoch, part)
            if last is not None:
                covering.step(last, span)
            last = span
    if last is not None and log:
        covering.reach_log(last, is_later=is_later)
    return Coverage(covering.findings, covering.notes)


class _Covering:
    def __init__(self, topic: str, log: Sequence[Span]) -> None:
        self._topic = topic
        self._log = log
        self.findings: list[Finding] = []
        self.notes: list[str] = []

    def step(self, last: Span, span: Span) -> None:
        """From one part of the lake to the next."""
        before, after = last.range, span.range
        if (after.offset, after.ordinal) == (before.end, before.end_ordinal):
            return
        if after.offset < before.end:
            # Within one epoch it is known already that something is there twice.
            if span.epoch != last.epoch:
                self.notes.append(
                    f"topic {printable(self._topic)}: epoch {span.epoch} begins at offset {after.offset}, "
                    f"before the lake's end of epoch {last.epoch} at {before.end}: as topics of durability "
                    "memory do"
                )
            return
        if self._is_jump(last, span):
            return
        for part in self._not_in_log(_between(before, after)):
            self._missing(span.epoch, part, "neither the log nor the lake has these records")
        for part in self._in_log(_between(before, after)):
            self._missing(
                span.epoch, part, "the lake does not have these records, the log still has"
            )

    def reach_log(self, last: Span, *, is_later: bool) -> None:
        """From the lake's end to the log."""
        following = next((one for one in self._log if one.range.end > last.range.end), None)
        if following is None:
            end = self._log[-1].range
            if end.end < last.range.end and not is_later:
                self._only_in_lake(
                    end.end, last.range.end, last.range.end_ordinal - end.end_ordinal
                )
            return
        before, after = last.range, following.range
        if after.offset <= before.end:
            return
        if not self._is_jump(last, following):
            self._missing(
                following.epoch,
                _between(before, after),
                "neither the log nor the lake has these records",
            )

    def _is_jump(self, last: Span, span: Span) -> bool:
        """Whether the topic went ahead after a crash, and has no records in between.

        It goes on so far from where the log ended then; the lake may have had some records more.
        """
        skipped = span.range.offset - last.range.end
        records = span.range.ordinal - last.range.end_ordinal
        if skipped == records and skipped > 0 and skipped % JUMP == 0:
            return True
        more, more_records = -skipped % JUMP, -records % JUMP
        if span.epoch <= last.epoch or skipped + more != records + more_records:
            return False
        if not 0 < more_records <= more < JUMP // 2:
            return False
        self._only_in_lake(last.range.end - more, last.range.end, more_records)
        return True

    def _only_in_lake(self, offset: int, end: int, records: int) -> None:
        self.notes.append(
            f"topic {printable(self._topic)}: {records:,} records at offsets {offset} to {end} are in the "
            "lake only, behind where the log ended: a crash of the machine has cost the log what was not "
            "synced, or it is an older copy"
        )

    def _missing(self, epoch: int, part: Range, reason: str) -> None:
        self.findings.append(Finding("missing", reason, None, self._topic, epoch, part))

    def _in_log(self, gap: Range) -> Iterator[Range]:
        for span in self._log:
            part = _common(gap, span.range)
            if part is not None:
                yield part

    def _not_in_log(self, gap: Range) -> Iterator[Range]:
        offset, ordinal = gap.offset, gap.ordinal
        for part in self._in_log(gap):
            if part.offset > offset:
                yield Range(offset, part.offset, ordinal, part.ordinal)
            offset, ordinal = part.end, part.end_ordinal
        if offset < gap.end:
            yield Range(offset, gap.end, ordinal, gap.end_ordinal)


def _between(before: Range, after: Range) -> Range:
    return Range(before.end, after.offset, before.end_ordinal, after.ordinal)


def _common(one: Range, other: Range) -> Range | None:
    """What both have; each place is the beginning or the end of one of them, so its ordinal is known."""
    first = max(one, other, key=lambda part: part.offset)
    last = min(one, other, key=lambda part: part.end)
    if first.offset >= last.end:
        return None
    return Range(first.offset, last.end, first.ordinal, last.end_ordinal)


def joined_ranges(ranges: Iterable[Range]) -> list[Range]:
    """All of them together, as few as possible: those that touch or overlap become one."""
    found: list[Range] = []
    for one in sorted(ranges, key=lambda part: (part.offset, part.end)):
        if found and one.offset <= found[-1].end and one.ordinal <= found[-1].end_ordinal:
            last = found[-1]
            if one.end > last.end:
                found[-1] = Range(last.offset, one.end, last.ordinal, one.end_ordinal)
        else:
            found.append(one)
    return found


def overlaps(part: Range, others: Iterable[Range]) -> bool:
    return any(_common(part, other) is not None for other in others)


def common_bytes(these: Sequence[Range], those: Sequence[Range]) -> int:
    """How much is in both; each of them without overlaps."""
    common = (_common(one, other) for one in these for other in those)
    return sum(part.end - part.offset for part in common if part is not None)


def covers(ranges: Iterable[Range], part: Range) -> bool:
    """Whether all of a part is in these."""
    spans = _merged([(one.offset, one.end) for one in ranges])
    return not any(_subtracted([(part.offset, part.end)], spans))


def _offsets(ranges: Iterable[Range]) -> str:
    return " and ".join(f"{one.offset} to {one.end}" for one in joined_ranges(ranges))
