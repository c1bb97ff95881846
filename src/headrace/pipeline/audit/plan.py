"""Results of an audit: which records log and lake have, what is missing, what differs, and the texts. Pure.

The audit compares three accounts of a topic:

    noted: ranges in the manifests of batches                  ┐ each range has a checksum:
    held:  ranges in the footers of the table's files          ┘ if they differ, something is damaged
    log:   ranges that the log has, damaged or not

Elsewhere: reading the bytes, which produces these accounts.
"""

from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from msgspec import Struct

from headrace.lake.manifests import joined as joined_crc
from headrace.log.verify.checks import VerifiedRange, is_jump
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
    """Range of records that the log or the lake has."""

    epoch: int
    range: VerifiedRange
    file: str = ""
    crc: int = 0
    """Checksum of the records in the log's format, according to a manifest or a file of the lake."""


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
    for epoch, part in _only_in(noted, held):
        yield Finding("missing", "no file of the lake has these rows", None, topic, epoch, part)
    for epoch, part in _only_in(held, noted) if all_noted else ():
        reason = "no manifest of a batch names these rows"
        yield Finding("damaged", reason, None, topic, epoch, part)
    yield from _differing(topic, noted, held)


def _place(one: Held) -> tuple[int, int]:
    return one.epoch, one.range.offset


def _end(one: Held) -> tuple[int, int]:
    return one.epoch, one.range.end


def _twice(topic: str, found: Sequence[Held], reason: str) -> Iterator[Finding]:
    """Yield the overlaps: ranges that begin before the previous range has ended."""
    last: Held | None = None
    for one in found:
        if last is not None and one.epoch == last.epoch and one.range.offset < last.range.end:
            # Only the part up to the earlier end is there twice.
            [here] = common([last.range], [one.range])
            files = f"{last.file} and {one.file}" if last.file != one.file else one.file
            yield Finding("damaged", reason, files, topic, one.epoch, here)
        if last is None or _end(one) > _end(last):
            last = one


def _only_in(these: Sequence[Held], those: Sequence[Held]) -> Iterator[tuple[int, VerifiedRange]]:
    """Yield the records that are in `these` and not in `those`, with their epochs."""
    for epoch in dict.fromkeys(one.epoch for one in these):
        ours = (one.range for one in these if one.epoch == epoch)
        others = (one.range for one in those if one.epoch == epoch)
        for part in without(ours, others):
            yield epoch, part


def _differing(topic: str, noted: Sequence[Held], held: Sequence[Held]) -> Iterator[Finding]:
    """Yield ranges that are in both accounts with different checksums or ordinals.

    The two accounts may be cut in different places: a compaction joins ranges that batches noted one by one.
    So ranges on both sides are joined until they end at a place where both are cut.
    """
    cuts = {*map(_place, noted), *map(_end, noted)} & {*map(_place, held), *map(_end, held)}
    in_files = {(_place(one), _end(one)): one for one in _joined_until(cuts, held)}
    for one in _joined_until(cuts, noted):
        two = in_files.get((_place(one), _end(one)))
        if two is not None and (one.range, one.crc) != (two.range, two.crc):
            what = "other ordinals" if one.range != two.range else "another checksum"
            reason = f"the file has {what} than the manifest of its batch"
            yield Finding("damaged", reason, two.file, topic, one.epoch, one.range)


def _joined_until(cuts: Container[tuple[int, int]], found: Iterable[Held]) -> list[Held]:
    """Join each range with the ranges that follow it, up to one of the cuts."""
    joined: list[Held] = []
    for one in found:
        last = joined[-1] if joined else None
        if last is None or _end(last) in cuts or _end(last) != _place(one):
            joined.append(one)
            continue
        a, b = last.range, one.range
        whole = VerifiedRange(a.offset, b.end, a.ordinal, b.end_ordinal)
        crc = joined_crc(last.crc, one.crc, b.end - b.offset)
        joined[-1] = last._replace(range=whole, crc=crc)
    return joined


# Records that log and lake have together


