"""A Delta table with one state per topic. A commit counts once, and replaces all states or some buckets.

Topics are divided into buckets. Each bucket is one file, whose name contains its number and the number of
buckets. To change states, one commit adds a new file for each of their buckets and removes the old ones.
"""

import re
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.transaction import AddAction

from headrace.lake.files.writing import sync
from headrace.lake.format import (
    FORMAT,
    NAMES_KEY,
    LakeError,
    Positions,
    has_old_names,
    present_topic,
    writing,
)
from headrace.lake.formats.delta import can_open, commit_delta, make_delta, sweep_delta
from headrace.model import Position

STATES_FORMAT = 1
_FORMAT_KEY = "headrace.states"

SCHEMA = pa.schema(
    [
        pa.field("topic", pa.string(), False),
        pa.field("epoch", pa.int64(), False),
        pa.field("offset", pa.int64(), False),
        pa.field("ordinal", pa.int64(), False),
        pa.field("messages", pa.int64(), False),
        pa.field("reducer", pa.string(), False),
        pa.field("state", pa.binary(), False),
        pa.field("is_json", pa.bool_(), False),
        pa.field("complete", pa.bool_(), False),
        pa.field("error", pa.string()),
    ]
)

_GROUP_BYTES = 64 << 20
_KEPT_S = 7 * 86_400.0
"""Time that files stay after the table has dropped them, because readers may still use them."""


_LOG_KEPT = "interval 1 days"
"""Time that commits stay when they are no longer needed to open the table: there may be one every second."""

_NAME = re.compile(r"\d{8}-(?P<bucket>\d{4})-of-(?P<count>\d{4})-[0-9a-f]{12}\.parquet")


def name_of(number: int, bucket: int, count: int) -> str:
    """Return a new unique name for a file of states, which contains its bucket."""
    return f"{number:08}-{bucket:04}-of-{count:04}-{uuid.uuid4().hex[:12]}.parquet"


class StatesFile(NamedTuple):
    """A file that is on disk, but not in the table yet."""

    path: str
    bytes: int
    rows: int


class StatesWriter:
    """Writer of one file of states. It limits the bytes that it collects, because a state may be large."""

    def __init__(self, directory: Path, name: str) -> None:
        self._path = directory / name
        with writing(self._path):
            self._writer = pq.ParquetWriter(
                self._path, SCHEMA, store_schema=False, write_page_checksum=True
            )
        self._rows: list[dict[str, Any]] = []
        self._tables: list[pa.Table] = []
        self._bytes = self._count = 0

    def add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        self._added(len(row["state"]))

    def add_table(self, table: pa.Table) -> None:
        self._tables.append(table)
        self._added(table.nbytes)

    def finish(self) -> StatesFile:
        self._write()
        self._writer.add_key_value_metadata({NAMES_KEY: str(FORMAT)})
        with writing(self._path):
            self._writer.close()
        sync(self._path)
        sync(self._path.parent)
        return StatesFile(self._path.name, self._path.stat().st_size, self._count)

    def _added(self, size: int) -> None:
        self._bytes += size
        if self._bytes >= _GROUP_BYTES:
            self._write()

    def _write(self) -> None:
        table = pa.concat_tables([*self._tables, pa.Table.from_pylist(self._rows, SCHEMA)])
        if table.num_rows:
            with writing(self._path):
                self._writer.write_table(table)
            self._count += table.num_rows
        self._rows, self._tables, self._bytes = [], [], 0


def merge_states(
    directory: Path, name: str, old: Iterable[str], changed: Iterable[pa.RecordBatch]
) -> tuple[StatesFile, int]:
    """Write a file with the changed states, followed by the other topics' states from the old files.

    Return the file and the number of changed states, which are its first rows.
    """
    writer = StatesWriter(directory, name)
    topics = []
    for batch in changed:
        table = pa.Table.from_batches([batch]).select(SCHEMA.names).cast(SCHEMA)
        topics.append(table["topic"].combine_chunks())
        writer.add_table(table)
    known = pa.concat_arrays([pa.array([], pa.string()), *topics])
    for path in old:
        for table in _row_groups(directory / path, SCHEMA.names):
            writer.add_table(table.filter(pc.invert(pc.is_in(table["topic"], value_set=known))))
    return writer.finish(), len(known)


