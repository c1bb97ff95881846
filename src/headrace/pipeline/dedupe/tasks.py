"""Tasks of a deduplication: stage the keys of rows, decide which rows are dropped, write the kept rows.

    stage ─ rows, by bucket of their key ─▶ decide ─ places of dropped rows, by task of their file ─▶ write
          └ one letter for each file ────────────────────────────────────────────────────────────▶ ┘

What the driver must know passes through the later steps unchanged, so it gets everything at the end.

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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import UnsetType

from headrace.lake.deduped import KEYS, Bucket, DedupedWriter, is_table, read_note
from headrace.lake.files.reading import Chosen, read_chosen, read_groups, read_ranges
from headrace.lake.files.writing import ROW_GROUP_ROWS, WrittenFile
from headrace.lake.format import Shape, writing
from headrace.lake.storage.storage import LakeFile, Storage
from headrace.pipeline.dedupe.keys import (
    KEY,
    ROW,
    Key,
    Numbers,
    Rows,
    buckets_of,
    decide,
    hashes,
    identities,
    topic_hash,
)
from headrace.pipeline.job import Points, groups
from headrace.pipeline.tasks import Letter, Letters, NotSharedError
from headrace.reader.planning import TopicSelection

_LETTER_BYTES = 1 << 20
_STAGED_ROWS = 1 << 20
"""Number of rows that are collected in memory before they are divided into letters."""

_FILE, _RESULT, _DROPPED, _ROWS = b"0", b"1", b"2", b"3"
"""Kinds of letters, as the first byte of their keys. So a task that writes gets its files first."""

_TASK_SHIFT = 40
"""The place of a row has the task of its file above this bit, and below it the row's number in the task."""


class Input(NamedTuple):
    """Rows that a run reads."""

    lake: Storage
    topics: TopicSelection
    note: LakeFile | None
    """Last run's note, which names the end of each covered topic; None for the first run."""

    def starts(self) -> Callable[[str], int | None]:
        """Return a function that returns the start offset of a topic, or None if the topic is not read."""
        ends = read_note(self.note).ends if self.note else {}
        known: dict[str, int | None] = {}

        def start(topic: str) -> int | None:
            if topic not in known:
                known[topic] = ends.get(topic, 0) if self.topics.matches(topic) else None
            return known[topic]

        return start


def _packed(to: int, key: bytes, rows: npt.NDArray[np.generic]) -> Letters:
    step = _LETTER_BYTES // rows.itemsize
    for first in range(0, len(rows), step):
        yield Letter(to, key, rows[first : first + step].tobytes())


def _result(to: int, found: object) -> Letter:
    return Letter(to, _RESULT, pickle.dumps(found))


# Files → rows by bucket


class StageWork(NamedTuple):
    input: Input
    task: int
    files: list[str]
    key: Key
    secret: str | UnsetType
    buckets: int
    divides: bool
    """True if this task makes every bucket divide its known keys anew."""
    points: Points


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


def stage(work: StageWork) -> Letters:
    starts = work.input.starts()
    place = work.task << _TASK_SHIFT
    gathered: list[Rows] = []
    for name in work.files:
        file = work.input.lake.file(name)
        ranges = [(one, starts(one.topic)) for one in read_ranges(file)]
        size = sum(
            one.end - max(start, one.offset)
            for one, start in ranges
            if start is not None and start < one.end
        )
        rows = with_key = 0
        for chosen in read_chosen(file, ("timestamp", work.key.column), starts) if size else ():
            found = _rows(chosen, work, place)
            rows, with_key = rows + len(chosen.places), with_key + len(found)
            gathered.append(found)
            if sum(map(len, gathered)) >= _STAGED_ROWS:
                yield from _by_bucket(gathered, work.buckets)
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
        yield Letter(work.task % work.buckets, key, pickle.dumps(staged))
        place += sum(one.rows for one, _ in ranges)
    yield from _by_bucket(gathered, work.buckets)
    for bucket in range(work.buckets if work.divides else 0):
        yield Letter(bucket, _ROWS, b"")
    work.points.here("staging")


def _rows(chosen: Chosen, work: StageWork, place: int) -> Rows:
    found = identities(work.key, chosen.columns[work.key.column])
    has_key = found.is_valid().to_numpy(zero_copy_only=False)
    topics, which = [topic_hash(name) for name in chosen.topics], chosen.which[has_key]
    rows = np.empty(len(which), ROW)
    rows["high"], rows["low"] = hashes(work.secret, topics, which, found.drop_null())
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


class DecideWork(NamedTuple):
    into: Storage
    number: int
    """Number of the run."""
    buckets: int
    known: Sequence[Bucket]
    """Buckets of the last run."""
    tasks: int
    window_ms: int | None
    points: Points


