"""The job `dedupe`: writes the rows of a lake without duplicates, as a Delta table.

    one Spark job (`tasks.py`): stage keys ─▶ decide by bucket ─▶ write the kept rows; then note ─▶ commit

A run reads the lake's records after the offsets that the last run has covered. So changes of the lake's files
do not matter, and many small runs have the same result as a large one. Nothing counts before the commit. The
next run removes the files that a killed run has left.
"""

import pickle
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import pyarrow as pa

from headrace.config.pipeline import DedupeOptions
from headrace.errors import OptionError
from headrace.lake.deduped import DedupedTable, RunNote, note_path
from headrace.lake.files.writing import WrittenFile
from headrace.lake.format import LakeError, Positions, Shape
from headrace.lake.storage.storage import Storage, storage_of
from headrace.lake.table import open_table
from headrace.pipeline.dedupe.keys import Key, KeyKind, bucket_count, new_secret, parse_path
from headrace.pipeline.dedupe.tasks import (
    DecidedBucket,
    DecideWork,
    DedupeFile,
    Input,
    StageWork,
    WriteWork,
    decide_bucket,
    stage,
    write_files,
)
from headrace.pipeline.job import JobArguments, groups, job, list_lake, part_of, topics_of
from headrace.pipeline.tasks import JobError, Step, TaskRunner
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
    source = storage_of(given.lake, given.storage_options, given.catalog_options)
    into = storage_of(given.into, given.storage_options)
    source.check_apart(into)
    table = open_table(source)
    check_column(key, table.shape, source)
    check_topics(wanted, source)
    settings = Settings(table.id, key, window_ms)
    # Rows are the same as in the lake, but the table is always partitioned by date only.
    shape = table.shape._replace(by_topic=False)
    found = DedupedTable.open(into, shape)
    settings.check(into, found.last() if found else None)
    with closing(given.task_runner("dedupe")) as runner:
        if found is None:
            runner.start()  # a failure here happens before anything is written
        into.prepare()
        with into.lock("dedupe"):
            made = DedupedTable.open(into, shape) or DedupedTable.make(into, shape)
            # The previous holder of the lock may have committed another run.
            last = made.last()
            settings.check(into, last)
            run = _Dedupe(
                given=given,
                source=source,
                into=into,
                topics=wanted,
                shape=shape,
                table=made,
                last=last,
                settings=settings,
                runner=runner,
            )
            return run.run(*list_lake(source))


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


def check_column(key: Key, shape: Shape, lake: Storage) -> None:
    if key.kind is not KeyKind.COLUMN or key.name == "payload":
        return
    if key.name not in shape.decoded.names:
        names = ", ".join(["payload", *shape.decoded.names])
        raise LakeError(
            f"{lake.address} has no column {key.name!r} that could identify rows: use one of {names}"
        )
    kind = shape.decoded.field(key.name).type
    if pa.types.is_nested(kind):
        raise LakeError(f"column {key.name!r} holds nested values: name one of a plain type")


def check_topics(topics: TopicSelection, lake: Storage) -> None:
    if not topics.names:
        return
    _, known = list_lake(lake)
    for name in topics.names:
        if name not in known:
            raise JobError(f"there is no topic {name!r} in {lake.address}")


class Settings(NamedTuple):
    """Settings that stay the same from run to run."""

    lake: str
    key: Key
    window_ms: int | None

    def check(self, into: Storage, last: RunNote | None) -> None:
        if last is None:
            return
        if last.lake != self.lake:
            raise LakeError(f"{into.address} has the rows of another lake: name another directory")
        if (last.key, last.window_ms) != (self.key.text, self.window_ms):
            raise LakeError(
                f"{into.address} was made with the key {last.key} and {_window_text(last.window_ms)}, "
                f"not with {self.key.text} and {_window_text(self.window_ms)}: name another directory"
            )


def _window_text(window_ms: int | None) -> str:
    return "no window" if window_ms is None else f"a window of {window_ms / 1000:g} seconds"


# A run


class _Found(NamedTuple):
    """Results of the tasks of a run."""

    files: list[DedupeFile]
    buckets: list[DecidedBucket]
    written: list[WrittenFile]


