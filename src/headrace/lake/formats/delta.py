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
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.table import Metadata
from deltalake.transaction import AddAction, RemoveAction

from headrace.lake.files.writing import (
    DATED,
    Bounds,
    FileLayout,
    Statistics,
    Values,
    WrittenFile,
    make_directory,
    sync,
)
from headrace.lake.format import (
    DATE,
    DECODE_KEY,
    DECODED_KEY,
    FORMAT_KEY,
    LakeError,
    Oddity,
    Shape,
    check_format,
    check_path,
    in_a_sentence,
    not_ours,
    reads,
    writes,
)
from headrace.lake.manifests import HIDDEN

LOG = "_delta_log"
_BATCH_KEY = "headrace.batch"

_NOTES_LOOKED_AT = (10, 1000)
"""Numbers of commits to search for a batch's notes: the batch is nearly always one of the last."""

_OURS = re.compile(rf"(t-[0-9a-f]{{16}}/)?{DATED}")
"""Paths of files that Headrace writes."""

_SYNCED = 100
"""Number of commits that a job fsyncs when it starts: some may come from a job that was killed."""


class DeltaLake:
    """Implementation of `table.Table` for Delta."""

    kind = "delta"
    layout = FileLayout()
    _where = LOG

    def __init__(self, lake: Path, shape: Shape) -> None:
        self._lake = lake
        self.shape = shape

    @classmethod
    def open(cls, lake: Path) -> Self | None:
        """Open the Delta table; None if it does not exist. Raise LakeError if Headrace did not create it."""
        found = _metadata(lake, FORMAT_KEY, "a lake of Headrace")
        if found is None:
            return None
        decode, decoded = map(found.configuration.get, (DECODE_KEY, DECODED_KEY))
        with in_a_sentence(lake, LOG):
            return cls(lake, Shape.stored("topic" in found.partition_columns, decode, decoded))

    @classmethod
    def make(cls, lake: Path, shape: Shape) -> Self:
        columns = shape.columns.append(DATE)
        make_delta(lake, "headrace", columns, shape.properties, _partition(shape))
        return cls(lake, shape)

    @property
    @reads
    def id(self) -> str:
        return str(DeltaTable(str(self._lake)).metadata().id)

    @reads
    def last(self, app: str) -> int | None:
        return DeltaTable(str(self._lake)).transaction_version(app)

    @writes
    def commit(
        self,
        app: str,
        number: int,
        files: Sequence[WrittenFile],
        notes: Mapping[str, str],
        *,
        replaced: Collection[str] = (),
    ) -> bool:
        return commit_delta(
            self._lake,
            app,
            number,
            [_add(one, is_new=not replaced) for one in files],
            replaced,
            # Readers that follow the table must not see rows again that only move to another file.
            data_change=not replaced,
            partition=_partition(self.shape),
            notes=notes if replaced else {_BATCH_KEY: str(number), **notes},
        )

    @reads
    def notes(self, number: int) -> Mapping[str, str] | None:
        table = DeltaTable(str(self._lake))
        for limit in _NOTES_LOOKED_AT:
            for entry in table.history(limit):
                if entry.get(_BATCH_KEY) == str(number):
                    return {key: str(value) for key, value in entry.items()}
        return None

    @reads
    def all_notes(self) -> list[tuple[int, Mapping[str, str]]]:
        return [
            (int(entry[_BATCH_KEY]), {key: str(value) for key, value in entry.items()})
            for entry in DeltaTable(str(self._lake)).history()
            if str(entry.get(_BATCH_KEY)).isdigit()
        ]

    @reads
    def files(self) -> dict[str, int]:
        added = pa.table(DeltaTable(str(self._lake)).get_add_actions(flatten=True))
        return dict(zip(added["path"].to_pylist(), added["size_bytes"].to_pylist(), strict=True))

    @reads
    def files_of(self, topic: str, offset: int) -> list[str]:
        quoted = topic.replace("'", "''")
        found = DeltaTable(str(self._lake)).file_uris(
            file_pruning_predicate=f"topic = '{quoted}' and offset >= {offset}"
        )
        # The library returns addresses in its own form, but their last parts are our paths.
        depth = len(_partition(self.shape)) + 1
        return ["/".join(uri.split("/")[-depth:]) for uri in found]

    @reads
    def bounds(self) -> dict[str, Bounds]:
        added = pa.table(DeltaTable(str(self._lake)).get_add_actions(flatten=True))
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
        found = pa.schema(DeltaTable(str(self._lake)).schema().to_arrow())
        if found.equals(self.shape.columns.append(DATE)):
            return []
        return [Oddity("damaged", LOG, f"the table has other columns: {', '.join(found.names)}")]

    def shown(self, path: str) -> str:
        return path

    @writes
    def sweep(self, after_s: float, *, dry_run: bool) -> int:
        return sweep_delta(self._lake, after_s, _OURS, dry_run=dry_run)

    @writes
    def sync(self) -> None:
        _sync(self._lake, *sorted(one.name for one in (self._lake / LOG).glob("*.json"))[-_SYNCED:])


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
    return AddAction(
        path=one.path,
        size=one.bytes,
        partition_values=dict(one.partition),
        modification_time=int(time.time() * 1000),
        data_change=is_new,
        stats=_statistics(one.rows, one.statistics, one.partition),
    )


