"""Verification of a data directory: reads every byte of the log and reports damage. Changes nothing.

Works on a directory that a server is writing to, that is read-only, or that is a copy. Takes no lock: a topic
is checked up to the end that the catalogue gave before the topic's files were opened. Everything before that
end is on disk and does not change unless retention or `delete` removes it. So if a check fails, the catalogue
is read again, and a segment that it no longer names is not reported as damage.

`inspect_topic` shows one topic in the same way, without what the journal has and the catalogue does not yet.
"""

import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from msgspec import Struct

from headrace.errors import DataDirectoryError, UnknownTopicError
from headrace.log.catalogue.catalogue import (
    BACKUP_NAME,
    DATABASE_ERRORS,
    FILE_NAME,
    Catalogue,
    DamagedCatalogueError,
    UnreadableCatalogueError,
    open_unchanged,
)
from headrace.log.catalogue.rows import BatchRow, CursorRow, SegmentRow, TopicRow
from headrace.log.disk import ATTEMPTS_MAX, RETRY_S
from headrace.log.layout import Layout
from headrace.log.read.index import HEADER_BYTES, decode_header
from headrace.log.read.reader import segment_info
from headrace.log.recovery.frames import has_commits
from headrace.log.saved_time import TIME_NAME, DamagedTimeError, read_time
from headrace.log.store import Lag
from headrace.log.verify.checks import (
    CheckSegments,
    Damage,
    JournalCheck,
    Life,
    SegmentCheck,
    SegmentWork,
    VerifiedRange,
    check_staged,
    join_segments,
)
from headrace.model import Position, check_topic_name

Progress = Callable[[int, int], None]
"""Called with the number of checked bytes of segments, and their total."""

_PROGRESS_BYTES = 1 << 20


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


def verify(
    data_dir: Path,
    topics: Sequence[str] = (),
    progress: Progress | None = None,
    check: CheckSegments | None = None,
    may_lack: Container[str] = (),
) -> Report:
    """Check the named topics; without names, check all topics and everything else in the directory.

    `check` gets the segments of all these topics at once, so that it can check many at a time. Named topics
    that do not exist are refused, except those in `may_lack`.
    """
    layout = Layout(data_dir)
    report = Report([], [], [], False)
    try:
        if not (data_dir / FILE_NAME).exists() and _is_in_use(layout):
            raise DamagedCatalogueError(f"{data_dir / FILE_NAME}: the file is missing")
        with _open(data_dir) as view:
            _Check(layout, view, report, progress).run(topics, check, may_lack)
    except (DamagedCatalogueError, *DATABASE_ERRORS) as error:
        damage = _of_file(FILE_NAME, error)
        if damage not in report.damages:
            report.damages.append(damage)
        report.notes.append(
            "the other topics can be checked after the start of a server has rebuilt the catalogue"
        )
    if not topics:
        _check_backup(layout, report)
        _check_time(layout, report)
        report.notes += _set_aside(layout)
    report.damaged = bool(report.damages) or any(topic.damages for topic in report.topics)
    return report


def _is_in_use(layout: Layout) -> bool:
    return any(_segment_files(layout)) or any(map(has_commits, layout.journal_files()))


def _open(data_dir: Path) -> AbstractContextManager[Catalogue]:
    """Open the catalogue; retry, because a disk may briefly fail to read it."""
    for _ in range(ATTEMPTS_MAX - 1):
        try:
            with open_unchanged(data_dir) as view:
                view.meta()
            break
        except UnreadableCatalogueError:
            time.sleep(RETRY_S)
    return open_unchanged(data_dir)


def _check_patiently(view: Catalogue) -> None:
    """Check the catalogue; retry, because SQLite calls a page that it cannot read malformed."""
    for _ in range(ATTEMPTS_MAX - 1):
        try:
            view.check()
            return
        except DamagedCatalogueError:
            time.sleep(RETRY_S)
    view.check()


