"""Lakes as other programs read them: the lines of the guide, with a directory and with S3."""

import duckdb
import polars as pl
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog

from headrace.lake.format import Shape
from headrace.lake.storage.storage import storage_of
from headrace.lake.table import make_table
from tests.fakes.catalogues import DIRECTORY, S3, place_of
from tests.lake.others import OF_S3
from tests.lake.rows import token
from tests.lake.test_table import merged, three_batches

QUERY = 'select topic, count(*), max("offset") from rows group by topic'
COUNTED = [("a", 3, 10)]


def compacted(storage, kind: str) -> None:
    """Make a lake of three rows, two of which are in replaced files too."""
    lake = make_table(storage, kind, Shape())
    paths = three_batches(lake)
    assert lake.commit("merge", 0, merged(lake, 0, 1), token(), replaced=paths[:2])


@pytest.fixture(params=["directory", "S3"])
def delta(request):
    """Return the address of a Delta lake and the options to open it."""
    if request.param == "directory":
        lake, options = str(request.getfixturevalue("tmp_path") / "lake"), {}
    else:
        bucket = request.getfixturevalue("bucket")
        # Libraries want to be told that this server has no TLS.
        lake, options = bucket.url, {**bucket.options, "AWS_ALLOW_HTTP": "true"}
    compacted(storage_of(lake, options), "delta")
    return lake, options


def test_deltalake_and_pandas_read_a_delta_lake(delta):
    lake, options = delta
    table = DeltaTable(lake, storage_options=options)
    assert sorted(table.to_pyarrow_table()["payload"].to_pylist()) == [b"0", b"1", b"2"]
    assert sorted(table.to_pandas(columns=["payload"])["payload"]) == [b"0", b"1", b"2"]


def test_duckdb_reads_a_delta_lake(delta):
    lake, options = delta
    rows = DeltaTable(lake, storage_options=options).to_pyarrow_dataset()
    assert rows
    assert duckdb.sql(QUERY).fetchall() == COUNTED


def test_polars_reads_a_delta_lake(delta):
    lake, options = delta
    rows = pl.scan_delta(lake, storage_options=options)
    found = rows.filter(pl.col("topic") == "a").select("payload", "date").collect()
    assert sorted(found["payload"]) == [b"0", b"1", b"2"]
    assert {str(day) for day in found["date"]} == {"2024-10-04"}


@pytest.mark.parametrize("kind", [DIRECTORY, S3])
def test_pyiceberg_duckdb_and_polars_read_an_iceberg_lake(request, kind):
    with place_of(kind, request) as place:
        compacted(place.storage, "iceberg")
        options = place.storage_options
        of_s3 = {f"s3.{name}": options[key] for name, key in OF_S3.items() if key in options}
        catalog = load_catalog("headrace", **place.catalog_options, **of_s3)
        table = catalog.load_table("headrace.records")
        rows = table.scan(selected_fields=("topic", "offset", "payload")).to_arrow()
        assert sorted(rows["payload"].to_pylist()) == [b"0", b"1", b"2"]
        assert duckdb.sql(QUERY).fetchall() == COUNTED
        assert pl.from_arrow(rows).height == 3
        catalog.engine.dispose()
