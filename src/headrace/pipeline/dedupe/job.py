"""The job `dedupe`: writes the rows of a lake without duplicates, as a Delta table.

    tasks stage keys ─▶ tasks decide by bucket ─▶ tasks write the kept rows ─▶ note ─▶ commit

A run reads the lake's records after the offsets that the last run has covered. So changes of the lake's files
do not matter, and many small runs have the same result as a large one. Nothing counts before the commit. The
next run removes the files that a killed run has left.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from headrace.config.pipeline import DedupeOptions
from headrace.errors import OptionError
from headrace.lake.deduped import Bucket, DedupedTable, RunNote, note_path
from headrace.lake.files.writing import WrittenFile
from headrace.lake.format import LakeError, Shape
from headrace.lake.manifests import HIDDEN, Manifests
from headrace.lake.table import Lock, Table, open_table
from headrace.pipeline.dedupe.keys import Key, KeyKind, bucket_count, joined_buckets, parse_path
from headrace.pipeline.dedupe.tasks import (
    DecidedKeys,
    DecideWork,
    DedupeStaged,
    DedupeStageWork,
    Input,
    WriteWork,
    decide_bucket,
    stage,
    write_part,
)
from headrace.pipeline.job import (
    EXPORT_APP,
    JobArguments,
    check_apart,
    groups,
    job,
    make_writable,
    share_of,
    topics_of,
)
from headrace.pipeline.tasks import JobError, Progress, TaskRunner, by_number, staging
from headrace.reader.planning import TopicSelection


class DedupeSummary(NamedTuple):
    """Result of a run."""

    into: str
    rows: int
    """Number of the lake's rows after the last run."""
    kept: int
    dropped: int
    without_key: int
    """Number of rows that are kept because they have no key."""
    topics: int
    files: int


@dataclass(frozen=True)
class DedupeArguments(DedupeOptions, JobArguments):
    pass


@job(DedupeArguments)
def dedupe(given: DedupeArguments) -> DedupeSummary:
    """Update the table in `into` from a lake, without rows whose key occurred before in their topic.

    The key is the column `key`, the value at `json_path` in payloads, or the whole `payload`. After a row
    that is kept, its key counts for `window_s` seconds, or for ever with None. Without topics and a pattern,
    all topics are read.
    """
    wanted = topics_of(given.topics, given.pattern)
    key = key_of(given.key, given.json_path, payload=given.payload)
    window_ms = window_of(given.window_s)
    source, directory = Path(given.lake).absolute(), Path(given.into).absolute()
    check_apart(source, directory)
    table = open_table(source)
    check_column(key, table.shape, source)
    check_topics(wanted, source, table)
    settings = Settings(table.id, key, window_ms)
    # Rows are the same as in the lake, but the table is always partitioned by date only.
    shape = table.shape._replace(by_topic=False)
    found = DedupedTable.open(directory, shape)
    settings.check(directory, found.last() if found else None)
    with closing(given.task_runner("dedupe")) as runner:
        if found is None:
            runner.start()  # a failure here happens before anything is written
        make_writable(directory)
        with Lock(directory / HIDDEN, "dedupe"):
            made = DedupedTable.open(directory, shape) or DedupedTable.make(directory, shape)
            # The previous holder of the lock may have committed another run.
            last = made.last()
            settings.check(directory, last)
            run = _Dedupe(
                given=given,
                topics=wanted,
                shape=shape,
                table=made,
                last=last,
                settings=settings,
                runner=runner,
            )
            return run.run(table.files())


# Arguments


def key_of(column: str, json_path: str, *, payload: bool) -> Key:
    given = [
        *([Key(KeyKind.COLUMN, column)] if column else []),
        *([Key(KeyKind.JSON, json_path)] if json_path else []),
        *([Key(KeyKind.PAYLOAD)] if payload else []),
    ]
    if len(given) != 1:
        raise OptionError("say what identifies a row: a column, a JSON path, or the payload")
    if json_path:
        try:
            parse_path(json_path)
        except ValueError as error:
            raise OptionError(str(error)) from None
    return given[0]


