"""A lake as a Delta table: each commit counts once, despite other writers; any Delta reader can read it.

The functions below the class do the same for other Delta tables that Headrace makes.

The library accepts an application's number again, even a smaller one, if the table object was opened after
the number was committed. Therefore the object that makes the commit is asked for the last number, and the
library must not retry: a commit of another writer in between makes ours fail, and we check again.
"""

import json
import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.table import Metadata
from deltalake.transaction import AddAction, RemoveAction

from headrace.lake.files.writing import (
    DATED,
    Bounds,
    FileLayout,
    Values,
    WrittenFile,
)
from headrace.lake.format import (
    DATE,
    DECODE_KEY,
    DECODED_KEY,
    FORMAT_KEY,
    Committed,
    LakeError,
    Oddity,
    Shape,
    check_format,
    in_a_sentence,
    not_ours,
    plain,
    reads,
    writes,
)
from headrace.lake.storage.storage import HIDDEN, DirectoryStorage, Storage, check_links

LOG = "_delta_log"

_REFUSALS_MAX = 3
"""Number of times that a commit may fail in a row although nobody else has committed."""

_CHECKPOINT_EVERY = 10
"""Number of commits after which a table in object storage gets a checkpoint. Opening it reads those since."""

_OURS = re.compile(rf"(t-[0-9a-f]{{16}}/)?{DATED}")
"""Paths of files that Headrace writes."""

_SYNCED = 100
"""Number of commits that a job fsyncs when it starts: some may come from a job that was killed."""


class DeltaLake:
    """Implementation of `table.Table` for Delta."""

    kind = "delta"
    layout = FileLayout()
    _where = LOG

    def __init__(self, storage: Storage, shape: Shape) -> None:
        self._storage = storage
        self.shape = shape

    @classmethod
    def open(cls, storage: Storage) -> Self | None:
        """Open the Delta table; None if it does not exist. Raise LakeError if Headrace did not create it."""
        found = _metadata(storage, FORMAT_KEY, "a lake of Headrace")
        if found is None:
            return None
        decode, decoded = map(found.configuration.get, (DECODE_KEY, DECODED_KEY))
        with in_a_sentence(storage, LOG):
            return cls(storage, Shape.stored("topic" in found.partition_columns, decode, decoded))

    @classmethod
    def make(cls, storage: Storage, shape: Shape) -> None:
        columns = shape.columns.append(DATE)
        make_delta(storage, "headrace", columns, shape.properties, _partition(shape))

    @property
    @reads
    def id(self) -> str:
        return str(open_delta(self._storage).metadata().id)

    @reads
    def last(self, app: str) -> Committed | None:
        return Committed.find(app, open_delta(self._storage).transaction_version)

    @writes
    def commit(
        self,
        app: str,
        number: int,
        files: Sequence[WrittenFile],
        token: int,
        *,
        replaced: Collection[str] = (),
    ) -> bool:
        return commit_delta(
            self._storage,
            app,
            Committed(number, token),
            [_add(one, is_new=not replaced) for one in files],
            replaced,
            # Readers that follow the table must not see rows again that only move to another file.
            data_change=not replaced,
            partition=_partition(self.shape),
        )

    @reads
    def files(self) -> dict[str, int]:
        added = pa.table(open_delta(self._storage).get_add_actions(flatten=True))
        return dict(zip(added["path"].to_pylist(), added["size_bytes"].to_pylist(), strict=True))

    @reads
    def files_of(self, topic: str, offset: int) -> list[str]:
        quoted = topic.replace("'", "''")
        found = open_delta(self._storage).file_uris(
            file_pruning_predicate=f"topic = '{quoted}' and offset >= {offset}"
        )
        # The library returns addresses in its own form, but their last parts are our paths.
        depth = len(_partition(self.shape)) + 1
        return ["/".join(uri.split("/")[-depth:]) for uri in found]

    @reads
    def bounds(self) -> dict[str, Bounds]:
        added = pa.table(open_delta(self._storage).get_add_actions(flatten=True))
        found = {name: _as_numbers(added[name]) for name in added.column_names}
        names = {"rows": ("num_records",) * 2}
        names |= {name: (f"min.{name}", f"max.{name}") for name in Values._fields}
        names |= {name: (f"partition.{name}",) * 2 for name in _partition(self.shape)}
        nothing = [None] * len(added)
        return {
            path: {
                name: (found.get(least, nothing)[row], found.get(most, nothing)[row])
                for name, (least, most) in names.items()
            }
            for row, path in enumerate(found["path"])
        }

    @reads
    def oddities(self) -> list[Oddity]:
        found = pa.schema(open_delta(self._storage).schema().to_arrow())
        if found.equals(self.shape.columns.append(DATE)):
            return []
        return [Oddity("damaged", LOG, f"the table has other columns: {', '.join(found.names)}")]

    def shown(self, path: str) -> str:
        return path

    @writes
    def sweep(self, after_s: float, *, dry_run: bool) -> int:
        return sweep_delta(self._storage, after_s, _OURS, dry_run=dry_run)

    @writes
    def sync(self) -> None:
        _sync(self._storage, open_delta(self._storage).version())


