"""A Delta table to which a streaming query appends each batch once; for `foreachBatch`.

Spark writes Parquet files into the table's directory. The driver commits them together with the batch's
number.
"""

import json
import time
import uuid
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.transaction import AddAction, CommitProperties, Transaction


def write_files(frame: Any, table: Path) -> Path:
    """Write the batch as files that no reader of the table sees yet."""
    made = table / f"files-{uuid.uuid4()}"
    frame.write.parquet(str(made))
    return made


def commit(table: Path, made: Path, app: str, batch: int) -> None:
    files = sorted(made.glob("*.parquet"))
    actions = [
        AddAction(
            path=str(path.relative_to(table)),
            size=path.stat().st_size,
            partition_values={},
            modification_time=int(time.time() * 1000),
            data_change=True,
            stats=json.dumps({"numRecords": pq.read_metadata(path).num_rows}),
        )
        for path in files
    ]
    schema = pq.read_schema(files[0]).remove_metadata()
    if not DeltaTable.is_deltatable(str(table)):
        DeltaTable.create(str(table), schema)
    properties = CommitProperties(app_transactions=[Transaction(app, batch)])
    found = DeltaTable(str(table))
    found.create_write_transaction(actions, "append", found.schema(), commit_properties=properties)


def is_committed(table: Path, app: str, batch: int) -> bool:
    if not DeltaTable.is_deltatable(str(table)):
        return False
    last = DeltaTable(str(table)).transaction_version(app)
    return last is not None and last >= batch
