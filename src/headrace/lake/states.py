"""A Delta table with one state per topic. A commit counts once, and replaces all states or some buckets.

Topics are divided into buckets. Each bucket is one file, whose name contains its number and the number of
buckets. To change states, one commit adds a new file for each of their buckets and removes the old ones.
"""

import re
import uuid
import zlib
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.lake.format import (
    FORMAT,
    NAMES_KEY,
    Committed,
    LakeError,
    Positions,
    has_old_names,
    present_topic,
    reads,
    token_of,
    writes,
    writing,
)
from headrace.lake.formats.delta import (
    LOG,
    add_action,
    can_open,
    commit_delta,
    make_delta,
    open_delta,
    sweep_delta,
)
from headrace.lake.storage.storage import LakeFile, Storage
from headrace.model import Position, legacy_name

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
_GROUP_ROWS = 65_536
"""Limits of a row group, which is written and read at once."""

_KEPT_S = 7 * 86_400.0
"""Time that files stay after the table has dropped them, because readers may still use them."""

_LOG_KEPT = "interval 1 days"
"""Time that commits stay when they are no longer needed to open the table: there may be one every second."""

_NAME = re.compile(r"\d{8}-(?P<bucket>\d{4})-of-(?P<count>\d{4})-[0-9a-f]{12}\.parquet")


def name_of(number: int, bucket: int, count: int) -> str:
    """Return a new unique name for a file of states, which contains its bucket."""
    return f"{number:08}-{bucket:04}-of-{count:04}-{uuid.uuid4().hex[:12]}.parquet"


def bucket_of(topic: str, count: int) -> int:
    return zlib.crc32(legacy_name(topic).encode()) % count


class Buckets(NamedTuple):
    """The buckets of a table that a job changes. Each has a place among them, from 0 on."""

    total: int
    """Number of all buckets of the table."""
    changed: tuple[int, ...]

    @classmethod
    def of(cls, total: int, topics: Iterable[str]) -> Self:
        return cls(total, tuple(sorted({bucket_of(topic, total) for topic in topics})))

    def place(self, topic: str) -> int:
        bucket = bucket_of(topic, self.total)
        place = bisect_left(self.changed, bucket)
        assert self.changed[place : place + 1] == (bucket,), f"{topic!r} is in none of the buckets"
        return place


class StatesFile(NamedTuple):
    """A file that is durable, but not in the table yet."""

    path: str
    bytes: int
    rows: int


class StatesWriter:
    """Writer of one file of states, which vanishes unless it is finished.

    It limits what it collects in memory, because a state may be large.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self._target = storage.file(name)
        self._file = storage.new_file(name)
        with writing(self._target):
            self._writer = pq.ParquetWriter(
                self._file.content, SCHEMA, store_schema=False, write_page_checksum=True
            )
        self._rows: list[dict[str, Any]] = []
        self._tables: list[pa.Table] = []
        self._bytes = self._gathered = self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *given: object) -> None:
        with suppress(OSError, ValueError):  # there was another error before
            self._writer.close()
        self._file.discard()

    def add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        self._added(1, len(row["state"]))

    def copy(self, file: LakeFile, without: Collection[str]) -> None:
        """Add the states of another file, except those of some topics."""
        topics = pa.array(without, pa.string())
        for table in _row_groups(file, SCHEMA.names):
            others = table.filter(pc.invert(pc.is_in(table["topic"], value_set=topics)))
            self._tables.append(others)
            self._added(others.num_rows, others.nbytes)

    def finish(self) -> StatesFile:
        self._write()
        self._writer.add_key_value_metadata({NAMES_KEY: str(FORMAT)})
        with writing(self._target):
            self._writer.close()
            size = self._file.keep(self._target.path)
        return StatesFile(self._target.path, size, self._count)

    def _added(self, rows: int, size: int) -> None:
        self._gathered += rows
        self._bytes += size
        if self._bytes >= _GROUP_BYTES or self._gathered >= _GROUP_ROWS:
            self._write()

    def _write(self) -> None:
        table = pa.concat_tables([pa.Table.from_pylist(self._rows, SCHEMA), *self._tables])
        if table.num_rows:
            with writing(self._target):
                self._writer.write_table(table)
            self._count += table.num_rows
        self._rows, self._tables, self._bytes, self._gathered = [], [], 0, 0


def read_states(
    file: LakeFile, columns: Sequence[str], topics: Collection[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, or only those of some topics; one row group at a time is in memory."""
    wanted = pa.array(topics, pa.string()) if topics is not None else None
    for table in _row_groups(file, columns):
        is_all = wanted is None
        some = table if is_all else table.filter(pc.is_in(table["topic"], value_set=wanted))
        yield from some.to_pylist()


