"""Jobs on Spark with a lake on a real S3 server: executors write and read it, and share nothing else."""

import pytest

from tests.pipeline.objects.stored import StoredLake


@pytest.fixture
def lake(server, bucket):
    made = StoredLake(server, bucket)
    made.publish()
    return made


def test_a_lake_is_made_deduplicated_and_aggregated(lake, shared_spark):
    on_spark = {"runner": None, "spark": shared_spark}
    assert lake.export(**on_spark, part_bytes=1000).records == 40
    lake.check()
    rows, states = (f"s3://{lake.bucket.name}/{name}" for name in ("rows", "states"))
    done = lake.run("dedupe", lake.bucket.url, rows, payload=True, **on_spark)
    assert done.kept == sum(len(set(known)) for known in lake.payloads.values())
    found = lake.table_at("rows").to_pyarrow_table(columns=["topic", "payload"]).to_pylist()
    assert len(found) == done.kept
    assert {(row["topic"], row["payload"]) for row in found} == {
        (topic, payload) for topic, known in lake.payloads.items() for payload in known
    }
    done = lake.run("aggregate", lake.bucket.url, states, reducer="count", **on_spark)
    assert (done.topics, done.messages) == (2, 40)
    found = lake.table_at("states").to_pyarrow_table(columns=["topic", "ordinal"]).to_pylist()
    assert {row["topic"]: row["ordinal"] for row in found} == dict.fromkeys(lake.payloads, 20)
