"""Tasks of a deduplication: stage the keys of rows, decide which rows are dropped, write the kept rows.

Only the run that staged a file uses it.
"""

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.lake.deduped import KEYS, Bucket, DedupedWriter, read_note
from headrace.lake.files.reading import Chosen, read_chosen, read_groups, read_ranges
from headrace.lake.files.writing import ROW_GROUP_ROWS, WrittenFile, make_directory, sync
from headrace.lake.format import Shape, writing
from headrace.lake.manifests import HIDDEN
from headrace.pipeline.dedupe.keys import (
    BUCKETS_MAX,
    Key,
    KeyRows,
    Keys,
    Numbers,
    Words,
    decide,
    hashes,
    identities,
    topic_hash,
)
from headrace.pipeline.job import Points
from headrace.pipeline.tasks import Batches, Places, WorkFile, read_staged
from headrace.reader.planning import TopicSelection

_WORDS = ("high", "low", "topic")
_KEYS_SCHEMA = pa.schema(
    [*(pa.field(name, pa.uint64(), False) for name in _WORDS), pa.field("ms", pa.int64(), False)]
)
_ROWS_SCHEMA = pa.schema(
    [*_KEYS_SCHEMA, *(pa.field(name, pa.int64(), False) for name in ("offset", "file", "place"))]
)
_STAGED_ROWS = 1 << 20
"""Number of rows that are collected in memory before they are written."""

_DROPPED_SCHEMA = pa.schema([pa.field("place", pa.int64(), False)])


class Input(NamedTuple):
    """Rows that a run reads."""

    lake: str
    topics: TopicSelection
    note: str
    """Path of the last run's note, which names the end of each covered topic; empty for the first run."""

    def starts(self) -> Callable[[str], int | None]:
        """Return a function that returns the start offset of a topic, or None if the topic is not read."""
        ends = read_note(Path(self.note)).ends if self.note else {}
        known: dict[str, int | None] = {}

        def start(topic: str) -> int | None:
            if topic not in known:
                known[topic] = ends.get(topic, 0) if self.topics.matches(topic) else None
            return known[topic]

        return start


# Keys of rows → staged keys by bucket


class DedupeStageWork(NamedTuple):
    input: Input
    staging: str
    task: int
    files: list[tuple[int, str]]
    """Files, with their numbers in this run."""
    key: Key
    points: Points


class DedupeStaged(NamedTuple):
    path: str
    batches: Batches
    """Batches of the file, by bucket."""
    bytes: dict[int, int]
    """Bytes of the log that are read from each file, by file number; files without any are left out."""
    done: list[str]
    """Files without further rows to read after this run is committed."""
    ends: dict[str, int]
    rows: int
    without_key: int


def stage(work: DedupeStageWork) -> DedupeStaged:
    starts = work.input.starts()
    size: dict[int, int] = {}
    done: list[str] = []
    ends: dict[str, int] = {}
    rows = without_key = 0
    gathered: list[pa.RecordBatch] = []
    with WorkFile(work.staging, f"{work.task:06}-keys", _ROWS_SCHEMA) as staged:
        for number, name in work.files:
            path = Path(work.input.lake, name)
            is_done = True
            for one in read_ranges(path):
                start = starts(one.topic)
                if start is None:
                    is_done = False
                elif start < one.end:
                    size[number] = size.get(number, 0) + one.end - max(start, one.offset)
                    ends[one.topic] = max(ends.get(one.topic, 0), one.end)
            if is_done:
                done.append(name)
            if number not in size:
                continue
            for chosen in read_chosen(path, ("timestamp", work.key.column), starts):
                found = _keys(chosen, work.key, number)
                rows += len(chosen.places)
                without_key += len(chosen.places) - found.num_rows
                gathered.append(found)
                if sum(one.num_rows for one in gathered) >= _STAGED_ROWS:
                    _by_bucket(gathered, staged)
                    gathered = []
        _by_bucket(gathered, staged)
        work.points.here("staging")
    return DedupeStaged(staged.path, staged.batches, size, done, ends, rows, without_key)


def _keys(chosen: Chosen, key: Key, file: int) -> pa.RecordBatch:
    topics = [topic_hash(name) for name in chosen.topics]
    prefixes = [topics[place].prefix for place in chosen.which.tolist()]
    found = identities(key, chosen.columns[key.column])
    high, low = hashes(prefixes, found)
    has_key = np.fromiter((one is not None for one in found), bool, len(found))
    words = np.array([one.word for one in topics], np.uint64)
    return pa.RecordBatch.from_arrays(
        [
            *map(pa.array, (high, low, words[chosen.which[has_key]])),
            pa.array(_ms(chosen.columns)[has_key]),
            pa.array(chosen.columns["offset"].to_numpy()[has_key]),
            pa.array(np.full(len(high), file, np.int64)),
            pa.array(chosen.places[has_key]),
        ],
        schema=_ROWS_SCHEMA,
    )


def _ms(columns: pa.RecordBatch) -> Numbers:
    found: Numbers = columns["timestamp"].cast(pa.int64()).to_numpy() // 1000
    return found


