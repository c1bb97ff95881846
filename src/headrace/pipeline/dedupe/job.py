"""The job `dedupe`: writes the rows of a lake without duplicates, as a Delta table.

    tasks stage keys ─▶ tasks decide by bucket ─▶ tasks write the kept rows ─▶ note ─▶ commit

A run reads the lake's records after the offsets that the last run has covered. So changes of the lake's files
do not matter, and many small runs have the same result as a large one. Nothing counts before the commit. The
next run removes the files that a killed run has left.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

from headrace.lake.deduped import Bucket, DedupedTable, RunNote, note_path
from headrace.lake.files.writing import WrittenFile
from headrace.lake.format import LakeError, Shape
from headrace.lake.manifests import HIDDEN
from headrace.lake.table import Lock, open_table
from headrace.pipeline.dedupe.input import (
    Settings,
    check_column,
    check_topics,
    key_of,
    window_of,
)
from headrace.pipeline.dedupe.plan import bucket_count, joined_buckets
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
from headrace.pipeline.job_input import check_apart, make_writable, topics_of
from headrace.pipeline.kill_points import Points
from headrace.pipeline.staging import by_number, staging, together
from headrace.pipeline.tasks import JobError, SparkRunner, TaskRunner
from headrace.reader.planning import TopicSelection

WINDOW_S = 86_400.0
_TASK_BYTES = 64 << 20

Progress = Callable[[int, int], None]
"""Called with the number of bytes of the lake that are done, and with their total."""
Told = Callable[[float], None]


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


def dedupe(
    lake: str | Path,
    into: str | Path,
    topics: Iterable[str] = (),
    *,
    key: str = "",
    json_path: str = "",
    payload: bool = False,
    window_s: float | None = WINDOW_S,
    pattern: str = "",
    master: str = "local[*]",
    task_bytes: int = _TASK_BYTES,
    progress: Progress | None = None,
    runner: TaskRunner | None = None,
    points: Points = Points(),  # noqa: B008 - it never changes
) -> DedupeSummary:
    """Update the table in `into` from a lake, without rows whose key occurred before in their topic.

    The key is the column `key`, the value at `json_path` in payloads, or the whole `payload`. After a row
    that is kept, its key counts for `window_s` seconds, or for ever with None. Without topics and a pattern,
    all topics are read.
    """
    wanted = topics_of(topics, pattern)
    known_by = key_of(key, json_path, payload=payload)
    window_ms = window_of(window_s)
    source, directory = Path(lake).absolute(), Path(into).absolute()
    check_apart(source, directory)
    table = open_table(source)
    check_column(known_by, table.shape, source)
    check_topics(wanted, source, table)
    settings = Settings(table.id, known_by, window_ms)
    # Rows are the same as in the lake, but the table is always partitioned by date only.
    shape = table.shape._replace(by_topic=False)
    found = DedupedTable.open(directory, shape)
    settings.check(directory, found.last() if found else None)
    with closing(runner or SparkRunner("headrace dedupe", master)) as by:
        if found is None:
            by.start()  # a failure here happens before anything is written
        make_writable(directory)
        with Lock(directory / HIDDEN, "dedupe"):
            made = DedupedTable.open(directory, shape) or DedupedTable.make(directory, shape)
            # The previous holder of the lock may have committed another run.
            last = made.last()
            settings.check(directory, last)
            job = _Dedupe(
                lake=source,
                into=directory,
                shape=shape,
                table=made,
                last=last,
                settings=settings,
                topics=wanted,
                task_bytes=task_bytes,
                points=points,
            )
            return job.run(by, table.files(), progress)


class _Dedupe:
    def __init__(
        self,
        lake: Path,
        into: Path,
        shape: Shape,
        table: DedupedTable,
        last: RunNote | None,
        settings: Settings,
        topics: TopicSelection,
        task_bytes: int,
        points: Points,
    ) -> None:
        self._into, self._shape, self._table = into, shape, table
        self._settings, self._task_bytes, self._points = settings, task_bytes, points
        self._last = last
        self._number = last.number + 1 if last else 0
        note = str(note_path(into, last)) if last else ""
        self._input = Input(str(lake), topics, note)
        self._staging = ""

    def run(
        self, runner: TaskRunner, files: dict[str, int], progress: Progress | None
    ) -> DedupeSummary:
        done = set(self._last.done if self._last else ())
        # File names begin with the date and contain the number of the batch that wrote the file.
        new = {name: files[name] for name in sorted(files.keys() - done)}
        with staging(self._into) as place:
            self._staging = str(place)
            return self._run(runner, new, done & files.keys(), progress)

    def _run(
        self, runner: TaskRunner, new: dict[str, int], done: set[str], progress: Progress | None
    ) -> DedupeSummary:
        told = partial(_part, progress, sum(new.values()))
        staged = self._stage(runner, new, told(0.0, 0.5))
        self._points.here("staged")
        if not any(one.ends for one in staged):
            return self._summary([], {}, [])
        before = self._last.buckets if self._last else ()
        rows = sum(one.rows for one in staged) + sum(one.keys for one in before)
        count = bucket_count(rows, len(before))
        decided = self._decide(runner, staged, before, count, told(0.5, 0.6))
        self._points.here("decided")
        written = self._write(runner, list(new), staged, decided, told(0.6, 1.0))
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

    def _stage(
        self, runner: TaskRunner, new: dict[str, int], told: Told | None
    ) -> list[DedupeStaged]:
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
            for task, some in enumerate(together(new.items(), self._task_bytes))
        ]
        return runner.run(works, stage, told)

    def _decide(
        self,
        runner: TaskRunner,
        staged: list[DedupeStaged],
        before: Sequence[Bucket],
        count: int,
        told: Told | None,
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
        return dict(zip(touched, runner.run(works, decide_bucket, told), strict=True))

    def _write(
        self,
        runner: TaskRunner,
        names: list[str],
        staged: list[DedupeStaged],
        decided: dict[int, DecidedKeys],
        told: Told | None,
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
            for task, some in enumerate(together(sorted(sizes.items()), self._task_bytes))
        ]
        results = runner.run(works, write_part, told)
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
            raise JobError(f"of {rows} rows {kept} were written and {dropped} dropped")
        return DedupeSummary(
            into=str(self._into),
            rows=rows,
            kept=kept,
            dropped=dropped,
            without_key=sum(one.without_key for one in staged),
            topics=len({topic for one in staged for topic in one.ends}),
            files=len(written),
        )


def _part(progress: Progress | None, total: int, first: float, last: float) -> Told | None:
    if progress is None:
        return None
    return lambda part: progress(int(total * (first + (last - first) * part)), total)
