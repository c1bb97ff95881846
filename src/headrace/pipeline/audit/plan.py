"""Results of an audit: which records log and lake have, what is missing, what differs, and the texts. Pure.

The audit compares three accounts of a topic:

    noted: ranges in the manifests of batches                  ┐ each range has a checksum:
    held:  ranges in the footers of the table's files          ┘ if they differ, something is damaged
    log:   ranges that the log has, damaged or not

Elsewhere: reading the bytes, which produces these accounts.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from msgspec import Struct

from headrace.lake.manifests import joined
from headrace.log.verify.checks import VerifiedRange
from headrace.model import JUMP
from headrace.printing import counted, printable

LINES_MAX = 100
"""Number of topics that are listed by name; of the others, only the number is shown."""

Kind = Literal["missing", "damaged"]


class Finding(Struct, frozen=True):
    kind: Kind
    reason: str
    file: str | None = None
    """Path relative to the data directory or to the lake."""
    topic: str | None = None
    epoch: int | None = None
    range: VerifiedRange | None = None
    """Affected records, if they are known."""

    def __str__(self) -> str:
        parts = [
            f"topic {printable(self.topic)}" if self.topic is not None else "",
            f"epoch {self.epoch}" if self.epoch is not None else "",
            str(self.range) if self.range is not None else "",
        ]
        where = [", ".join(filter(None, parts)), self.file or ""]
        return f"{self.kind}: " + ": ".join(filter(None, [*where, self.reason]))


class Held(NamedTuple):
    """Range of records in the lake, according to a manifest or to a file."""

    file: str
    epoch: int
    range: VerifiedRange
    crc: int


class AuditSpan(NamedTuple):
    epoch: int
    range: VerifiedRange


class TopicAudit(Struct):
    name: str
    epoch: int
    log: list[VerifiedRange]
    """Ranges of the log that were read and are sound."""
    lake: list[VerifiedRange]
    records: int
    """Number of records in the log, the lake or both."""
    compared_bytes: int
    """Number of bytes that are in both and are equal."""
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
    """Directory or address of the log that was checked."""
    lake: str | None
    topics: list[TopicAudit]
    findings: list[Finding]
    """Findings that concern no known topic."""
    notes: list[str]
    """Remarks that are not losses."""
    segments: int
    files: int
    """Number of files of the lake."""
    lost: bool

    def all_findings(self) -> Iterator[Finding]:
        for topic in self.topics:
            yield from topic.findings
        yield from self.findings

    def lines(self) -> Iterator[str]:
        """Yield lines for people; the last line is the verdict."""
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


# Manifests of batches, and contents of files


def compare(
    topic: str, noted: Sequence[Held], held: Sequence[Held], *, all_noted: bool = True
) -> Iterator[Finding]:
    """Yield the differences between the table's files and what batches noted that they wrote.

    Without `all_noted`, some manifests cannot be read. Rows that no readable manifest names are then not
    reported.
    """
    noted, held = sorted(noted, key=_place), sorted(held, key=_place)
    yield from _twice(topic, noted, "two batches have written these records")
    yield from _twice(topic, held, "these rows are in the lake twice")
    places = {place: ordinal for one in (*noted, *held) for place, ordinal in _edges(one)}
    for epoch, part in _without(noted, held, places):
        yield Finding("missing", "no file of the lake has these rows", None, topic, epoch, part)
    for epoch, part in _without(held, noted, places) if all_noted else ():
        reason = "no manifest of a batch names these rows"
        yield Finding("damaged", reason, None, topic, epoch, part)
    yield from _differing(topic, noted, held)


def _place(one: Held) -> tuple[int, int]:
    return one.epoch, one.range.offset


def _edges(one: Held) -> Iterator[tuple[tuple[int, int], int]]:
    yield (one.epoch, one.range.offset), one.range.ordinal
    yield (one.epoch, one.range.end), one.range.end_ordinal


def _twice(topic: str, found: Sequence[Held], reason: str) -> Iterator[Finding]:
    """Yield the overlaps: ranges that begin before the previous range has ended."""
    last: Held | None = None
    for one in found:
        if last is not None and one.epoch == last.epoch and one.range.offset < last.range.end:
            # Only the part up to the earlier end is there twice.
            end = min(last.range, one.range, key=lambda part: part.end)
            here = VerifiedRange(one.range.offset, end.end, one.range.ordinal, end.end_ordinal)
            files = f"{last.file} and {one.file}" if last.file != one.file else one.file
            yield Finding("damaged", reason, files, topic, one.epoch, here)
        if last is None or one.epoch != last.epoch or one.range.end > last.range.end:
            last = one


def _without(
    these: Sequence[Held], those: Sequence[Held], ordinals: dict[tuple[int, int], int]
) -> Iterator[tuple[int, VerifiedRange]]:
    """Yield the records that are in `these` and not in `those`, as ranges that are as long as possible."""
    for epoch in dict.fromkeys(one.epoch for one in these):
        spans = _merged([(one.range.offset, one.range.end) for one in these if one.epoch == epoch])
        others = _merged([(one.range.offset, one.range.end) for one in those if one.epoch == epoch])
        for offset, end in _subtracted(spans, others):
            first, last = ordinals[epoch, offset], ordinals[epoch, end]
            yield epoch, VerifiedRange(offset, end, first, last)


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


def _differing(topic: str, noted: Sequence[Held], held: Sequence[Held]) -> Iterator[Finding]:
    """Yield ranges that are in both accounts with different checksums or ordinals.

    The two accounts may be cut in different places: a compaction joins ranges that batches noted one by one.
    So ranges on both sides are joined until they end at the same offset.
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
        while one.range.end != two.range.end:
            if one.range.end < two.range.end:
                longer = _with_next(one, noted, at)
                if longer is None:
                    break
                one, at = longer, at + 1
            else:
                longer = _with_next(two, held, other)
                if longer is None:
                    break
                two, other = longer, other + 1
        else:
            what = "other ordinals" if one.range != two.range else "another checksum"
            if (one.range, one.crc) != (two.range, two.crc):
                reason = f"the file has {what} than the manifest of its batch"
                yield Finding("damaged", reason, two.file, topic, one.epoch, one.range)


