"""Every job in a session that the caller gives: its queries run there, and the session goes on."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from deltalake import DeltaTable

from headrace import pipeline
from headrace.testing import wait_until
from tests.pipeline.test_tasks import jobs_of
from tests.spark.support import publish


@pytest.fixture
def mine(shared_spark: Any) -> Iterator[Any]:
    """Session with a tag, which is not the shared one."""
    made = shared_spark.newSession()
    made.addTag("mine")
    yield made
    shared_spark.createDataFrame([[1]], "one int")  # makes it the active session for other tests


def test_every_job_uses_the_session_that_it_is_given_and_never_stops_it(
    own_server, shared_spark, mine, tmp_path
):
    publish(own_server.figg_url, "orders", [b"1", b"2", b"2"])
    url, lake, states = own_server.http_url, tmp_path / "lake", tmp_path / "states"
    jobs: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "export": ((lake, ["orders"]), {"url": url, "batch_bytes": 5}),
        "audit": ((lake,), {"url": url}),
        "compact": ((lake,), {}),
        "dedupe": ((lake, tmp_path / "rows"), {"payload": True}),
        "replay": ((lake, "orders", "again"), {"url": url}),
        "report": ((tmp_path / "report.html",), {"url": url}),
        "aggregate": ((lake, states), {"reducer": "count"}),
        "aggregate_stream": (
            (tmp_path / "stream",),
            {
                "reducer": "count",
                "url": url,
                "stop": lambda: DeltaTable.is_deltatable(str(tmp_path / "stream")),
            },
        ),
    }
    assert set(jobs) == {name for name in pipeline.__all__ if name.islower()}
    before = jobs_of(shared_spark).keys()
    for name, (arguments, given) in jobs.items():
        getattr(pipeline, name)(*arguments, **given, spark=mine)
        assert mine.range(3).count() == shared_spark.range(3).count() == 3, name

    def described() -> dict[str, str]:
        """Return the tags of a query of each job."""
        new = [found for number, found in jobs_of(shared_spark).items() if number not in before]
        found = [(re.search(r"headrace (\w+): ", what), tags) for tags, what in new]
        return {one[1]: tags for one, tags in found if one is not None}

    expected = {name.partition("_")[0] for name in jobs}
    wait_until(lambda: described().keys() >= expected, 60, f"queries of {expected}")
    assert all(re.search(r"\bmine\b", tags) for tags in described().values())
    assert mine.getTags() == {"mine"}
