"""A lake as a Delta table: each commit counts once, despite other writers; any Delta reader can read it.

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

from headrace.lake.columns import columns_text, parse_columns
from headrace.lake.errors import in_a_sentence, reads, writes
from headrace.lake.files.durable import make_directory, sync
from headrace.lake.files.writing import DATED, Bounds, FileLayout, Statistics, Values, WrittenFile
from headrace.lake.format import (
    DATE,
    FORMAT,
    LakeError,
    Oddity,
    Shape,
    check_format,
    check_path,
)
from headrace.lake.manifests import HIDDEN

LOG = "_delta_log"
_FORMAT_KEY = "headrace.format"
_DECODE_KEY = "headrace.decode"
_DECODED_KEY = "headrace.decoded"
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
        with in_a_sentence(lake, LOG):
            try:
                metadata = DeltaTable(str(lake)).metadata()
            except TableNotFoundError:
                return None
            number = metadata.configuration.get(_FORMAT_KEY)
            if number is None or not number.isdigit():
                raise LakeError(
                    f"{lake} holds something else than a lake of Headrace (a Delta table of others): name "
                    "a new or an empty directory"
                )
            check_format(int(number), str(lake))
            return cls(lake, _shape(metadata))

    @classmethod
    def make(cls, lake: Path, shape: Shape) -> Self:
        make_directory(lake)
        with in_a_sentence(lake, LOG, writing=True):
            DeltaTable.create(
                str(lake),
                shape.columns.append(DATE),
                mode="ignore",  # another process may have created it first
                partition_by=_partition(shape),
                name="headrace",
                configuration={
                    _FORMAT_KEY: str(FORMAT),
                    _DECODE_KEY: shape.decode,
                    _DECODED_KEY: columns_text(shape.decoded),
                },
                raise_if_key_not_exists=False,
            )
        made = cls(lake, shape)
        made.sync()
        return made

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
        added = [_add(one, is_new=not replaced) for one in files]
        batch = {} if replaced else {_BATCH_KEY: str(number)}
        properties = CommitProperties(
            app_transactions=[Transaction(app, number)],
            max_commit_retries=0,
            custom_metadata={**batch, **notes},
        )
        while True:
            table = DeltaTable(str(self._lake))
            last = table.transaction_version(app)
            if last is not None and last >= number:
                return False
            removed = _removed(table, replaced)
            if removed is None:
                return False  # else the library removes them twice and doubles their rows
            try:
                table.create_write_transaction(
                    [*removed, *added],
                    "append",
                    table.schema(),
                    _partition(self.shape),
                    commit_properties=properties,
                )
            except CommitFailedError:
                continue  # another commit came first: check again whether ours is still needed
            self._sync(f"{table.version():020}.json")
            return True

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
        unnamed = DeltaTable(str(self._lake)).vacuum(
            -int(-after_s // 3600),
            dry_run=True,  # a real vacuum would also delete foreign files in the directory
            enforce_retention_duration=False,
            full=True,  # also list files that no commit has ever named
        )
        ours = [path for path in unnamed if _OURS.fullmatch(path)]
        for path in ours if not dry_run else ():
            (self._lake / path).unlink(missing_ok=True)
        return len(ours)

    @writes
    def sync(self) -> None:
        self._sync(*sorted(path.name for path in (self._lake / LOG).glob("*.json"))[-_SYNCED:])

    def _sync(self, *names: str) -> None:
        for name in names:
            sync(self._lake / LOG / name)
        sync(self._lake / LOG)
        sync(self._lake)


def _shape(found: Metadata) -> Shape:
    text = found.configuration.get(_DECODED_KEY)
    return Shape(
        "topic" in found.partition_columns,
        found.configuration.get(_DECODE_KEY) or "",
        parse_columns(text) if text else pa.schema([]),
    )


def _partition(shape: Shape) -> list[str]:
    return ["topic", "date"] if shape.by_topic else ["date"]


def _as_numbers(column: pa.ChunkedArray) -> list[Any]:
    """Return a column's values, with times in microseconds and dates in days."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", "UTC")).cast(pa.int64())
    elif pa.types.is_date32(column.type):
        column = column.cast(pa.int32())
    return list(column.to_pylist())


def _removed(table: DeltaTable, paths: Collection[str]) -> list[Any] | None:
    """Return actions that remove these files from a table; None unless it contains all of them."""
    if not paths:
        return []
    known = pa.table(table.get_add_actions()).select(["path", "size_bytes", "partition"])
    live = {row["path"]: row for row in known.to_pylist()}
    if not live.keys() >= set(paths):
        return None
    return [
        RemoveAction(
            path,
            data_change=False,
            deletion_timestamp=int(time.time() * 1000),
            size=live[path]["size_bytes"],
            partition_values={name: str(value) for name, value in live[path]["partition"].items()},
        )
        for path in paths
    ]


def _add(one: WrittenFile, *, is_new: bool = True) -> AddAction:
    return AddAction(
        path=one.path,
        size=one.bytes,
        partition_values=dict(one.partition),
        modification_time=int(time.time() * 1000),
        data_change=is_new,  # otherwise readers that follow the table would see the rows again
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


def open_ours(directory: Path, format_key: str, what: str) -> bool:
    """Return True if the directory has such a table, False if one can be created there.

    Raise LakeError for a directory with other content. Changes nothing.
    """
    check_path(directory)
    if not directory.exists():
        return False
    if not directory.is_dir():
        raise LakeError(f"{directory} is no directory: name a new or an empty one")
    with in_a_sentence(directory, LOG):
        try:
            number = DeltaTable(str(directory)).metadata().configuration.get(format_key)
        except TableNotFoundError:
            # A table whose creation was interrupted may have left these directories.
            others = sorted({path.name for path in directory.iterdir()} - {HIDDEN, LOG})
            if others:
                raise _not_ours(directory, what, others[0]) from None
            return False
    if number is None or not number.isdigit():
        raise _not_ours(directory, what, "a Delta table of something else")
    check_format(int(number), str(directory))
    return True


def _not_ours(directory: Path, what: str, found: str) -> LakeError:
    return LakeError(
        f"{directory} holds something else than {what} ({found}): name a new or an empty directory"
    )
