"""The job `dedupe`: writes the rows of a lake without duplicates, as a Delta table.

    stage ─ rows, by bucket of their key ─▶ decide ─ places of dropped rows, by task of their file ─▶ write
          └ one letter for each file ────────────────────────────────────────────────────────────▶ ┘

These three steps are one Spark job. What the driver must know passes through the later steps unchanged, so it
gets everything at the end. It then writes a note and commits.

A run reads the lake's records after the offsets that the last run has covered. So changes of the lake's files
do not matter, and many small runs have the same result as a large one. Nothing counts before the commit. The
next run removes the files that a killed run has left.

Spark may run any task again, and then letters of either run arrive. This changes nothing. `stage` and
`decide_bucket` are functions of files that never change: the lake's, the last run's note and its key files.
The order of letters may differ, but a decision does not depend on the order of rows. So all runs of a task
drop the same rows and leave the same keys. Only the names of the files that they write differ. A file is
durable before its name is sent, and has the same content as the file of another run. Files whose names do not
reach the driver are leftovers, which are swept later.
"""

import pickle
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.config.pipeline import DedupeOptions
from headrace.errors import OptionError
from headrace.lake.deduped import (
    KEYS,
    Bucket,
    DedupedTable,
    DedupedWriter,
    RunNote,
    is_table,
    note_path,
    read_note,
)
from headrace.lake.files.reading import Chosen, read_chosen, read_groups, read_ranges
from headrace.lake.files.writing import ROW_GROUP_ROWS, WrittenFile
from headrace.lake.format import FORMAT, LakeError, Shape, writing
from headrace.lake.storage.storage import LakeFile, Storage, storage_of
from headrace.lake.table import open_table
from headrace.model import Position, Span
from headrace.pipeline.dedupe.keys import (
    KEY,
    ROW,
    Key,
    Numbers,
    Rows,
    bucket_count,
    buckets_of,
    check_column,
    decide,
    hashes,
    identities,
    key_of,
    new_secret,
    topic_hash,
)
from headrace.pipeline.job import JobArguments, Points, groups, job, list_lake, part_of, topics_of
from headrace.pipeline.tasks import JobError, Letter, Letters, NotSharedError, Step, TaskRunner
from headrace.reader.planning import TopicSelection

_LETTER_BYTES = 1 << 20
_STAGED_ROWS = 1 << 20
"""Number of rows that are collected in memory before they are divided into letters."""


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
    window_ms = _window_of(given.window_s)
    lake = storage_of(given.lake, given.storage_options, given.catalog_options)
    into = storage_of(given.into, given.storage_options)
    lake.check_apart(into)
    source = open_table(lake)
    check_column(key, source.shape, lake)
    _check_topics(wanted, lake)
    nothing = RunNote(
        number=-1,
        lake=source.id,
        key=key.text,
        secret=new_secret(),
        window_ms=window_ms,
        ends={},
        done=(),
        buckets=(),
    )
    # Rows are the same as in the lake, but the table is always partitioned by date only.
    shape = source.shape._replace(by_topic=False)
    found = DedupedTable.open(into, shape)
    _last(into, found, nothing)
    with closing(given.task_runner("dedupe")) as runner:
        if found is None:
            runner.start()  # a failure here happens before anything is written
        into.prepare()
        with into.lock("dedupe"):
            table = DedupedTable.open(into, shape) or DedupedTable.make(into, shape)
            # The previous holder of the lock may have committed another run.
            last = _last(into, table, nothing)
            return _Dedupe(given, lake, wanted, key, into, shape, table, last, runner).run()


def _window_of(window_s: float | None) -> int | None:
    if window_s is None:
        return None
    if window_s < 0.001:
        raise OptionError(f"window_s must be at least 0.001 seconds, not {window_s:g}")
    return int(window_s * 1000)


def _check_topics(topics: TopicSelection, lake: Storage) -> None:
    if not topics.names:
        return
    _, known = list_lake(lake)
    for name in topics.names:
        if name not in known:
            raise JobError(f"there is no topic {name!r} in {lake.address}")


def _last(into: Storage, table: DedupedTable | None, nothing: RunNote) -> RunNote:
    """Return the note of the last run, or `nothing`; raise LakeError unless both have the same settings."""
    last = (table.last() if table is not None else None) or nothing
    if last.lake != nothing.lake:
        raise LakeError(f"{into.address} has the rows of another lake: name another directory")
    if (last.key, last.window_ms) != (nothing.key, nothing.window_ms):
        raise LakeError(
            f"{into.address} was made with the key {last.key} and {_window_text(last.window_ms)}, "
            f"not with {nothing.key} and {_window_text(nothing.window_ms)}: name another directory"
        )
    return last