def _row_groups(file: LakeFile, columns: Sequence[str]) -> Iterator[pa.Table]:
    try:
        with (
            file.open() as source,
            pq.ParquetFile(source, page_checksum_verification=True) as parquet,
        ):
            is_old = has_old_names(parquet.metadata)
            for number in range(parquet.metadata.num_row_groups):
                table = parquet.read_row_group(number, columns=list(columns))
                yield _with_present_names(table) if is_old and "topic" in columns else table
    except (pa.ArrowException, OSError) as error:
        raise LakeError(
            f"{file} cannot be read: {error}; an aggregate over lake and log builds the table again"
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

    topics: int = 0
    messages: int = 0
    incomplete: int = 0
    failed: int = 0
    first_failure: str = ""


class StatesTable:
    _where = LOG

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    @classmethod
    def open(cls, storage: Storage) -> Self | None:
        """Open the table; None if it can be created. Raise LakeError for other content. Changes nothing."""
        found = can_open(storage, _FORMAT_KEY, "states of Headrace")
        return cls(storage) if found else None

    @classmethod
    def make(cls, storage: Storage) -> Self:
        properties = {
            _FORMAT_KEY: str(STATES_FORMAT),
            "delta.logRetentionDuration": _LOG_KEPT,
        }
        make_delta(storage, "headrace states", SCHEMA, properties)
        return cls(storage)

    @reads
    def last(self, app: str) -> int | None:
        """Return the last number that this application has committed."""
        return open_delta(self._storage).transaction_version(app)

    def replace(self, app: str, number: int, files: Sequence[StatesFile]) -> bool:
        """Make these files the whole table; return False, without a change, if the number is not new."""
        return self.update(app, number, files, None)

    @writes
    def update(
        self,
        app: str,
        number: int,
        files: Sequence[StatesFile],
        replaced: Collection[str] | None,
    ) -> bool:
        """Put these files in the place of `replaced`, or of all files if that is None.

        Return False, without a change, if the number is already committed or if one of `replaced` is no
        longer in the table.
        """
        wanted = Committed(number, token_of(one.path for one in files))
        added = [add_action(*one) for one in files]
        return commit_delta(self._storage, app, wanted, added, replaced)

    def files(self) -> list[str]:
        return [path for path, _ in self.rows()]

    @reads
    def rows(self) -> list[tuple[str, int]]:
        """Return the files and the number of states in each."""
        added = pa.table(open_delta(self._storage).get_add_actions(flatten=True))
        return list(zip(added["path"].to_pylist(), added["num_records"].to_pylist(), strict=True))

    def buckets(self) -> tuple[int, dict[int, list[str]]]:
        """Return the number of buckets and the files of each bucket; (0, {}) for a table without files."""
        count, found = 0, dict[int, list[str]]()
        for path in self.files():
            named = _NAME.fullmatch(path)
            if named is None or count not in (0, int(named["count"])):
                raise LakeError(
                    f"{self._storage.address} was not written by this version ({path}): an aggregate over "
                    "lake and log builds it again"
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
            yield from _row_groups(self._storage.file(path), names)

    @writes
    def sweep(self) -> None:
        """Delete files that the table has not named for a week, including leftovers of killed jobs."""
        sweep_delta(self._storage, _KEPT_S, _NAME, dry_run=False)
