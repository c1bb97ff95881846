"""Lakes whose Iceberg tables are in catalogues that users have: SQLite, PostgreSQL, and a REST server.

The REST server is SeaweedFS, which keeps the metadata of a table in a bucket of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from headrace.lake.storage.storage import Storage, storage_of
from tests.fakes.s3_server import KEY, SECRET

DIRECTORY, S3, POSTGRES, REST = "directory, SQLite", "S3, SQLite", "S3, PostgreSQL", "S3, REST"


class Place(NamedTuple):
    lake: str
    storage_options: dict[str, str]
    catalog_options: dict[str, str]

    @property
    def storage(self) -> Storage:
        return storage_of(self.lake, self.storage_options, self.catalog_options)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of a job."""
        return {
            "storage_options": self.storage_options,
            "catalog_options": self.catalog_options,
        }

    def with_catalog(self, **options: str) -> "Place":
        return self._replace(catalog_options={**self.catalog_options, **options})


@contextmanager
def place_of(kind: str, request: pytest.FixtureRequest) -> Iterator[Place]:
    """Return a place for a lake that does not exist yet."""
    tmp_path = request.getfixturevalue("tmp_path")
    database = {"uri": f"sqlite:///{tmp_path}/catalogue.db", "type": "sql"}
    if kind == DIRECTORY:
        yield Place(str(tmp_path / "a lake"), {}, database)
        return
    bucket = request.getfixturevalue("bucket")
    if kind == POSTGRES:
        url = request.getfixturevalue("postgres").database().url
        database["uri"] = url.replace("postgresql:", "postgresql+psycopg:")
    if kind == REST:
        server = request.getfixturevalue("s3_server")
        tables = server.table_bucket()
        database = {
            "type": "rest",
            "uri": server.catalog_uri,
            "oauth2-server-uri": f"{server.catalog_uri}/v1/oauth/tokens",
            "warehouse": f"s3://{tables}",
            "credential": f"{KEY}:{SECRET}",
            "location": f"s3://{tables}/headrace/records",
        }
    yield Place(bucket.url, bucket.options, database)