def _window_text(window_ms: int | None) -> str:
    return "no window" if window_ms is None else f"a window of {window_ms / 1000:g} seconds"


# A run


class _Found(NamedTuple):
    """Results of the tasks of a run."""

    files: "list[DedupeFile]"
    buckets: "list[DecidedBucket]"
    written: list[WrittenFile]


@dataclass
class _Dedupe:
    given: DedupeArguments
    lake: Storage
    topics: TopicSelection
    key: Key
    into: Storage
    shape: Shape
    table: DedupedTable
    last: RunNote
    runner: TaskRunner

    def run(self) -> DedupeSummary:
        last, here = self.last, self.given.points.here
        files, ends = list_lake(self.lake)
        new_ends = {
            topic: end
            for topic, end in ends.items()
            if self.topics.matches(topic) and end.offset > last.ends.get(topic, 0)
        }
        # File names begin with the date and contain the number of the batch that wrote the file.
        new = {name: files[name] for name in sorted(files.keys() - set(last.done))}
        rows = sum(one.keys for one in last.buckets)
        rows += sum(new_rows(end, last.ends.get(topic, 0)) for topic, end in new_ends.items())
        buckets = bucket_count(rows, len(last.buckets))
        found = self._tasks(new, buckets) if new_ends else _Found([], [], [])
        if not any(file.rows for file in found.files):
            return self._summary(found, 0)
        here("written")
        if {file.name for file in found.files} != new.keys():
            raise JobError("tasks have not read all files: this is an internal error")
        summary = self._summary(found, len(new_ends))
        done = {file.name for file in found.files if file.is_done} | files.keys() & set(last.done)
        # Buckets without new rows stay as they are. If their number changes, all are decided.
        known = dict(enumerate(last.buckets)) if buckets == len(last.buckets) else {}
        known |= {one.number: one.bucket for one in found.buckets}
        note = msgspec.structs.replace(
            last,
            format=FORMAT,
            number=last.number + 1,
            ends=last.ends | {topic: end.offset for topic, end in new_ends.items()},
            done=tuple(sorted(done)),
            buckets=tuple(known[number] for number in range(buckets)),
        )
        if not self.table.commit(note, found.written, here):
            raise LakeError(
                f"another dedupe writes to {self.into.address}: it has committed run {note.number}"
            )
        here("committed")
        self.table.sweep(note)
        here("swept")
        return summary

    def _tasks(self, new: dict[str, int], buckets: int) -> _Found:
        works = list(enumerate(groups(new, new.__getitem__, self.given.task_bytes)))
        run = DedupeRun(
            lake=self.lake,
            topics=self.topics,
            note=self.into.file(note_path(self.last)) if self.last.number >= 0 else None,
            key=self.key,
            secret=self.last.secret,
            window_ms=self.last.window_ms,
            into=self.into,
            number=self.last.number + 1,
            shape=self.shape,
            known=self.last.buckets,
            buckets=buckets,
            task_bytes=self.given.task_bytes,
            points=self.given.points,
        )
        total = sum(new.values())
        letters = self.runner.exchange(
            works,
            partial(stage, run),
            [Step(buckets, partial(decide_bucket, run)), Step(len(works), partial(write, run))],
            part_of(self.given.progress, done=0, size=total, total=total),
        )
        results = [pickle.loads(letter.data) for letter in letters]
        return _Found(
            [one for one in results if isinstance(one, DedupeFile)],
            [one for one in results if isinstance(one, DecidedBucket)],
            [one for one in results if isinstance(one, WrittenFile)],
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
            into=self.into.address,
            rows=rows,
            kept=kept,
            dropped=dropped,
            without_key=sum(file.without_key for file in found.files),
            topics=topics,
            files=len(found.written),
        )


def new_rows(end: Position, covered: int) -> int:
    """Estimate the number of a topic's rows after the offset `covered`, by the average size of all."""
    whole = Span.between(Position(end.epoch, 0, 0), end)
    return whole.records * min(end.offset - covered, whole.bytes) // max(1, whole.bytes)


# Common parts of the tasks


class DedupeRun(NamedTuple):
    """A run, as its tasks know it."""

    lake: Storage
    topics: TopicSelection
    note: LakeFile | None
    """Last run's note, which names the end of each covered topic; None for the first run."""
    key: Key
    secret: str | msgspec.UnsetType
    window_ms: int | None
    into: Storage
    number: int
    shape: Shape
    known: Sequence[Bucket]
    """Buckets of the last run."""
    buckets: int
    task_bytes: int
    points: Points

    def starts(self) -> Callable[[str], int | None]:
        """Return a function that returns the start offset of a topic, or None if the topic is not read."""
        ends = read_note(self.note).ends if self.note else {}
        return cache(lambda topic: ends.get(topic, 0) if self.topics.matches(topic) else None)