class _Check:
    def __init__(
        self, layout: Layout, view: Catalogue, report: Report, progress: Progress | None
    ) -> None:
        self._layout = layout
        self._view = view
        self._report = report
        self._progress = progress
        self._done = self._total = 0
        self._plans: dict[int, tuple[TopicRow | None, list[SegmentRow]]] = {}
        """Topics whose segments are checked ahead, with the topic's row and the segments at that time."""
        self._checks: dict[SegmentRow, SegmentCheck] = {}
        self._batches: dict[tuple[bytes, int], BatchRow] = {}
        """Batches that the journal mentions, with the progress recorded there."""

    def run(
        self, topics: Sequence[str], check: CheckSegments | None, may_lack: Container[str]
    ) -> None:
        view, report = self._view, self._report
        try:
            _check_patiently(view)
        except DamagedCatalogueError as error:
            report.damages.append(_of_file(FILE_NAME, error))
        lives = self._check_journal()
        ids = self._named(topics, lives, may_lack) if topics else self._all(lives)
        self._total = view.segment_bytes(ids if topics else None)
        if check is not None:
            self._check_ahead(ids, check)
        for topic_id in ids:
            checked = self._check_topic(topic_id, lives.get(topic_id))
            if checked is not None:
                report.topics.append(checked)
        if not topics:
            batches = {(row.producer, row.number): row for row in view.batches()} | self._batches
            report.damages += check_staged(self._layout, batches.values(), self._batch)
            report.notes += self._orphans()

    def _check_journal(self) -> dict[int, Life]:
        """Return the topics that the journal mentions, each with its damage in the journal."""
        first = self._read_journal()
        self._batches = first.batches
        if not first.all_damages and not first.unfinished:
            return first.lives
        # Only damage that both readings find counts: a server may have written during the first reading.
        second = self._read_journal()
        seen = first.all_damages
        for life in second.lives.values():
            life.damages = [damage for damage in life.damages if damage in seen]
        self._report.damages += [damage for damage in second.damages if damage in seen]
        self._report.notes += [
            f"{one}: a write that was never acknowledged"
            for one in second.unfinished
            if one in first.unfinished
        ]
        return second.lives

    def _read_journal(self) -> JournalCheck:
        with self._view.snapshot():
            return JournalCheck(self._layout, self._view)

    def _named(
        self, topics: Sequence[str], lives: dict[int, Life], may_lack: Container[str]
    ) -> list[int]:
        made = {life.topic: topic_id for topic_id, life in lives.items() if not life.destroyed}
        ids: dict[int, None] = {}
        for name in topics:
            row = self._view.topic(check_topic_name(name))
            topic_id = row.id if row is not None else made.get(name)
            if topic_id is not None:
                ids[topic_id] = None
            elif name not in may_lack:
                raise UnknownTopicError(f"there is no topic {name!r} in {self._layout.root}")
        return list(ids)

    def _all(self, lives: dict[int, Life]) -> list[int]:
        rows, _ = self._view.salvage(TopicRow)
        names = {row.id: row.name for row in rows}
        for topic_id, life in lives.items():
            if not life.destroyed:
                names.setdefault(topic_id, life.topic.encode())
        return sorted(names, key=lambda topic_id: names[topic_id])

    def _check_ahead(self, ids: Sequence[int], check: CheckSegments) -> None:
        for topic_id in ids:
            try:
                self._plans[topic_id] = self._plan(topic_id)
            except (DamagedCatalogueError, *DATABASE_ERRORS):
                break  # the error occurs again, and is reported, when this topic is checked
        works = [
            SegmentWork(row, segment)
            for row, segments in self._plans.values()
            if row is not None
            for segment in segments
        ]
        self._checks = {one.segment: one for one in check(works)}

    def _check_topic(self, topic_id: int, life: Life | None) -> TopicReport | None:
        """Return the topic's report; None if the topic was destroyed meanwhile."""
        checks: dict[SegmentRow, SegmentCheck] = {}
        plan = self._plans.pop(topic_id, None)
        while True:  # until no segment is deleted between the catalogue's answer and its check
            row, segments = plan or self._plan(topic_id)
            plan = None
            if row is None:
                if life is None or life.destroyed:
                    return None
                # The topic is only in the journal.
                row = TopicRow(topic_id, life.topic.encode(), life.epoch, b"", 0, 0, 0, 0, 0)
                return _topic_report(row, [], life)
            for segment in segments:
                if segment not in checks:
                    check = self._checks.pop(segment, None)
                    if check is None:
                        check = SegmentCheck(self._layout, row, segment)
                        check.run(self._advance)
                    if check.damages and self._is_gone(segment):
                        break
                    checks[segment] = check
            else:
                return _topic_report(row, [checks[segment] for segment in segments], life)

    def _plan(self, topic_id: int) -> tuple[TopicRow | None, list[SegmentRow]]:
        with self._view.snapshot():
            return self._view.topic_by_id(topic_id), self._view.segments(topic_id)

    def _is_gone(self, segment: SegmentRow) -> bool:
        """True if, according to the catalogue, the segment was deleted or its index was rebuilt."""
        _, segments = self._plan(segment.topic_id)
        now = next((one for one in segments if one.base == segment.base), None)
        return now is None or (now.end == segment.end and now != segment)

    def _advance(self, count: int) -> None:
        before = self._done // _PROGRESS_BYTES
        self._done += count
        if self._progress is not None and self._done // _PROGRESS_BYTES > before:
            self._progress(min(self._done, self._total), self._total)

    def _batch(self, row: BatchRow) -> BatchRow | None:
        """Return the catalogue's present row of a batch, or the journal's if the catalogue has none."""
        now = self._view.batch(row.producer, row.number)
        return now or self._batches.get((row.producer, row.number))

    def _orphans(self) -> Iterator[str]:
        """Report files that no row names, but only after a clean stop: else they may be new or left over."""
        if not self._view.meta().clean:
            return
        layout = self._layout
        rows, _ = self._view.salvage(SegmentRow)
        named = {layout.segment(row.topic_id, row.base) for row in rows}
        orphans = [p for p in _segment_files(layout) if p.with_suffix(".log") not in named]
        if orphans:
            first = orphans[0].relative_to(layout.root)
            yield f"{len(orphans)} files, such as {first}, are not named by the catalogue and not used"