class Coverage:
    """Missing records between the lake's start and the log's end."""

    def __init__(self, topic: str, log: Iterable[VerifiedRange]) -> None:
        self._topic = topic
        self._log = joined_ranges(log)
        self.findings: list[Finding] = []
        self.notes: list[str] = []

    def step(self, last: Held, span: Held) -> None:
        """Check the gap between one range of the lake and the next range of lake or log."""
        if self._is_jump(last, span):
            return
        before, after = last.range, span.range
        gap = VerifiedRange(before.end, after.offset, before.end_ordinal, after.ordinal)
        for reason, parts in (
            ("neither the log nor the lake has these records", without([gap], self._log)),
            ("the lake does not have these records, the log still has", common([gap], self._log)),
        ):
            for part in parts:
                found = Finding("missing", reason, None, self._topic, span.epoch, part)
                self.findings.append(found)

    def _is_jump(self, last: Held, span: Held) -> bool:
        """True if the topic jumped ahead after a crash, so that records in between never existed.

        A jump starts where the log ended at the crash. The lake may have some records after that end, which
        are then added to the notes.
        """
        skipped = span.range.offset - last.range.end
        records = span.range.ordinal - last.range.end_ordinal
        if is_jump(skipped, records):
            return True
        more, more_records = -skipped % JUMP, -records % JUMP
        if span.epoch <= last.epoch or skipped + more != records + more_records:
            return False
        if not 0 < more_records <= more < JUMP // 2:
            return False
        self.only_in_lake(last.range.end - more, last.range.end, more_records)
        return True

    def only_in_lake(self, offset: int, end: int, records: int) -> None:
        self._note(
            f"{records:,} records at offsets {offset} to {end} are in the lake only, behind where the log "
            "ended: a crash of the machine has cost the log what was not synced, or it is an older copy"
        )

    def starts_over(self, last: Held, span: Held) -> None:
        self._note(
            f"epoch {span.epoch} begins at offset {span.range.offset}, before the lake's end of epoch "
            f"{last.epoch} at {last.range.end}: as topics of durability memory do"
        )

    def _note(self, text: str) -> None:
        self.notes.append(f"topic {printable(self._topic)}: {text}")


def cover(
    topic: str, lake: Sequence[Held], log: Sequence[Held], *, is_later: bool = False
) -> Coverage:
    """Find missing records between the lake's start and the log's end.

    A gap inside the lake is reported even if the log still has its records.
    `log` is empty if the log was not checked, or no longer has the topic. With `is_later`, the lake was
    listed after the log was checked, and may be ahead of it.
    """
    found = Coverage(topic, (one.range for one in log))
    spans = [
        Held(epoch, part)
        for epoch in sorted({one.epoch for one in lake})
        for part in joined_ranges(one.range for one in lake if one.epoch == epoch)
    ]
    for last, span in pairwise(spans):
        if span.range.offset >= last.range.end:
            found.step(last, span)
        elif span.epoch != last.epoch:
            found.starts_over(last, span)
        # Within one epoch, `compare` has already reported the records that are there twice.
    if not spans or not log:
        return found
    log = sorted(log, key=_place)
    last, end = spans[-1], log[-1].range
    following = next((one for one in log if one.range.end > last.range.end), None)
    if following is not None and following.range.offset > last.range.end:
        found.step(last, following)
    elif end.end < last.range.end and not is_later:
        found.only_in_lake(end.end, last.range.end, last.range.end_ordinal - end.end_ordinal)
    return found


# Sets of records, as ranges that are sorted by offset


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


def common(these: Sequence[VerifiedRange], those: Sequence[VerifiedRange]) -> list[VerifiedRange]:
    """Return the records in both. Each part begins and ends with a given range: its ordinals are known."""
    found = []
    at = other = 0
    while at < len(these) and other < len(those):
        one, two = these[at], those[other]
        first = max(one, two, key=lambda part: part.offset)
        last = min(one, two, key=lambda part: part.end)
        if first.offset < last.end:
            found.append(VerifiedRange(first.offset, last.end, first.ordinal, last.end_ordinal))
        if last is one:
            at += 1
        else:
            other += 1
    return found


def without(these: Iterable[VerifiedRange], those: Iterable[VerifiedRange]) -> list[VerifiedRange]:
    """Return the records that are in `these` and not in `those`, as ranges that are as long as possible."""
    found = []
    ours = joined_ranges(these)
    parts = deque(common(ours, joined_ranges(those)))
    for one in ours:
        offset, ordinal = one.offset, one.ordinal
        while parts and parts[0].offset < one.end:
            part = parts.popleft()
            if offset < part.offset:
                found.append(VerifiedRange(offset, part.offset, ordinal, part.ordinal))
            if offset < part.end:
                offset, ordinal = part.end, part.end_ordinal
        if offset < one.end:
            found.append(VerifiedRange(offset, one.end, ordinal, one.end_ordinal))
    return found


def overlaps(part: VerifiedRange, others: Iterable[VerifiedRange]) -> bool:
    return any(part.offset < other.end and other.offset < part.end for other in others)


def _offsets(ranges: Iterable[VerifiedRange]) -> str:
    return " and ".join(f"{one.offset} to {one.end}" for one in joined_ranges(ranges))
