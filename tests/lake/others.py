"""A lake as other programs read it: with the library of its format, or by reading all its files."""

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable

from headrace.lake.format import DATE, SCHEMA

KINDS = ("delta", "parquet", "iceberg")


def seen_by_others(lake: Path) -> pa.Table:
    """Return the rows of a lake; a table that does not exist yet has no rows."""
    if DeltaTable.is_deltatable(str(lake)):
        return pa.table(DeltaTable(str(lake)).to_pyarrow_table())
    if (lake / "metadata" / "version-hint.text").exists():
        return of_iceberg(lake)
    return of_all_files(lake)


def of_iceberg(lake: Path) -> pa.Table:
    """Read the table without the catalogue, which only serves to find the newest metadata."""
    # The import is here because it takes seconds.
    from pyiceberg.table import StaticTable

    table = StaticTable.from_metadata(str(lake)).scan().to_arrow()
    days = pc.cast(pc.floor_temporal(table["timestamp"], unit="day"), pa.date32())
    return table.append_column(DATE, days)


def of_all_files(lake: Path) -> pa.Table:
    """Read like a program that looks into all directories, including hidden ones."""
    files = [str(path) for path in lake.rglob("*.parquet")]
    partition = ds.partitioning(pa.schema([DATE]), flavor="hive")
    return ds.dataset(files, pa.schema([*SCHEMA, DATE]), partitioning=partition).to_table()