class _Dedupe:
    def __init__(
        self,
        given: DedupeArguments,
        source: Storage,
        into: Storage,
        topics: TopicSelection,
        shape: Shape,
        table: DedupedTable,
        last: RunNote | None,
        settings: Settings,
        runner: TaskRunner,
    ) -> None:
        self._into, self._shape, self._table = into, shape, table
        self._settings, self._task_bytes, self._points = settings, given.task_bytes, given.points
        self._runner, self._progress = runner, given.progress
        self._last = last
        self._number = last.number + 1 if last else 0
        self._covered = last.ends if last else {}
        self._before = last.buckets if last else ()
        self._secret = last.secret if last else new_secret()
        self._input = Input(source, topics, into.file(note_path(last)) if last else None)

    def run(self, files: dict[str, int], ends: Positions) -> DedupeSummary:
        new_ends = {
            topic: end
            for topic, end in ends.items()
            if self._input.topics.matches(topic) and end.offset > self._covered.get(topic, 0)
        }
        done = set(self._last.done if self._last else ())
        # File names begin with the date and contain the number of the batch that wrote the file.
        new = {name: files[name] for name in sorted(files.keys() - done)}
        buckets = self._buckets(new_ends)
        found = self._tasks(new, buckets) if new_ends else _Found([], [], [])
        if not any(file.rows for file in found.files):
            return self._summary(found, 0)
        self._points.here("written")
        if {file.name for file in found.files} != new.keys():
            raise JobError("tasks have not read all files: this is an internal error")
        summary = self._summary(found, len(new_ends))
        done = {*(done & files.keys()), *(file.name for file in found.files if file.is_done)}
        note = self._note(new_ends, done, buckets, found.buckets)
        if not self._table.commit(note, found.written, self._points.here):
            raise LakeError(
                f"another dedupe writes to {self._into.address}: it has committed run {note.number}"
            )
        self._points.here("committed")
        self._table.sweep(note)
        self._points.here("swept")
        return summary

    def _buckets(self, ends: Positions) -> int:
        """Return the number of buckets for the new records and the known keys."""
        rows = sum(one.keys for one in self._before)
        for topic, end in ends.items():
            # The number of new records follows from the average size of all records of the topic.
            new_bytes = end.offset - self._covered.get(topic, 0)
            rows += end.ordinal * new_bytes // end.offset
        return bucket_count(rows, len(self._before))

    def _tasks(self, new: dict[str, int], buckets: int) -> _Found:
        works = [
            StageWork(
                input=self._input,
                task=task,
                files=files,
                key=self._settings.key,
                secret=self._secret,
                buckets=buckets,
                divides=task == 0 and buckets != len(self._before),
                points=self._points,
            )
            for task, files in enumerate(groups(new, new.__getitem__, self._task_bytes))
        ]
        deciding = DecideWork(
            into=self._into,
            number=self._number,
            buckets=buckets,
            known=self._before,
            tasks=len(works),
            window_ms=self._settings.window_ms,
            points=self._points,
        )
        writing = WriteWork(
            input=self._input,
            into=self._into,
            number=self._number,
            shape=self._shape,
            task_bytes=self._task_bytes,
            points=self._points,
        )
        total = sum(new.values())
        letters = self._runner.exchange(
            works,
            stage,
            [
                Step(buckets, partial(decide_bucket, deciding)),
                Step(len(works), partial(write_files, writing)),
            ],
            part_of(self._progress, done=0, size=total, total=total),
        )
        results = [pickle.loads(letter.data) for letter in letters]
        return _Found(
            [one for one in results if isinstance(one, DedupeFile)],
            [one for one in results if isinstance(one, DecidedBucket)],
            [one for one in results if isinstance(one, WrittenFile)],
        )

    def _note(
        self, ends: Positions, done: set[str], buckets: int, decided: list[DecidedBucket]
    ) -> RunNote:
        # Buckets without new rows stay as they are. If their number changes, all are decided.
        known = dict(enumerate(self._before)) if buckets == len(self._before) else {}
        known |= {one.number: one.bucket for one in decided}
        return RunNote(
            number=self._number,
            lake=self._settings.lake,
            key=self._settings.key.text,
            secret=self._secret,
            window_ms=self._settings.window_ms,
            ends=self._covered | {topic: end.offset for topic, end in ends.items()},
            done=tuple(sorted(done)),
            buckets=tuple(known[number] for number in range(buckets)),
        )

    def _summary(self, found: _Found, topics: int) -> DedupeSummary:
        rows = sum(file.rows for file in found.files)
        kept = sum(one.rows for one in found.written)
        dropped = sum(one.dropped for one in found.buckets)
        if rows != kept + dropped:
            raise JobError(
                f"of {rows} rows, {kept} were written and {dropped} dropped: this is an internal error"
            )
        return DedupeSummary(
            into=self._into.address,
            rows=rows,
            kept=kept,
            dropped=dropped,
            without_key=sum(file.without_key for file in found.files),
            topics=topics,
            files=len(found.written),
        )