def read_states(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file; one row group at a time is in memory."""
    for table in _row_groups(path, columns):
        yield from table.to_pylist()


def read_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield all columns of a file as Arrow batches, row group by row group."""
    for table in _row_groups(path, SCHEMA.names):
        yield from table.to_batches()


def _row_groups(path: Path, columns: Sequence[str]) -> Iterator[pa.Table]:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            is_old = has_old_names(file.metadata)
            for number in range(file.metadata.num_row_groups):
                table = file.read_row_group(number, columns=list(columns))
                yield _with_present_names(table) if is_old and "topic" in columns else table
    except (pa.ArrowException, OSError) as error:
        raise LakeError(
            f"{path} cannot be read: {error}; an aggregate over lake and log builds the table again"
        ) from None


def _with_present_names(table: pa.Table) -> pa.Table:
    """Return states from a file of an earlier version, with present topic names."""
    names = pa.array(map(present_topic, table["topic"].to_pylist()), pa.string())
    return table.set_column(table.schema.names.index("topic"), table.schema.field("topic"), names)


class Covered(NamedTuple):
    """The reducers and the end positions of all states in a table."""

    reducers: set[str]
    ends: Positions


class Totals(NamedTuple):
    """Statistics of a table's states."""

    topics: int
    messages: int
    incomplete: int
    failed: int
    first_failure: str


class StatesTable:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @classmethod
    def open(cls, directory: Path) -> Self | None:
        """Open the table; None if it can be created. Raise LakeError for other content. Changes nothing."""
        found = can_open(directory, _FORMAT_KEY, "states of Headrace")
        return cls(directory) if found else None

    @classmethod
    def make(cls, directory: Path) -> Self:
        properties = {
            _FORMAT_KEY: str(STATES_FORMAT),
            "delta.logRetentionDuration": _LOG_KEPT,
        }
        make_delta(directory, "headrace states", SCHEMA, properties)
        return cls(directory)

    def last(self, app: str) -> int | None:
        """Return the last number that this application has committed."""
        return DeltaTable(str(self._directory)).transaction_version(app)

    def replace(self, app: str, number: int, files: Sequence[StatesFile]) -> bool:
        """Make these files the whole table; return False, without a change, if the number is not new."""
        return commit_delta(self._directory, app, number, [_add(one) for one in files], None)

    def update(
        self, app: str, number: int, files: Sequence[StatesFile], replaced: Collection[str]
    ) -> bool:
        """Put these files in the place of `replaced`.

        Return False, without a change, if the number is already committed or if one of `replaced` is no
        longer in the table.
        """
        return commit_delta(self._directory, app, number, [_add(one) for one in files], replaced)

    def files(self) -> list[str]:
        added = pa.table(DeltaTable(str(self._directory)).get_add_actions(flatten=True))
        return list(added["path"].to_pylist())

    def rows(self) -> list[tuple[str, int]]:
        """Return the files and the number of states in each."""
        added = pa.table(DeltaTable(str(self._directory)).get_add_actions(flatten=True))
        return list(zip(added["path"].to_pylist(), added["num_records"].to_pylist(), strict=True))

    def buckets(self) -> tuple[int, dict[int, list[str]]]:
        """Return the number of buckets and the files of each bucket; (0, {}) for a table without files."""
        count, found = 0, dict[int, list[str]]()
        for path in self.files():
            named = _NAME.fullmatch(path)
            if named is None or count not in (0, int(named["count"])):
                raise LakeError(
                    f"{self._directory} was not written by this version ({path}): an aggregate over lake "
                    "and log builds it again"
                )
            count = int(named["count"])
            found.setdefault(int(named["bucket"]), []).append(path)
        return count, found

    def covered(self) -> Covered:
        found = Covered(set(), {})
        for table in self._columns("topic", "epoch", "offset", "ordinal", "reducer"):
            *places, reducers = (column.to_pylist() for column in table.columns)
            found.reducers.update(reducers)
            for topic, *place in zip(*places, strict=True):
                found.ends[topic] = Position(*place)
        return found

    def totals(self) -> Totals:
        topics = messages = incomplete = failed = 0
        first = ""
        for table in self._columns("topic", "messages", "complete", "error"):
            topics += table.num_rows
            messages += pc.sum(table["messages"]).as_py() or 0
            incomplete += pc.sum(pc.invert(table["complete"])).as_py() or 0
            bad = table.filter(pc.is_valid(table["error"])).select(["topic", "error"]).to_pylist()
            failed += len(bad)
            if bad and not first:
                first = f"topic {bad[0]['topic']!r}: {bad[0]['error']}"
        return Totals(topics, messages, incomplete, failed, first)

    def _columns(self, *names: str) -> Iterator[pa.Table]:
        for path in self.files():
            yield from _row_groups(self._directory / path, names)

    def sweep(self) -> None:
        """Delete files that the table has not named for a week, including leftovers of killed jobs."""
        sweep_delta(self._directory, _KEPT_S, _NAME, dry_run=False)


def _add(one: StatesFile) -> AddAction:
    return AddAction(
        path=one.path,
        size=one.bytes,
        partition_values={},
        modification_time=int(time.time() * 1000),
        data_change=True,
        stats=f'{{"numRecords": {one.rows}}}',
    )