def _by_bucket(gathered: list[pa.RecordBatch], staged: WorkFile) -> None:
    """Divide into the maximum number of buckets: the needed number is known after all staging."""
    if not gathered:
        return
    rows = pa.concat_batches(gathered)
    bucket = _buckets(rows["low"], BUCKETS_MAX)
    order = np.argsort(bucket, kind="stable")
    rows = rows.take(pa.array(order))
    numbers, firsts, counts = np.unique(bucket[order], return_index=True, return_counts=True)
    for number, first, count in zip(
        numbers.tolist(), firsts.tolist(), counts.tolist(), strict=True
    ):
        staged.add(number, rows.slice(first, count))


def _buckets(low: pa.Array, count: int) -> Numbers:
    words: Words = low.to_numpy()
    return (words % np.uint64(count)).astype(np.int64)


# A bucket → dropped rows and known keys


class DecideWork(NamedTuple):
    into: str
    staging: str
    number: int
    """Number of the run."""
    bucket: int
    buckets: int
    staged: Places
    known: str
    """File with the bucket's known keys, maybe also with those of other buckets; empty if there is none."""
    window_ms: int | None
    points: Points


class DecidedKeys(NamedTuple):
    path: str
    batches: Batches
    """Batches by the number of the file whose rows are dropped."""
    dropped: int
    bucket: Bucket


def decide_bucket(work: DecideWork) -> DecidedKeys:
    known = _read_keys(work)
    with ExitStack() as stack:
        batches = list(read_staged(stack, work.staged))
        table = pa.Table.from_batches(batches, _ROWS_SCHEMA).combine_chunks()
        columns = {name: table[name].to_numpy() for name in table.column_names}
        found = decide(known, KeyRows(*(columns[name] for name in KeyRows._fields)), work.window_ms)
        files, places = columns["file"][found.dropped], columns["place"][found.dropped]
    with WorkFile(work.staging, f"{work.bucket:06}-dropped", _DROPPED_SCHEMA) as staged:
        for file in np.unique(files).tolist():
            some = pa.array(places[files == file])
            staged.add(file, pa.RecordBatch.from_arrays([some], schema=_DROPPED_SCHEMA))
    bucket = _write_keys(work, found.keys)
    work.points.here("deciding")
    return DecidedKeys(staged.path, staged.batches, len(found.dropped), bucket)


def _read_keys(work: DecideWork) -> Keys:
    tables = [_KEYS_SCHEMA.empty_table()]
    if work.known:
        groups = read_groups(Path(work.into, work.known), _KEYS_SCHEMA.names)
        tables += [pa.Table.from_batches([one]).cast(_KEYS_SCHEMA) for one in groups]
    table = pa.concat_tables(tables).combine_chunks()
    table = table.filter(pa.array(_buckets(table["low"], work.buckets) == work.bucket))
    return Keys(*(table[name].to_numpy() for name in _KEYS_SCHEMA.names))


def _write_keys(work: DecideWork, keys: Keys) -> Bucket:
    """Write the bucket's keys; they are durable when this returns."""
    if not len(keys.ms):
        return Bucket()
    name = f"{work.number:012}-{work.bucket:04}-{uuid.uuid4().hex[:12]}.parquet"
    path = Path(work.into, HIDDEN, KEYS, name)
    make_directory(path.parent)
    table = pa.Table.from_arrays([pa.array(column) for column in keys], schema=_KEYS_SCHEMA)
    with writing(path):
        pq.write_table(
            table, path, use_dictionary=["topic"], store_schema=False, write_page_checksum=True
        )
    sync(path)
    sync(path.parent)
    return Bucket(str(path.relative_to(work.into)), table.num_rows)


# Files → kept rows


class WriteWork(NamedTuple):
    input: Input
    into: str
    number: int
    task: int
    files: list[tuple[str, Places]]
    """Files, each with the staged places of its dropped rows."""
    shape: Shape
    points: Points


def write_part(work: WriteWork) -> list[WrittenFile]:
    # A task that Spark repeats writes its own files: only files that the driver learns of count.
    name = f"{work.number:08}-{uuid.uuid4().hex[:12]}-{work.task:04}"
    writer = DedupedWriter(Path(work.into), name, work.shape.columns)
    if len(work.files) == 1:
        for rows in _kept(work, *work.files[0]):
            writer.add(rows)
    else:
        # Small files: each is sorted, so sort their rows together.
        found = [rows for name, dropped in work.files for rows in _kept(work, name, dropped)]
        table = pa.Table.from_batches(found, work.shape.columns)
        table = table.sort_by([("topic", "ascending"), ("offset", "ascending")])
        for rows in table.to_batches(ROW_GROUP_ROWS):
            writer.add(rows)
    work.points.here("writing")
    return writer.finish()


def _kept(work: WriteWork, name: str, places: Places) -> Iterator[pa.RecordBatch]:
    with ExitStack() as stack:
        staged = [one["place"].to_numpy() for one in read_staged(stack, places)]
        dropped = np.sort(np.concatenate([np.array([], np.int64), *staged]))
    columns = work.shape.columns
    path = Path(work.input.lake, name)
    for chosen in read_chosen(path, columns.names, work.input.starts()):
        stays = ~np.isin(chosen.places, dropped, assume_unique=True)
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