def window_of(window_s: float | None) -> int | None:
    if window_s is None:
        return None
    if window_s < 0.001:
        raise OptionError(f"window_s must be at least 0.001 seconds, not {window_s:g}")
    return int(window_s * 1000)


def check_column(key: Key, shape: Shape, lake: Path) -> None:
    if key.kind is not KeyKind.COLUMN or key.name == "payload":
        return
    if key.name not in shape.decoded.names:
        names = ", ".join(["payload", *shape.decoded.names])
        raise LakeError(
            f"{lake} has no column {key.name!r} that could identify rows: use one of {names}"
        )
    kind = shape.decoded.field(key.name).type
    if pa.types.is_nested(kind):
        raise LakeError(f"column {key.name!r} holds nested values: name one of a plain type")


def check_topics(topics: TopicSelection, lake: Path, table: Table) -> None:
    if not topics.names:
        return
    known = Manifests(lake).reach(table.last(EXPORT_APP)).ends
    for name in topics.names:
        if name not in known:
            raise JobError(f"there is no topic {name!r} in {lake}")


class Settings(NamedTuple):
    """Settings that stay the same from run to run."""

    lake: str
    key: Key
    window_ms: int | None

    def check(self, directory: Path, last: RunNote | None) -> None:
        if last is None:
            return
        if last.lake != self.lake:
            raise LakeError(f"{directory} has the rows of another lake: name another directory")
        if (last.key, last.window_ms) != (self.key.text, self.window_ms):
            raise LakeError(
                f"{directory} was made with the key {last.key} and {_window_text(last.window_ms)}, not with "
                f"{self.key.text} and {_window_text(self.window_ms)}: name another directory"
            )


def _window_text(window_ms: int | None) -> str:
    return "no window" if window_ms is None else f"a window of {window_ms / 1000:g} seconds"


# A run