def _topic_report(row: TopicRow, checks: list[SegmentCheck], life: Life | None) -> TopicReport:
    found = join_segments(row, checks)
    before = found.records
    if life is not None:
        # The catalogue was read after the journal, and may already hold some of the journal's records.
        begin, ordinal = row.end_offset, row.end_ordinal
        for part in life.ranges:
            if part.offset >= begin:
                found.good(part)
            elif part.end > begin:
                found.good(VerifiedRange(begin, part.end, ordinal, part.end_ordinal))
        found.damages += life.damages
    end = (row.end_offset, row.end_ordinal)
    if found.ranges:
        end = max(end, (found.ranges[-1].end, found.ranges[-1].end_ordinal))
    return TopicReport(
        name=row.name.decode(),
        epoch=row.epoch,
        ranges=found.ranges,
        end=end[0],
        end_ordinal=end[1],
        records=found.records,
        bytes=found.bytes,
        segments=len(checks),
        journal_records=found.records - before,
        damages=found.damages,
    )


def _check_backup(layout: Layout, report: Report) -> None:
    if not (layout.root / BACKUP_NAME).exists():
        return
    try:
        with open_unchanged(layout.root, BACKUP_NAME) as backup:
            backup.check()
    except DataDirectoryError as error:
        report.damages.append(_of_file(BACKUP_NAME, error))


def _check_time(layout: Layout, report: Report) -> None:
    try:
        read_time(layout)
    except DamagedTimeError as error:
        report.damages.append(_of_file(TIME_NAME, error))


def _of_file(file: str, error: Exception) -> Damage:
    return Damage(file, str(error).partition(": ")[2] or str(error))


def _segment_files(layout: Layout) -> Iterator[Path]:
    for directory in sorted(layout.segments.iterdir()) if layout.segments.is_dir() else ():
        yield from sorted(directory.iterdir()) if directory.is_dir() else (directory,)


def _set_aside(layout: Layout) -> Iterator[str]:
    """Report the files that earlier starts found damaged and kept."""
    kept = sorted(layout.root.glob("damaged-*"))
    kept += sorted(layout.quarantine.iterdir()) if layout.quarantine.is_dir() else []
    if kept:
        names = ", ".join(str(path.relative_to(layout.root)) for path in kept[:3])
        yield f"{len(kept)} files hold data that was found damaged before: {names}"


def inspect_topic(data_dir: Path, name: str) -> dict[str, Any]:
    """Return the topic's state on disk, in the shape of the HTTP API's answer for the topic."""
    encoded = check_topic_name(name)
    layout = Layout(data_dir)
    with open_unchanged(data_dir) as view, view.snapshot():
        row = view.topic(encoded)
        if row is None:
            raise UnknownTopicError(f"there is no topic {name!r} in the segments of {data_dir}")
        segments = view.segments(row.id)
        start = Position(row.epoch, row.start_offset, row.start_ordinal)
        end = Position(row.epoch, row.end_offset, row.end_ordinal)
        kept = view.stored(row.id, start, end)
        cursors = []
        for cursor in sorted(view.cursors(encoded)):
            at = Position(cursor.epoch, cursor.offset, cursor.ordinal)
            offset, ordinal = max(start.offset, at.offset), max(start.ordinal, at.ordinal)
            behind = view.stored(row.id, Position(row.epoch, offset, ordinal), end)
            cursors.append(_cursor(cursor, at, Lag.of(at, start, behind)))
    return {
        "name": name,
        "epoch": row.epoch,
        "durability": row.durability.decode(),
        "start": {"offset": start.offset, "ordinal": start.ordinal},
        "end": {"offset": end.offset, "ordinal": end.ordinal},
        "records": kept.records,
        "bytes": kept.bytes,
        "last_ms": row.last_ms,
        "segments": [_segment(layout, segment) for segment in segments],
        "cursors": cursors,
    }


def _segment(layout: Layout, segment: SegmentRow) -> dict[str, Any]:
    try:
        with layout.index(segment.topic_id, segment.base).open("rb") as file:
            header = decode_header(file.read(HEADER_BYTES))
    except FileNotFoundError:
        header = None
    # The topic's epoch when the segment was begun. The catalogue has only the topic's present epoch.
    epoch = header.epoch if header is not None else None
    return {**segment_info(segment)._asdict(), "epoch": epoch}


def _cursor(cursor: CursorRow, at: Position, lag: Lag) -> dict[str, Any]:
    return {
        "reader": cursor.reader.decode(),
        **at._asdict(),
        "ms": cursor.ms,
        "lag_records": lag.records,
        "lag_bytes": lag.bytes,
        "gone_records": lag.gone_records,
    }