class DecidedBucket(NamedTuple):
    number: int
    bucket: Bucket
    dropped: int


def decide_bucket(work: DecideWork, number: int, letters: Letters) -> Letters:
    gathered: list[Rows] = []
    for letter in letters:
        if letter.key == _ROWS:
            gathered.append(np.frombuffer(letter.data, ROW))
        else:
            place = int.from_bytes(letter.key[len(_FILE) :])
            yield letter._replace(to=place >> _TASK_SHIFT)
    if not gathered:
        return
    found = decide(_read_keys(work, number), np.concatenate(gathered), work.window_ms)
    tasks, firsts = np.unique(found.dropped >> _TASK_SHIFT, return_index=True)
    for task, places in zip(tasks.tolist(), np.split(found.dropped, firsts)[1:], strict=True):
        yield from _packed(task, _DROPPED, places)
    decided = DecidedBucket(number, _write_keys(work, number, found.keys), len(found.dropped))
    work.points.here("deciding")
    yield _result(number % work.tasks, decided)


def _read_keys(work: DecideWork, number: int) -> Rows:
    # There are at least as many buckets as before, and each is a part of one of those.
    path = work.known[number % len(work.known)].path if work.known else ""
    found = [np.empty(0, KEY)]
    for group in read_groups(work.into.file(path), _KEYS_SCHEMA.names) if path else ():
        keys = np.empty(group.num_rows, KEY)
        for name in _KEYS_SCHEMA.names:
            keys[name] = group[name].to_numpy()
        found.append(keys.compress(buckets_of(keys, work.buckets) == number))
    return np.concatenate(found)


def _write_keys(work: DecideWork, number: int, keys: Rows) -> Bucket:
    """Write the bucket's keys; they are durable when this returns."""
    if not len(keys):
        return Bucket()
    _check_shared(work.into)
    path = f"{KEYS}/{work.number:012}-{number:04}-{uuid.uuid4().hex[:12]}.parquet"
    columns = {name: np.ascontiguousarray(keys[name]) for name in _KEYS_SCHEMA.names}
    table = pa.table(columns, _KEYS_SCHEMA)
    with writing(work.into.file(path)):
        file = work.into.new_file(path)
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


class WriteWork(NamedTuple):
    input: Input
    into: Storage
    number: int
    """Number of the run."""
    shape: Shape
    task_bytes: int
    points: Points


def write_files(work: WriteWork, task: int, letters: Letters) -> Letters:
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
    _check_shared(work.into)
    read = (file for file in files if file.rows)
    for some in groups(read, lambda file: file.bytes, work.task_bytes):
        for written in _write(work, task, some, dropped):
            yield _result(0, written)


def _write(
    work: WriteWork, task: int, files: Sequence[DedupeFile], dropped: Numbers
) -> list[WrittenFile]:
    name = f"{work.number:08}-{uuid.uuid4().hex[:12]}-{task:04}"
    columns = work.shape.columns
    writer = DedupedWriter(work.into, name, columns)
    kept = _kept(work, files, dropped)
    for rows in kept if len(files) == 1 else _sorted(kept, columns):
        writer.add(rows)
    work.points.here("writing")
    return writer.finish()


def _sorted(found: Iterable[pa.RecordBatch], columns: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of several small files, each of which is sorted, in one order."""
    table = pa.Table.from_batches(found, columns)
    table = table.sort_by([("topic", "ascending"), ("offset", "ascending")])
    yield from table.to_batches(ROW_GROUP_ROWS)


def _kept(
    work: WriteWork, files: Sequence[DedupeFile], dropped: Numbers
) -> Iterator[pa.RecordBatch]:
    columns, starts = work.shape.columns, work.input.starts()
    for file in files:
        for chosen in read_chosen(work.input.lake.file(file.name), columns.names, starts):
            places = chosen.places + file.place
            first, last = np.searchsorted(dropped, (places[0], places[-1] + 1))
            stays = ~np.isin(places, dropped[first:last], assume_unique=True)
            if stays.any():
                yield _typed(chosen, columns).filter(pa.array(stays))


def _typed(chosen: Chosen, columns: pa.Schema) -> pa.RecordBatch:
    # In a lake that is partitioned by topic, files have no topic column.
    topics = pa.DictionaryArray.from_arrays(pa.array(chosen.which), pa.array(chosen.topics))
    arrays = {field.name: chosen.columns[field.name] for field in columns if field.name != "topic"}
    return pa.RecordBatch.from_arrays(
        [
            topics.cast(pa.string()) if field.name == "topic" else arrays[field.name]
            for field in columns
        ],
        schema=columns,
    )