_FILE, _RESULT, _DROPPED, _ROWS = b"0", b"1", b"2", b"3"
"""Kinds of letters, as the first byte of their keys. So a task that writes gets its files first."""

_TASK_SHIFT = 40
"""The place of a row has the task of its file above this bit, and below it the row's number in the task."""


def _packed(to: int, key: bytes, rows: npt.NDArray[np.generic]) -> Letters:
    step = _LETTER_BYTES // rows.itemsize
    for first in range(0, len(rows), step):
        yield Letter(to, key, rows[first : first + step].tobytes())


def _result(found: object) -> Letter:
    return Letter(0, _RESULT, pickle.dumps(found))


# Files → rows by bucket


class DedupeFile(NamedTuple):
    """A file of the lake, as a run has read it."""

    name: str
    place: int
    """Place of the file's first row."""
    bytes: int
    """Bytes of the log that are read."""
    rows: int
    without_key: int
    is_done: bool
    """True if nothing is left to read after this run is committed."""


def stage(run: DedupeRun, work: tuple[int, list[str]]) -> Letters:
    task, files = work
    starts = run.starts()
    place = task << _TASK_SHIFT
    gathered: list[Rows] = []
    for name in files:
        file = run.lake.file(name)
        ranges = [(one, starts(one.topic)) for one in read_ranges(file)]
        size = sum(
            one.end - max(start, one.offset)
            for one, start in ranges
            if start is not None and start < one.end
        )
        rows = with_key = 0
        for chosen in read_chosen(file, ("timestamp", run.key.column), starts) if size else ():
            found = _rows(chosen, run, place)
            rows, with_key = rows + len(chosen.places), with_key + len(found)
            gathered.append(found)
            if sum(map(len, gathered)) >= _STAGED_ROWS:
                yield from _by_bucket(gathered, run.buckets)
                gathered = []
        staged = DedupeFile(
            name=name,
            place=place,
            bytes=size,
            rows=rows,
            without_key=rows - with_key,
            is_done=all(start is not None for _, start in ranges),
        )
        key = _FILE + place.to_bytes(8)
        yield Letter(task % run.buckets, key, pickle.dumps(staged))
        place += sum(one.rows for one, _ in ranges)
    yield from _by_bucket(gathered, run.buckets)
    if task == 0 and run.buckets != len(run.known):
        # Every bucket takes its part of the known keys, even if it gets no rows.
        for bucket in range(run.buckets):
            yield Letter(bucket, _ROWS, b"")
    run.points.here("staging")


def _rows(chosen: Chosen, run: DedupeRun, place: int) -> Rows:
    found = identities(run.key, chosen.columns[run.key.column])
    has_key = found.is_valid().to_numpy(zero_copy_only=False)
    topics, which = [topic_hash(name) for name in chosen.topics], chosen.which[has_key]
    rows = np.empty(len(which), ROW)
    rows["high"], rows["low"] = hashes(run.secret, topics, which, found.drop_null())
    rows["topic"] = np.array([one.word for one in topics], np.uint64)[which]
    rows["ms"] = chosen.columns["timestamp"].cast(pa.int64()).to_numpy()[has_key] // 1000
    rows["offset"] = chosen.columns["offset"].to_numpy()[has_key]
    rows["place"] = chosen.places[has_key] + place
    return rows


def _by_bucket(gathered: Sequence[Rows], buckets: int) -> Letters:
    rows = np.concatenate([np.empty(0, ROW), *gathered])
    bucket = buckets_of(rows, buckets)
    rows = rows.take(np.argsort(bucket, kind="stable"))
    ends = np.cumsum(np.bincount(bucket, minlength=buckets)).tolist()
    for number, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
        yield from _packed(number, _ROWS, rows[first:last])


# A bucket → dropped rows and known keys


_KEYS_SCHEMA = pa.schema(
    [pa.field(name, pa.from_numpy_dtype(KEY[name]), False) for name in KEY.names or ()]
)


class DecidedBucket(NamedTuple):
    number: int
    bucket: Bucket
    dropped: int