def _partition(shape: Shape) -> list[str]:
    return ["topic", "date"] if shape.by_topic else ["date"]


def _as_numbers(column: pa.ChunkedArray) -> list[Any]:
    """Return a column's values, with times in microseconds and dates in days."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", "UTC")).cast(pa.int64())
    elif pa.types.is_date32(column.type):
        column = column.cast(pa.int32())
    return list(column.to_pylist())


def _add(one: WrittenFile, *, is_new: bool = True) -> AddAction:
    # The partition has some of these values, so they are left out of the file's statistics.
    least, most = (
        {name: value for name, value in some._asdict().items() if name not in one.partition}
        for some in one.statistics
    )
    statistics = {"minValues": least, "maxValues": most, "nullCount": dict.fromkeys(least, 0)}
    return add_action(one.path, one.bytes, one.rows, statistics, one.partition, is_new=is_new)


# Any Delta table of Headrace


def open_delta(storage: Storage) -> DeltaTable:
    """Open a table; raise TableNotFoundError if there is none."""
    return storage.repeat(
        lambda: DeltaTable(storage.address, storage_options=dict(storage.table_options))
    )


def add_action(
    path: str,
    size: int,
    rows: int,
    statistics: Mapping[str, object] = {},
    partition: Mapping[str, str] = {},
    *,
    is_new: bool = True,
) -> AddAction:
    return AddAction(
        path=path,
        size=size,
        partition_values=dict(partition),
        modification_time=int(time.time() * 1000),
        data_change=is_new,
        stats=json.dumps({"numRecords": rows, **statistics}, ensure_ascii=False),
    )


def can_open(storage: Storage, format_key: str, what: str) -> bool:
    """Return True if the place has a table of `what`, False if one can be created there.

    Raise LakeError for a place with other content. Changes nothing.
    """
    if not storage.exists():
        return False
    if _metadata(storage, format_key, what) is not None:
        return True
    # A table whose creation was interrupted may have left these directories.
    others = storage.top() - {HIDDEN, LOG}
    if others:
        raise not_ours(storage.address, min(others), what)
    return False


def make_delta(
    storage: Storage,
    name: str,
    columns: pa.Schema,
    properties: Mapping[str, str],
    partition: Sequence[str] = (),
) -> None:
    storage.prepare()
    check_links(storage, "delta")  # the library gives each commit its name by a link
    with in_a_sentence(storage, LOG, writing=True):
        DeltaTable.create(
            storage.address,
            columns,
            mode="ignore",  # another process may have created it first
            partition_by=list(partition),
            name=name,
            configuration={**properties, **_of_objects(storage)},
            storage_options=dict(storage.table_options),
            raise_if_key_not_exists=False,
        )
        _sync(storage, open_delta(storage).version())


def _of_objects(storage: Storage) -> dict[str, str]:
    """Return properties for a table in object storage, where reading a commit takes several requests."""
    if isinstance(storage, DirectoryStorage):
        return {}
    return {"delta.checkpointInterval": str(_CHECKPOINT_EVERY)}


def commit_delta(
    storage: Storage,
    app: str,
    wanted: Committed,
    added: Sequence[AddAction],
    replaced: Collection[str] | None = (),
    *,
    data_change: bool = True,
    partition: Sequence[str] = (),
) -> bool:
    """Commit as `table.Table.commit` does. With None as `replaced`, replace all files of the table."""
    numbers = wanted.numbers(app).items()
    properties = CommitProperties(
        app_transactions=[Transaction(name, number) for name, number in numbers],
        max_commit_retries=0,
    )
    refusals, version = 0, -1
    while True:
        table = open_delta(storage)
        last = Committed.find(app, table.transaction_version)
        if last is not None and last.number >= wanted.number:
            # An attempt whose outcome was unknown may have succeeded.
            _sync(storage, table.version())
            return last == wanted
        refusals = refusals + 1 if table.version() == version else 0
        version = table.version()
        removed = _removed(table, replaced or (), data_change=data_change)
        if removed is None:
            return False  # else the library removes them twice and doubles their rows
        try:
            table.create_write_transaction(
                [*removed, *added],
                "append" if replaced is not None else "overwrite",
                table.schema(),
                list(partition),
                commit_properties=properties,
            )
        except (DeltaError, OSError) as error:
            # Either another commit came first, or the outcome is unknown: look again.
            if refusals == _REFUSALS_MAX:
                raise storage.failure(error, LOG) or LakeError(
                    f"{storage.file(LOG)} cannot be written to: {plain(error)}"
                ) from error
            continue
        # The library leaves the table object at the version before.
        _sync(storage, version + 1, count=1)
        return True


def sweep_delta(storage: Storage, after_s: float, ours: re.Pattern[str], *, dry_run: bool) -> int:
    """Delete files of ours that the table has not named for `after_s` seconds, or only count them."""
    table = open_delta(storage)
    unnamed = storage.repeat(
        lambda: table.vacuum(
            -int(-after_s // 3600),
            dry_run=True,  # a real vacuum would also delete foreign files in the directory
            enforce_retention_duration=False,
            full=True,  # also list files that no commit has ever named
        )
    )
    found = [path for path in unnamed if ours.fullmatch(path)]
    if not dry_run:
        storage.delete(found)
    return len(found)


def _metadata(storage: Storage, format_key: str, what: str) -> Metadata | None:
    """Return the metadata of a table of `what`; None without a table. Raise LakeError for another table."""
    with in_a_sentence(storage, LOG):
        try:
            found = open_delta(storage).metadata()
        except TableNotFoundError:
            return None
        number = found.configuration.get(format_key)
        if number is None or not number.isdigit():
            raise not_ours(storage.address, "a Delta table of others", what)
        check_format(int(number), storage.address)
        return found


def _removed(
    table: DeltaTable, paths: Collection[str], *, data_change: bool
) -> list[RemoveAction] | None:
    """Return actions that remove these files from a table; None unless it contains all of them."""
    if not paths:
        return []
    known = pa.table(table.get_add_actions())
    names = {"path", "size_bytes", "partition"} & set(known.column_names)
    live = {row["path"]: row for row in known.select(sorted(names)).to_pylist()}
    if not live.keys() >= set(paths):
        return None
    return [
        RemoveAction(
            path,
            data_change=data_change,
            deletion_timestamp=int(time.time() * 1000),
            size=live[path]["size_bytes"],
            partition_values={
                name: str(value) for name, value in (live[path].get("partition") or {}).items()
            },
        )
        for path in paths
    ]


def _sync(storage: Storage, version: int, count: int = _SYNCED) -> None:
    """Make the commits up to a version durable, as many as `count`, with the checkpoints after them."""
    names = [f"{LOG}/{one:020}" for one in range(max(0, version + 1 - count), version + 1)]
    written = [f"{name}{suffix}" for name in names for suffix in (".json", ".checkpoint.parquet")]
    storage.sync([*written, f"{LOG}/_last_checkpoint"])