def _statistics(rows: int, found: Statistics, partition: Mapping[str, str]) -> str:
    least, most = found.least._asdict(), found.most._asdict()
    for name in partition:
        # The partition has these values, so they are left out of the file's statistics.
        least.pop(name, None)
        most.pop(name, None)
    return json.dumps(
        {
            "numRecords": rows,
            "minValues": least,
            "maxValues": most,
            "nullCount": dict.fromkeys(least, 0),
        },
        ensure_ascii=False,
    )


# Any Delta table of Headrace


def can_open(directory: Path, format_key: str, what: str) -> bool:
    """Return True if the directory has a table of `what`, False if one can be created there.

    Raise LakeError for a directory with other content. Changes nothing.
    """
    check_path(directory)
    if not directory.exists():
        return False
    if not directory.is_dir():
        raise LakeError(f"{directory} is not a directory: name a new or an empty one")
    if _metadata(directory, format_key, what) is not None:
        return True
    # A table whose creation was interrupted may have left these directories.
    others = {path.name for path in directory.iterdir()} - {HIDDEN, LOG}
    if others:
        raise not_ours(directory, min(others), what)
    return False


def make_delta(
    directory: Path,
    name: str,
    columns: pa.Schema,
    properties: Mapping[str, str],
    partition: Sequence[str] = (),
) -> None:
    make_directory(directory)
    with in_a_sentence(directory, LOG, writing=True):
        DeltaTable.create(
            str(directory),
            columns,
            mode="ignore",  # another process may have created it first
            partition_by=list(partition),
            name=name,
            configuration=dict(properties),
            raise_if_key_not_exists=False,
        )
        _sync(directory, *(path.name for path in (directory / LOG).glob("*.json")))


def commit_delta(
    directory: Path,
    app: str,
    number: int,
    added: Sequence[AddAction],
    replaced: Collection[str] | None = (),
    *,
    data_change: bool = True,
    partition: Sequence[str] = (),
    notes: Mapping[str, str] | None = None,
) -> bool:
    """Commit as `table.Table.commit` does. With None as `replaced`, replace all files of the table."""
    properties = CommitProperties(
        app_transactions=[Transaction(app, number)],
        max_commit_retries=0,
        custom_metadata=dict(notes or {}),
    )
    while True:
        table = DeltaTable(str(directory))
        last = table.transaction_version(app)
        if last is not None and last >= number:
            return False
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
        except CommitFailedError:
            continue  # another commit came first: check again whether ours is still needed
        _sync(directory, f"{table.version():020}.json")
        return True


def sweep_delta(directory: Path, after_s: float, ours: re.Pattern[str], *, dry_run: bool) -> int:
    """Delete files of ours that the table has not named for `after_s` seconds, or only count them."""
    unnamed = DeltaTable(str(directory)).vacuum(
        -int(-after_s // 3600),
        dry_run=True,  # a real vacuum would also delete foreign files in the directory
        enforce_retention_duration=False,
        full=True,  # also list files that no commit has ever named
    )
    found = [path for path in unnamed if ours.fullmatch(path)]
    for path in found if not dry_run else ():
        (directory / path).unlink(missing_ok=True)
    return len(found)


def _metadata(directory: Path, format_key: str, what: str) -> Metadata | None:
    """Return the metadata of a table of `what`; None without a table. Raise LakeError for another table."""
    with in_a_sentence(directory, LOG):
        try:
            found = DeltaTable(str(directory)).metadata()
        except TableNotFoundError:
            return None
        number = found.configuration.get(format_key)
        if number is None or not number.isdigit():
            raise not_ours(directory, "a Delta table of others", what)
        check_format(int(number), str(directory))
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


def _sync(directory: Path, *commits: str) -> None:
    for name in commits:
        sync(directory / LOG / name)
    sync(directory / LOG)
    sync(directory)
