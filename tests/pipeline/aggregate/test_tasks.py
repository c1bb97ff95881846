"""Tasks of an aggregation read, stage and fold files of a lake with many row groups."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.lake.files import writing
from headrace.lake.files.writing import RecordRows, Writer
from headrace.lake.format import SCHEMA, Shape
from headrace.lake.states import read_states
from headrace.payload.channel import Content, StoredMessage, encode_message
from headrace.pipeline.aggregate import tasks as aggregate_tasks
from headrace.pipeline.aggregate.fold import NOTHING, load_reducer, reads
from headrace.pipeline.aggregate.tasks import AggregateStageWork, FoldWork, fold_bucket, stage
from headrace.pipeline.job import Points
from headrace.reader.planning import TopicSelection
from headrace.reader.view import LogLocation

MS = 1_794_782_595_071
NO_MESSAGE = b"no message"
BUCKETS = 3
COLUMNS = ("topic", "offset", "ordinal", "messages", "state", "is_json", "complete", "error")


def message(number: int) -> bytes:
    change = json.dumps({"key": "abc"[number % 3], "value": number}).encode()
    return encode_message(StoredMessage("p", number + 1, Content(change, is_json=True)))


def rows(topic: str, offset: int, ordinal: int, payloads: list[bytes]) -> RecordRows:
    boundaries = np.cumsum([offset, *(4 + len(one) for one in payloads)], dtype=np.int64)
    count = len(payloads)
    columns = [
        pa.array([topic] * count),
        pa.array([1] * count, pa.int64()),
        pa.array(boundaries[:-1]),
        pa.array(range(ordinal, ordinal + count), pa.int64()),
        pa.array([MS * 1000] * count, SCHEMA.field("timestamp").type),
        pa.array(payloads, pa.binary()),
    ]
    data = memoryview(b"".join(len(one).to_bytes(4, "big") + one for one in payloads))
    batch = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
    return RecordRows(topic, 1, ordinal, boundaries, np.full(count, MS), data, batch)


def write(lake: Path, name: str, topics: dict[str, tuple[int, list[bytes]]]) -> str:
    """Write a file with records of topics from an ordinal on; row groups end anywhere in them."""
    chance = random.Random(name)
    writer = Writer(lake, name, Shape())
    for topic, (ordinal, payloads) in sorted(topics.items()):
        last = len(payloads)
        offset = sum(4 + len(one) for one in payloads[:ordinal])
        while ordinal < last:
            some = payloads[ordinal : ordinal + chance.randint(1, 4)]
            writer.add(rows(topic, offset, ordinal, some))
            ordinal += len(some)
            offset += sum(4 + len(one) for one in some)
    [written] = writer.finish()
    assert pq.read_metadata(lake / written.path).num_row_groups > 5
    return written.path


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use row groups, staged batches and folds of a few records each."""
    monkeypatch.setattr(writing, "ROW_GROUP_ROWS", 5)
    monkeypatch.setattr(aggregate_tasks, "_STAGED_BYTES", 300)
    monkeypatch.setattr(aggregate_tasks, "_FOLDED_AT_ONCE", 3)


def aggregated(
    root: Path, tasks: list[list[str]], reducer: str, topics: TopicSelection
) -> dict[str, Any]:
    staging = root / "staging"
    staging.mkdir(exist_ok=True)
    staged = [
        stage(
            AggregateStageWork(
                *(str(staging), task, reducer, BUCKETS, topics, str(root / "lake"), files),
                *(LogLocation(), [], Points()),
            )
        )
        for task, files in enumerate(tasks)
    ]
    found = {}
    for bucket in range(BUCKETS):
        pieces = [(one.path, one.batches[bucket]) for one in staged if bucket in one.batches]
        work = FoldWork(str(root), 0, bucket, BUCKETS, reducer, ".", pieces, Points())
        file = fold_bucket(work).file
        assert file is not None
        found.update((row["topic"], row) for row in read_states(root / file.path, COLUMNS))
    return found


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("reducer", ["last", "count", "map"])
def test_files_become_the_states_of_their_topics(tmp_path, reducer, together):
    payloads = {f"$channel/c{i}": [message(n) for n in range(i + 20)] for i in range(9)}
    payloads["$channel/c3"][-7:] = [NO_MESSAGE] * 7
    payloads["$channel/c4"] = [NO_MESSAGE] * 9
    first = {topic: (0, some[:-5]) for topic, some in payloads.items()}
    # In separate tasks, one record is in both files, as when an export continues while the lake is listed.
    overlap = 5 if together else 6
    second = {topic: (len(some) - overlap, some) for topic, some in payloads.items()}
    lake = tmp_path / "lake"
    a, b = write(lake, "a", first), write(lake, "b", second)
    found = aggregated(
        tmp_path,
        [[a, b]] if together else [[b], [a]],
        reducer,
        TopicSelection(pattern=r"\$channel/c[0-7]"),
    )
    assert sorted(found) == [f"$channel/c{i}" for i in range(8)]
    for topic, row in found.items():
        if reducer == "count" and topic in ("$channel/c3", "$channel/c4"):
            continue  # this reducer counts records without decoding them
        messages = [one for one in (reads(topic)(p, 0) for p in payloads[topic]) if one]
        state = load_reducer(reducer, ".").fold(None, messages) or NOTHING
        assert (row["state"], row["is_json"], row["error"]) == (*state, None)
        size = sum(4 + len(one) for one in payloads[topic])
        assert (row["offset"], row["ordinal"]) == (size, len(payloads[topic]))
        assert row["complete"]


@pytest.mark.usefixtures("small")
def test_a_failure_in_the_middle_is_found_where_it_is(tmp_path):
    payloads = [b'{"n": %d}' % n for n in range(20)]
    payloads[13] = b"\xff"
    others = {f"t{i}": (0, [b"{}"]) for i in range(9)}
    file = write(tmp_path / "lake", "a", {"t": (0, payloads), **others})
    row = aggregated(tmp_path, [[file]], "merge", TopicSelection(pattern=".*"))["t"]
    assert (row["ordinal"], row["messages"], row["state"]) == (13, 13, b'{"n":12}')
    assert row["offset"] == sum(4 + len(one) for one in payloads[:13])
    assert row["error"].startswith('message 14 of "t" cannot be folded')
