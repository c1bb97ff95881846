"""A lake as other programs read it: with the library of its format, or by reading all its files."""

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable

from headrace.lake.format import DATE, SCHEMA
from headrace.lake.storage.storage import Storage, storage_of

KINDS = ("delta", "parquet", "iceberg")

OF_S3 = {
    "endpoint": "AWS_ENDPOINT_URL",
    "access-key-id": "AWS_ACCESS_KEY_ID",
    "secret-access-key": "AWS_SECRET_ACCESS_KEY",
    "region": "AWS_REGION",
}
"""Properties of pyiceberg for object storage, and the same options of ours."""


def seen_by_others(
    place: Path | str | Storage, options: Mapping[str, str] | None = None
) -> pa.Table:
    """Return the rows of a lake; a table that does not exist yet has no rows."""
    if isinstance(place, str):
        given = {**(options or {}), "AWS_ALLOW_HTTP": "true"}
        return pa.table(DeltaTable(place, storage_options=given).to_pyarrow_table())
    storage = storage_of(place)
    if storage.catalog:
        return of_catalogue(storage)
    lake = storage.root
    if DeltaTable.is_deltatable(str(lake)):
        return pa.table(DeltaTable(str(lake)).to_pyarrow_table())
    if (lake / "metadata" / "version-hint.text").exists():
        return of_iceberg(lake)
    return of_all_files(lake)


def of_catalogue(storage: Storage) -> pa.Table:
    """Read the table of a catalogue that the user names, with the library's own access to files."""
    from pyiceberg.catalog import load_catalog

    options = {
        f"s3.{name}": storage.table_options[key]
        for name, key in OF_S3.items()
        if key in storage.table_options
    }
    given = {**storage.catalog, **options}
    catalog = load_catalog("headrace", **given)
    found = catalog.load_table(given.get("table", "headrace.records")).scan().to_arrow()
    if hasattr(catalog, "engine"):
        catalog.engine.dispose()
    return _with_date(found)


def of_iceberg(lake: Path) -> pa.Table:
    """Read the table without the catalogue, which only serves to find the newest metadata."""
    # The import is here because it takes seconds.
    from pyiceberg.table import StaticTable

    return _with_date(StaticTable.from_metadata(str(lake)).scan().to_arrow())


def _with_date(table: pa.Table) -> pa.Table:
    days = pc.cast(pc.floor_temporal(table["timestamp"], unit="day"), pa.date32())
    return table.append_column(DATE, days)


def of_all_files(lake: Path) -> pa.Table:
    """Read like a program that looks into all directories, including hidden ones."""
    files = [str(path) for path in lake.rglob("*.parquet")]
    partition = ds.partitioning(pa.schema([DATE]), flavor="hive")
    return ds.dataset(files, pa.schema([*SCHEMA, DATE]), partitioning=partition).to_table()
