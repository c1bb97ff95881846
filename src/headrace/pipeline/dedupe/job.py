"""The job `dedupe`: the rows of a lake without those that were published once more, as a Delta table.

    tasks stage keys ─▶ tasks decide by bucket ─▶ tasks write what stays ─▶ note ─▶ commit

A run takes in what the lake has behind what the last one has covered, by offsets: so what becomes of the
lake's files does not matter, and many small runs come to the same as a large one. Nothing counts before the
commit: what a killed run has left is removed by the next one.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

from headrace.lake.deduped import Bucket, DedupedTable, Note, note_path
from headrace.lake.format import LakeError, Shape
from headrace.lake.lock import Lock
from headrace.lake.manifests import HIDDEN
from headrace.lake.table import open_table
from headrace.lake.writing import Written
from headrace.pipeline.dedupe_input import (
    Settings,
    check_column,
    check_topics,
    key_of,
    window_of,
)
from headrace.pipeline.dedupe_plan import bucket_count, joined_buckets
from headrace.pipeline.dedupe_tasks import (
    Decided,
    DecideWork,
    Input,
    Staged,
    StageWork,
    WriteWork,
    decide_bucket,
    stage,
    write_part,
)
from headrace.pipeline.job_input import check_apart, make_writable, topics_of
from headrace.pipeline.points import Points
from headrace.pipeline.staging import by_number, staging, together
from headrace.pipeline.tasks import JobError, Runner, SparkRunner
from headrace.spark.options import Topics

WINDOW_S = 86_400.0
_TASK_BYTES = 64 << 20

Progress = Callable[[int, int], None]
"""Told how many bytes of the lake are done, of how many."""
Told = Callable[[float], None]


class Summary(NamedTuple):
    """What a run has done."""

    into: str
    rows: int
    """Those that the lake has behind the last run."""
    kept: int
    dropped: int
    without_key: int
    """Rows that stay because they have no key."""
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
    runner: Runner | None = None,
    points: Points = Points(),  # noqa: B008 - it never changes
) -> Summary:
    """Bring the table in `into` up to date with a lake, without rows whose key their topic has had before.

    The key is the column `key`, what is at `json_path` in payloads, or the whole `payload`. It counts for
    `window_s` after a row that stays, or for ever with None. Without topics and a pattern it is all topics.
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
    # Rows are as in the lake, but the table is always partitioned by date alone.
    shape = table.shape._replace(by_topic=False)
    found = DedupedTable.open(directory, shape)
    settings.check(directory, found.last() if found else None)
    with closing(runner or SparkRunner("headrace dedupe", master)) as by:
        if found is None:
            by.start()  # or nothing is written
        make_writable(directory)
        with Lock(directory / HIDDEN, "dedupe"):
            made = DedupedTable.open(directory, shape) or DedupedTable.make(directory, shape)
            # Whoever held the lock until now may have gone on.
            last = made.last()
            settings.check(directory, last)
            job = _Dedupe(
                source, directory, shape, made, last, settings, wanted, task_bytes, points
            )
            return job.run(by, table.files(), progress)


class _Dedupe:
    def __init__(
        self,
        lake: Path,
        into: Path,
        shape: Shape,
        table: DedupedTable,
        last: Note | None,
        settings: Settings,
        topics: Topics,
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

    def run(self, runner: Runner, files: dict[str, int], progress: Progress | None) -> Summary:
        done = set(self._last.done if self._last else ())
        # Their names begin with the date, and have the number of the batch that they were written by.
        new = {name: files[name] for name in sorted(files.keys() - done)}
        with staging(self._into) as place:
            self._staging = str(place)
            return self._run(runner, new, done & files.keys(), progress)

    def _run(
        self, runner: Runner, new: dict[str, int], done: set[str], progress: Progress | None
    ) -> Summary:
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

    def _stage(self, runner: Runner, new: dict[str, int], told: Told | None) -> list[Staged]:
        numbers = {name: number for number, name in enumerate(new)}
        works = [
            StageWork(
                *(self._input, self._staging, task, [(numbers[name], name) for name in some]),
                *(self._settings.key, self._points),
            )
            for task, some in enumerate(together(new.items(), self._task_bytes))
        ]
        return runner.run(works, stage, told)

    def _decide(
        self,
        runner: Runner,
        staged: list[Staged],
        before: Sequence[Bucket],
        count: int,
        told: Told | None,
    ) -> dict[int, Decided]:
        """By bucket; those that stay as they are are left out."""
        found = by_number((one.path, joined_buckets(one.batches, count)) for one in staged)
        # Where there are more buckets than before, the keys of all are divided anew.
        touched = sorted(found) if len(before) == count else range(count)
        works = [
            DecideWork(
                *(str(self._into), self._staging, self._number, bucket, count),
                *(found.get(bucket, []), before[bucket % len(before)].path if before else ""),
                *(self._settings.window_ms, self._points),
            )
            for bucket in touched
        ]
        return dict(zip(touched, runner.run(works, decide_bucket, told), strict=True))

    def _write(
        self,
        runner: Runner,
        names: list[str],
        staged: list[Staged],
        decided: dict[int, Decided],
        told: Told | None,
    ) -> list[Written]:
        dropped = by_number((one.path, one.batches) for one in decided.values())
        numbers = {names[number]: number for one in staged for number in one.bytes}
        sizes = {names[number]: size for one in staged for number, size in one.bytes.items()}
        works = [
            WriteWork(
                *(self._input, str(self._into), self._number, task),
                [(name, dropped.get(numbers[name], [])) for name in some],
                *(self._shape, self._points),
            )
            for task, some in enumerate(together(sorted(sizes.items()), self._task_bytes))
        ]
        results = runner.run(works, write_part, told)
        return [one for some in results for one in some]

    def _note(self, staged: list[Staged], done: set[str], buckets: list[Bucket]) -> Note:
        ends = dict(self._last.ends) if self._last else {}
        for one in staged:
            ends |= {topic: max(end, ends.get(topic, 0)) for topic, end in one.ends.items()}
        return Note(
            number=self._number,
            lake=self._settings.lake,
            key=self._settings.key.text,
            window_ms=self._settings.window_ms,
            ends=ends,
            done=tuple(sorted(done.union(*(one.done for one in staged)))),
            buckets=tuple(buckets),
        )

    def _summary(
        self, staged: list[Staged], decided: dict[int, Decided], written: list[Written]
    ) -> Summary:
        rows = sum(one.rows for one in staged)
        kept = sum(one.rows for one in written)
        dropped = sum(one.dropped for one in decided.values())
        if rows != kept + dropped:
            raise JobError(f"of {rows} rows {kept} were written and {dropped} dropped")
        return Summary(
            *(str(self._into), rows, kept, dropped, sum(one.without_key for one in staged)),
            *(len({topic for one in staged for topic in one.ends}), len(written)),
        )


def _part(progress: Progress | None, total: int, first: float, last: float) -> Told | None:
    if progress is None:
        return None
    return lambda part: progress(int(total * (first + (last - first) * part)), total)