def _with_next(one: Held, found: Sequence[Held], at: int) -> Held | None:
    """Return a range joined with the one at `at`, or None if that does not follow it."""
    if at == len(found) or _place(found[at]) != (one.epoch, one.range.end):
        return None
    a, b = one.range, found[at].range
    whole = VerifiedRange(a.offset, b.end, a.ordinal, b.end_ordinal)
    return one._replace(range=whole, crc=joined(one.crc, found[at].crc, b.end - b.offset))


# Records that log and lake have together


_NEITHER = "neither the log nor the lake has these records"
_ONLY_IN_LOG = "the lake does not have these records, the log still has"


class Coverage(NamedTuple):
    findings: list[Finding]
    notes: list[str]


def cover(
    topic: str,
    lake: Sequence[AuditSpan],
    log: Sequence[AuditSpan] | None,
    *,
    is_later: bool = False,
) -> Coverage:
    """Find missing records between the lake's start and the log's end.

    A gap inside the lake is reported even if the log still has its records.
    `log` is None if the log was not checked, and empty for a topic that is no longer in the log. With
    `is_later`, the lake was listed after the log was checked, and may be ahead of it.
    """
    covering = _Covering(topic, sorted(log or (), key=lambda span: span.range.offset))
    spans = [
        AuditSpan(epoch, part)
        for epoch in sorted({span.epoch for span in lake})
        for part in joined_ranges(span.range for span in lake if span.epoch == epoch)
    ]
    for last, span in pairwise(spans):
        covering.step(last, span)
    if spans and log:
        covering.reach_log(spans[-1], is_later=is_later)
    return Coverage(covering.findings, covering.notes)