def decide_bucket(run: DedupeRun, number: int, letters: Letters) -> Letters:
    gathered: list[Rows] = []
    for letter in letters:
        if letter.key == _ROWS:
            gathered.append(np.frombuffer(letter.data, ROW))
        else:
            place = int.from_bytes(letter.key[len(_FILE) :])
            yield letter._replace(to=place >> _TASK_SHIFT)
    if not gathered:
        return
    found = decide(_read_keys(run, number), np.concatenate(gathered), run.window_ms)
    tasks, firsts = np.unique(found.dropped >> _TASK_SHIFT, return_index=True)
    for task, places in zip(tasks.tolist(), np.split(found.dropped, firsts)[1:], strict=True):
        yield from _packed(task, _DROPPED, places)
    decided = DecidedBucket(number, _write_keys(run, number, found.keys), len(found.dropped))
    run.points.here("deciding")
    yield _result(decided)


def _read_keys(run: DedupeRun, number: int) -> Rows:
    # There are at least as many buckets as before, and each is a part of one of those.
    path = run.known[number % len(run.known)].path if run.known else ""
    found = [np.empty(0, KEY)]
    for group in read_groups(run.into.file(path), _KEYS_SCHEMA.names) if path else ():
        keys = np.empty(group.num_rows, KEY)
        for name in _KEYS_SCHEMA.names:
            keys[name] = group[name].to_numpy()
        found.append(keys.compress(buckets_of(keys, run.buckets) == number))
    return np.concatenate(found)


def _write_keys(run: DedupeRun, number: int, keys: Rows) -> Bucket:
    """Write the bucket's keys; they are durable when this returns."""
    if not len(keys):
        return Bucket()
    _check_shared(run.into)
    path = f"{KEYS}/{run.number:012}-{number:04}-{uuid.uuid4().hex[:12]}.parquet"
    columns = {name: np.ascontiguousarray(keys[name]) for name in _KEYS_SCHEMA.names}
    table = pa.table(columns, _KEYS_SCHEMA)
    with writing(run.into.file(path)):
        file = run.into.new_file(path)
        try:
            pq.write_table(
                table,
                file.content,
                use_dictionary=["topic"],
                store_schema=False,
                write_page_checksum=True,
            )
            file.keep(path)
        finally:
            file.discard()
    return Bucket(path, table.num_rows)


def _check_shared(into: Storage) -> None:
    if not is_table(into):
        raise NotSharedError(
            f"Spark's executors do not see {into.address}: name a place that all machines share"
        )


# Files → kept rows


def write(run: DedupeRun, task: int, letters: Letters) -> Letters:
    files: list[DedupeFile] = []
    gathered = [np.empty(0, np.int64)]
    for letter in letters:
        if letter.key == _DROPPED:
            gathered.append(np.frombuffer(letter.data, np.int64))
            continue
        yield letter
        if letter.key != _RESULT:
            files.append(pickle.loads(letter.data))
    dropped = np.sort(np.concatenate(gathered))
    _check_shared(run.into)
    read = (file for file in files if file.rows)
    for some in groups(read, lambda file: file.bytes, run.task_bytes):
        for written in _write_group(run, task, some, dropped):
            yield _result(written)


def _write_group(
    run: DedupeRun, task: int, files: Sequence[DedupeFile], dropped: Numbers
) -> list[WrittenFile]:
    name = f"{run.number:08}-{uuid.uuid4().hex[:12]}-{task:04}"
    columns = run.shape.columns
    writer = DedupedWriter(run.into, name, columns)
    kept = _kept(run, files, dropped)
    for rows in kept if len(files) == 1 else _sorted(kept, columns):
        writer.add(rows)
    run.points.here("writing")
    return writer.finish()


def _sorted(found: Iterable[pa.RecordBatch], columns: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of several small files, each of which is sorted, in one order."""
    table = pa.Table.from_batches(found, columns)
    table = table.sort_by([("topic", "ascending"), ("offset", "ascending")])
    yield from table.to_batches(ROW_GROUP_ROWS)


def _kept(
    run: DedupeRun, files: Sequence[DedupeFile], dropped: Numbers
) -> Iterator[pa.RecordBatch]:
    columns, starts = run.shape.columns, run.starts()
    for file in files:
        for chosen in read_chosen(run.lake.file(file.name), columns.names, starts):
            places = chosen.places + file.place
            first, last = np.searchsorted(dropped, (places[0], places[-1] + 1))
            stays = ~np.isin(places, dropped[first:last], assume_unique=True)
            if stays.any():
                yield _typed(chosen, columns).filter(pa.array(stays))


def _typed(chosen: Chosen, columns: pa.Schema) -> pa.RecordBatch:
    # In a lake that is partitioned by topic, files have no topic column.
    topics = pa.array(chosen.topics).take(pa.array(chosen.which))
    arrays = [topics if name == "topic" else chosen.columns[name] for name in columns.names]
    return pa.RecordBatch.from_arrays(arrays, schema=columns)
