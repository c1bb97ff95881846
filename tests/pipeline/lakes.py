"""Queries of tests about a lake: its rows as others read them, its manifests, and the server's cursors."""

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace.lake.format import Manifest
from headrace.lake.manifests import Manifests
from headrace.lake.storage.storage import storage_of
from headrace.lake.table import open_table
from headrace.pipeline.job import EXPORT_APP as APP
from headrace.testing import ServerProcess
from tests.lake.others import seen_by_others
from tests.spark.support import ask


class Row(NamedTuple):
    topic: str
    epoch: int
    offset: int
    ordinal: int
    payload: bytes


def rows_of(lake: Path | str, options: Mapping[str, str] | None = None) -> list[Row]:
    """Return all rows, ordered by topic, epoch and offset. Each row's date must match its timestamp."""
    found = []
    rows = seen_by_others(lake, options).select([*Row._fields, "timestamp", "date"])
    for row in rows.to_pylist():
        assert row.pop("timestamp").astimezone(datetime.UTC).date() == row.pop("date")
        found.append(Row(**row))
    return sorted(found)


def expected(server: ServerProcess, payloads: dict[str, list[bytes]]) -> list[Row]:
    """Return the rows of payloads published to topics that have had only one life each."""
    rows = []
    for topic in sorted(payloads):
        epoch = ask(server, "/v1/topic", name=topic)["epoch"]
        offset = 0
        for ordinal, payload in enumerate(payloads[topic]):
            rows.append(Row(topic, epoch, offset, ordinal, payload))
            offset += 4 + len(payload)
    return rows


def manifests_of(lake: Path) -> list[Manifest]:
    """Return the manifests of the committed batches. None may be merged."""
    manifests = Manifests(storage_of(lake))
    names = manifests.names(open_table(storage_of(lake)).last(APP))
    assert not names.merged
    return [manifests.read(name) for name in names.single]


def cursors_of(server: ServerProcess, reader: str) -> dict[str, tuple[int, int]]:
    found = ask(server, "/v1/cursors", reader=reader)["cursors"]
    return {one["topic"]: (one["offset"], one["ordinal"]) for one in found}


def ends_of(server: ServerProcess) -> dict[str, tuple[int, int]]:
    found: list[Any] = ask(server, "/v1/topics")["topics"]
    return {one["name"]: (one["end"]["offset"], one["end"]["ordinal"]) for one in found}