class _Covering:
    def __init__(self, topic: str, log: Sequence[AuditSpan]) -> None:
        self._topic = topic
        self._log = log
        self.findings: list[Finding] = []
        self.notes: list[str] = []

    def step(self, last: AuditSpan, span: AuditSpan) -> None:
        """Check the gap between one range of the lake and the next."""
        before, after = last.range, span.range
        if (after.offset, after.ordinal) == (before.end, before.end_ordinal):
            return
        if after.offset < before.end:
            # Within one epoch, `compare` has already reported the records that are there twice.
            if span.epoch != last.epoch:
                self.notes.append(
                    f"topic {printable(self._topic)}: epoch {span.epoch} begins at offset {after.offset}, "
                    f"before the lake's end of epoch {last.epoch} at {before.end}: as topics of durability "
                    "memory do"
                )
            return
        if self._is_jump(last, span):
            return
        gap = _between(before, after)
        for part in self._not_in_log(gap):
            self._missing(span.epoch, part, _NEITHER)
        for part in self._in_log(gap):
            self._missing(span.epoch, part, _ONLY_IN_LOG)

    def reach_log(self, last: AuditSpan, *, is_later: bool) -> None:
        """Check the gap between the lake's end and the log."""
        following = next((one for one in self._log if one.range.end > last.range.end), None)
        if following is None:
            end = self._log[-1].range
            if end.end < last.range.end and not is_later:
                records = last.range.end_ordinal - end.end_ordinal
                self._only_in_lake(end.end, last.range.end, records)
        elif following.range.offset > last.range.end and not self._is_jump(last, following):
            self._missing(following.epoch, _between(last.range, following.range), _NEITHER)

    def _is_jump(self, last: AuditSpan, span: AuditSpan) -> bool:
        """True if the topic jumped ahead after a crash, so that records in between never existed.

        A jump starts where the log ended at the crash. The lake may have some records after that end, which
        are then added to the notes.
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

    def _missing(self, epoch: int, part: VerifiedRange, reason: str) -> None:
        self.findings.append(Finding("missing", reason, None, self._topic, epoch, part))

    def _in_log(self, gap: VerifiedRange) -> list[VerifiedRange]:
        return [part for span in self._log if (part := _common(gap, span.range)) is not None]

    def _not_in_log(self, gap: VerifiedRange) -> Iterator[VerifiedRange]:
        offset, ordinal = gap.offset, gap.ordinal
        for part in self._in_log(gap):
            if part.offset > offset:
                yield VerifiedRange(offset, part.offset, ordinal, part.ordinal)
            offset, ordinal = part.end, part.end_ordinal
        if offset < gap.end:
            yield VerifiedRange(offset, gap.end, ordinal, gap.end_ordinal)


def _between(before: VerifiedRange, after: VerifiedRange) -> VerifiedRange:
    return VerifiedRange(before.end, after.offset, before.end_ordinal, after.ordinal)


def _common(one: VerifiedRange, other: VerifiedRange) -> VerifiedRange | None:
    """Return the common part, or None. It begins and ends with a given range, so its ordinals are known."""
    first = max(one, other, key=lambda part: part.offset)
    last = min(one, other, key=lambda part: part.end)
    if first.offset >= last.end:
        return None
    return VerifiedRange(first.offset, last.end, first.ordinal, last.end_ordinal)


def joined_ranges(ranges: Iterable[VerifiedRange]) -> list[VerifiedRange]:
    """Return the union of the ranges as few ranges: those that touch or overlap become one."""
    found: list[VerifiedRange] = []
    for one in sorted(ranges, key=lambda part: (part.offset, part.end)):
        if found and one.offset <= found[-1].end and one.ordinal <= found[-1].end_ordinal:
            last = found[-1]
            if one.end > last.end:
                found[-1] = VerifiedRange(last.offset, one.end, last.ordinal, one.end_ordinal)
        else:
            found.append(one)
    return found


def overlaps(part: VerifiedRange, others: Iterable[VerifiedRange]) -> bool:
    return any(_common(part, other) is not None for other in others)


def common_bytes(these: Sequence[VerifiedRange], those: Sequence[VerifiedRange]) -> int:
    """Return the number of bytes in both; neither argument may contain overlaps."""
    common = (_common(one, other) for one in these for other in those)
    return sum(part.end - part.offset for part in common if part is not None)


def covers(ranges: Iterable[VerifiedRange], part: VerifiedRange) -> bool:
    """True if the ranges contain all of `part`."""
    spans = _merged([(one.offset, one.end) for one in ranges])
    return not any(_subtracted([(part.offset, part.end)], spans))


def _offsets(ranges: Iterable[VerifiedRange]) -> str:
    return " and ".join(f"{one.offset} to {one.end}" for one in joined_ranges(ranges))
