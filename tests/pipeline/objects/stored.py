"""A lake in a bucket, filled by exports of a real server, and jobs on it without Spark."""

import itertools
import random
from typing import Any

import obstore
from deltalake import DeltaTable
from obstore.store import S3Store

from headrace import connect_blocking, pipeline
from headrace.lake.storage.storage import Storage, storage_of
from headrace.pipeline.tasks import LocalRunner
from headrace.testing import ServerProcess
from tests.fakes.s3_server import Bucket
from tests.pipeline.lakes import Row, cursors_of, ends_of, expected, rows_of

_numbers = itertools.count()


class StoredLake:
    """Topics of one test with what was published to them, and their lake in a bucket."""

    def __init__(self, server: ServerProcess, bucket: Bucket) -> None:
        self.server, self.bucket = server, bucket
        self.prefix = f"stored{next(_numbers)}"
        self._chance = random.Random(11)
        self.payloads: dict[str, list[bytes]] = {f"{self.prefix}/{name}": [] for name in "ab"}

    @property
    def a(self) -> str:
        """Name of the first topic."""
        return f"{self.prefix}/a"

    @property
    def pattern(self) -> str:
        return f"{self.prefix}/.*"

    def publish(self, count: int = 20) -> None:
        with connect_blocking(self.server.figg_url) as client:
            for _ in range(count):
                for topic, known in self.payloads.items():
                    known.append(self._chance.randbytes(self._chance.choice([0, 1, 30, 300])))
                    client.window(30)
                    client.publish_nowait(topic, known[-1])
            client.flush(60)

    def publish_large(self, mb: int) -> None:
        """Publish records that are too large together for one part of an upload."""
        with connect_blocking(self.server.figg_url) as client:
            for _ in range(4 * mb):
                self.payloads[self.a].append(self._chance.randbytes(250_000))
                client.window(30)
                client.publish_nowait(self.a, self.payloads[self.a][-1])
            client.flush(60)

    def run(self, job: str, *arguments: Any, through: Any = None, **given: Any) -> Any:
        """Run a job on the lake; with `through`, by way of a proxy."""
        bucket = self.bucket.through(through) if through else self.bucket
        more = {"storage_options": bucket.options, "runner": LocalRunner()}
        return getattr(pipeline, job)(*arguments, **more | given)

    def export(self, **given: Any) -> Any:
        given = {"pattern": self.pattern, "url": self.server.http_url, **given}
        return self.run("export", self.bucket.url, **given)

    def compact(self, **given: Any) -> Any:
        return self.run("compact", self.bucket.url, **given)

    def audit(self, **given: Any) -> Any:
        return self.run("audit", self.bucket.url, self.payloads, url=self.server.http_url, **given)

    @property
    def storage(self) -> Storage:
        return storage_of(self.bucket.url, self.bucket.options)

    @property
    def table(self) -> DeltaTable:
        return self.table_at("lake")

    def table_at(self, path: str) -> DeltaTable:
        """Open a table of the bucket as another program does."""
        options = {**self.bucket.options, "AWS_ALLOW_HTTP": "true"}
        return DeltaTable(f"s3://{self.bucket.name}/{path}", storage_options=options)

    @property
    def rows(self) -> list[Row]:
        return rows_of(self.bucket.url, self.bucket.options)

    @property
    def wanted(self) -> list[Row]:
        return expected(self.server, self.payloads)

    def check(self) -> None:
        """Check that every record is in the lake once, and that the server knows it."""
        assert self.rows == self.wanted
        found = self.audit()
        assert not found.lost, list(found.all_findings())
        assert self._ours(cursors_of(self.server, "lake")) == self._ours(ends_of(self.server))

    def _ours(self, found: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        return {name: at for name, at in found.items() if name in self.payloads}

    # Objects, as anybody may change them

    @property
    def objects(self) -> S3Store:
        return S3Store(
            self.bucket.name,
            prefix="lake",
            config=self.bucket.options,
            client_options={"allow_http": True},
        )

    def paths(self, prefix: str | None = None) -> list[str]:
        return [one["path"] for some in obstore.list(self.objects, prefix) for one in some]

    def content(self, path: str) -> bytes:
        return bytes(obstore.get(self.objects, path).bytes())
