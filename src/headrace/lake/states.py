"""A Delta table of states, one for each topic: replaced as a whole by every commit, which counts once."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction

from headrace.lake.delta import LOG
from headrace.lake.format import LakeError, check_format
from headrace.lake.manifests import HIDDEN
from headrace.lake.syncing import make_directory, sync

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
_KEPT_HOURS = 7 * 24
"""How long files stay that the table no longer names: someone may still read them."""


class StatesFile(NamedTuple):
    """A file that is on disk, and that nobody knows of yet."""

    path: str
    bytes: int
    rows: int


class StatesWriter:
    """One file of states: some are gathered before they are written, as each may be large."""

    def __init__(self, directory: Path, name: str) -> None:
        self._path = directory / name
        self._writer = pq.ParquetWriter(self._path, SCHEMA, store_schema=False)
        self._rows: list[dict[str, Any]] = []
        self._bytes = self._count = 0

    def add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        self._bytes += len(row["state"])
        if self._bytes >= _GROUP_BYTES:
            self._write()

    def finish(self) -> StatesFile:
        self._write()
        self._writer.close()
        sync(self._path)
        sync(self._path.parent)
        return StatesFile(self._path.name, self._path.stat().st_size, self._count)

    def _write(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, SCHEMA))
            self._count += len(self._rows)
            self._rows, self._bytes = [], 0


def read_states(path: Path, columns: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """The rows of a file, a row group at a time."""
    with pq.ParquetFile(path) as file:
        for number in range(file.metadata.num_row_groups):
            yield file.read_row_group(number, columns=list(columns)).to_pylist()


class StatesTable:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @classmethod
    def open(cls, directory: Path) -> Self | None:
        """None where one can be made; a directory of something else is refused. Changes nothing."""
        if not directory.exists():
            return None
        if not directory.is_dir():
            raise LakeError(f"{directory} is no directory: name a new or an empty one")
        try:
            table = DeltaTable(str(directory))
        except TableNotFoundError:
            # One that was left while it was made has a part of these.
            others = sorted({path.name for path in directory.iterdir()} - {HIDDEN, LOG})
            if others:
                raise _not_ours(directory, others[0]) from None
            return None
        except DeltaError as error:
            raise LakeError(f"{directory} cannot be read as a Delta table: {error}") from None
        number = table.metadata().configuration.get(_FORMAT_KEY)
        if number is None or not number.isdigit():
            raise _not_ours(directory, "a Delta table of something else")
        check_format(int(number), str(directory))
        return cls(directory)

    @classmethod
    def make(cls, directory: Path) -> Self:
        make_directory(directory)
        DeltaTable.create(
            str(directory),
            SCHEMA,
            mode="ignore",  # someone may have been faster
            name="headrace states",
            configuration={_FORMAT_KEY: str(STATES_FORMAT)},
            raise_if_key_not_exists=False,
        )
        made = cls(directory)
        made._sync()
        return made

    def last(self, app: str) -> int | None:
        """The last number that this application has committed."""
        return DeltaTable(str(self._directory)).transaction_version(app)

    def replace(self, app: str, number: int, files: Sequence[StatesFile]) -> bool:
        """Make these files the table; False when the number was committed before: nothing has changed then.

        As in `delta.py`, the number is asked of the very object that commits.
        """
        actions: list[Any] = [_add(one) for one in files]
        properties = CommitProperties(
            app_transactions=[Transaction(app, number)], max_commit_retries=0
        )
        while True:
            table = DeltaTable(str(self._directory))
            last = table.transaction_version(app)
            if last is not None and last >= number:
                return False
            try:
                table.create_write_transaction(
                    actions, "overwrite", table.schema(), [], commit_properties=properties
                )
            except CommitFailedError:
                continue  # someone was faster: whether we are still to do it has to be looked at again
            self._sync()
            return True

    def files(self) -> list[str]:
        added = pa.table(DeltaTable(str(self._directory)).get_add_actions(flatten=True))
        found: list[str] = added["path"].to_pylist()
        return found

    def sweep(self) -> None:
        """Delete what the table has not named for a week, also what killed jobs have left."""
        table = DeltaTable(str(self._directory))
        if table.vacuum(_KEPT_HOURS, full=True):
            table.vacuum(_KEPT_HOURS, dry_run=False, full=True)

    def _sync(self) -> None:
        newest = sorted((self._directory / LOG).glob("*.json"))[-1:]
        for path in (*newest, self._directory / LOG, self._directory):
            sync(path)


def _not_ours(directory: Path, what: str) -> LakeError:
    return LakeError(
        f"{directory} holds something else than states of Headrace ({what}): name a new or an empty "
        "directory"
    )


def _add(one: StatesFile) -> AddAction:
    return AddAction(
        path=one.path,
        size=one.bytes,
        partition_values={},
        modification_time=int(time.time() * 1000),
        data_change=True,
        stats=f'{{"numRecords": {one.rows}}}',
    )