class _Dedupe:
    def __init__(
        self,
        given: DedupeArguments,
        topics: TopicSelection,
        shape: Shape,
        table: DedupedTable,
        last: RunNote | None,
        settings: Settings,
        runner: TaskRunner,
    ) -> None:
        self._into, self._shape, self._table = Path(given.into).absolute(), shape, table
        self._settings, self._task_bytes, self._points = settings, given.task_bytes, given.points
        self._runner, self._progress = runner, given.progress
        self._last = last
        self._number = last.number + 1 if last else 0
        note = str(note_path(self._into, last)) if last else ""
        self._input = Input(str(Path(given.lake).absolute()), topics, note)
        self._staging = ""
        self._total = 0
        """Size of the lake's files that this run reads."""

    def run(self, files: dict[str, int]) -> DedupeSummary:
        done = set(self._last.done if self._last else ())
        # File names begin with the date and contain the number of the batch that wrote the file.
        new = {name: files[name] for name in sorted(files.keys() - done)}
        with staging(self._into) as place:
            self._staging = str(place)
            self._total = sum(new.values())
            return self._run(new, done & files.keys())

    def _run(self, new: dict[str, int], done: set[str]) -> DedupeSummary:
        staged = self._stage(new)
        self._points.here("staged")
        if not any(one.ends for one in staged):
            return self._summary([], {}, [])
        before = self._last.buckets if self._last else ()
        rows = sum(one.rows for one in staged) + sum(one.keys for one in before)
        count = bucket_count(rows, len(before))
        decided = self._decide(staged, before, count)
        self._points.here("decided")
        written = self._write(list(new), staged, decided)
        self._points.here("written")
        summary = self._summary(staged, decided, written)
        buckets = [
            decided[place].bucket if place in decided else before[place] for place in range(count)
        ]
        note = self._note(staged, done, buckets)
        if not self._table.commit(note, written, self._points.here):
            raise LakeError(
                f"another dedupe writes to {self._into}: it has committed run {note.number}"
            )
        self._points.here("committed")
        self._table.sweep(note)
        self._points.here("swept")
        return summary

    def _part(self, first: float, last: float) -> Progress | None:
        return share_of(self._progress, self._total, first, last)

    def _stage(self, new: dict[str, int]) -> list[DedupeStaged]:
        numbers = {name: number for number, name in enumerate(new)}
        works = [
            DedupeStageWork(
                input=self._input,
                staging=self._staging,
                task=task,
                files=[(numbers[name], name) for name in some],
                key=self._settings.key,
                points=self._points,
            )
            for task, some in enumerate(groups(new, new.__getitem__, self._task_bytes))
        ]
        return self._runner.run(works, stage, self._part(0.0, 0.5))

    def _decide(
        self, staged: list[DedupeStaged], before: Sequence[Bucket], count: int
    ) -> dict[int, DecidedKeys]:
        """Return the decisions by bucket, without buckets that do not change."""
        found = by_number((one.path, joined_buckets(one.batches, count)) for one in staged)
        # If there are more buckets than before, the keys of all buckets are divided again.
        touched = sorted(found) if len(before) == count else range(count)
        works = [
            DecideWork(
                into=str(self._into),
                staging=self._staging,
                number=self._number,
                bucket=bucket,
                buckets=count,
                staged=found.get(bucket, []),
                known=before[bucket % len(before)].path if before else "",
                window_ms=self._settings.window_ms,
                points=self._points,
            )
            for bucket in touched
        ]
        decided = self._runner.run(works, decide_bucket, self._part(0.5, 0.6))
        return dict(zip(touched, decided, strict=True))

    def _write(
        self, names: list[str], staged: list[DedupeStaged], decided: dict[int, DecidedKeys]
    ) -> list[WrittenFile]:
        dropped = by_number((one.path, one.batches) for one in decided.values())
        numbers = {names[number]: number for one in staged for number in one.bytes}
        sizes = {names[number]: size for one in staged for number, size in one.bytes.items()}
        works = [
            WriteWork(
                input=self._input,
                into=str(self._into),
                number=self._number,
                task=task,
                files=[(name, dropped.get(numbers[name], [])) for name in some],
                shape=self._shape,
                points=self._points,
            )
            for task, some in enumerate(groups(sorted(sizes), sizes.__getitem__, self._task_bytes))
        ]
        results = self._runner.run(works, write_part, self._part(0.6, 1.0))
        return [one for some in results for one in some]

    def _note(self, staged: list[DedupeStaged], done: set[str], buckets: list[Bucket]) -> RunNote:
        ends = dict(self._last.ends) if self._last else {}
        for one in staged:
            ends |= {topic: max(end, ends.get(topic, 0)) for topic, end in one.ends.items()}
        return RunNote(
            number=self._number,
            lake=self._settings.lake,
            key=self._settings.key.text,
            window_ms=self._settings.window_ms,
            ends=ends,
            done=tuple(sorted(done.union(*(one.done for one in staged)))),
            buckets=tuple(buckets),
        )

    def _summary(
        self,
        staged: list[DedupeStaged],
        decided: dict[int, DecidedKeys],
        written: list[WrittenFile],
    ) -> DedupeSummary:
        rows = sum(one.rows for one in staged)
        kept = sum(one.rows for one in written)
        dropped = sum(one.dropped for one in decided.values())
        if rows != kept + dropped:
            raise JobError(
                f"of {rows} rows, {kept} were written and {dropped} dropped: this is an internal error"
            )
        return DedupeSummary(
            into=str(self._into),
            rows=rows,
            kept=kept,
            dropped=dropped,
            without_key=sum(one.without_key for one in staged),
            topics=len({topic for one in staged for topic in one.ends}),
            files=len(written),
        )
