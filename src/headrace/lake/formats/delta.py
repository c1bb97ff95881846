"""A lake as a Delta table: commits that count once, whoever else writes; readable by all who read Delta.

The library takes a number of an application again, even a smaller one, from a table that was opened after it
was committed. So the last number is asked of the very object that commits, and nothing is tried again by
itself: a commit of someone else in between fails ours, and we look again.
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
from headrace.lake.format import DATE, FORMAT, LakeError, Oddity, Shape, check_format
from headrace.lake.sorted_file import DATED
from headrace.lake.syncing import make_directory, sync
from headrace.lake.trouble import in_a_sentence, reads, writes
from headrace.lake.writing import Bounds, Layout, Statistics, Values, Written

LOG = "_delta_log"
_FORMAT_KEY = "headrace.format"
_DECODE_KEY = "headrace.decode"
_DECODED_KEY = "headrace.decoded"
_BATCH_KEY = "headrace.batch"

_NOTES_LOOKED_AT = (10, 1000)
"""How many commits are searched for a batch's notes: it is nearly always one of the last."""

_OURS = re.compile(rf"(t-[0-9a-f]{{16}}/)?{DATED}")
"""Paths of files that are written here."""

_SYNCED = 100
"""Commits that a job has synced when it starts: some of them may be of one that was killed."""


class DeltaLake:
    """Implements `table.Table`."""

    kind = "delta"
    layout = Layout()
    _where = LOG

    def __init__(self, lake: Path, shape: Shape) -> None:
        self._lake = lake
        self.shape = shape

    @classmethod
    def open(cls, lake: Path) -> Self | None:
        """None where there is no Delta table; one that we have not made is refused."""
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
                mode="ignore",  # someone may have been faster
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
        files: Sequence[Written],
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
                return False  # the library would take them out twice, and their rows be there twice
            try:
                table.create_write_transaction(
                    [*removed, *added],
                    "append",
                    table.schema(),
                    _partition(self.shape),
                    commit_properties=properties,
                )
            except CommitFailedError:
                continue  # someone was faster: whether we are still to do it has to be looked at again
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
        # Addresses of files, however the library writes them: their ends are ours.
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
            dry_run=True,  # it would delete whatever else lies in the directory, too
            enforce_retention_duration=False,
            full=True,  # also what no commit has ever named
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
    """Times in microseconds and dates in days."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", "UTC")).cast(pa.int64())
    elif pa.types.is_date32(column.type):
        column = column.cast(pa.int32())
    return list(column.to_pylist())


def _removed(table: DeltaTable, paths: Collection[str]) -> list[Any] | None:
    """What takes files out of a table; None unless all of them are in it."""
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


def _add(one: Written, *, is_new: bool = True) -> AddAction:
    return AddAction(
        path=one.path,
        size=one.bytes,
        partition_values=dict(one.partition),
        modification_time=int(time.time() * 1000),
        data_change=is_new,  # else those who follow the table would see its rows again
        stats=_statistics(one.rows, one.statistics, one.partition),
    )


def _statistics(rows: int, found: Statistics, partition: Mapping[str, str]) -> str:
    least, most = found.least._asdict(), found.most._asdict()
    for name in partition:
        # Their values are told apart from those in files.
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
