"""Tasks of an aggregation: files of a lake with many row groups become pieces, letters and states."""

import json
import random
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.lake.files import writing
from headrace.lake.files.writing import RecordRows, Writer
from headrace.lake.format import SCHEMA, Shape
from headrace.lake.states import Buckets, read_states
from headrace.lake.storage.storage import storage_of
from headrace.payload.channel import Content, StoredMessage, encode_message
from headrace.pipeline.aggregate import tasks
from headrace.pipeline.aggregate.fold import NOTHING, Needs, Piece, load_reducer, message_of
from headrace.pipeline.aggregate.tasks import (
    FoldInput,
    FoldRun,
    fold_buckets,
    joined,
    letter_of,
    piece_of,
    topic_of,
)
from headrace.pipeline.job import Points
from headrace.pipeline.tasks import LocalRunner
from headrace.reader.planning import TopicSelection

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
    return RecordRows(batch, data)


def write(lake: Path, name: str, topics: dict[str, tuple[int, list[bytes]]]) -> str:
    """Write a file with records of topics from an ordinal on; row groups end anywhere in them."""
    chance = random.Random(name)
    writer = Writer(storage_of(lake), name, Shape())
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
    """Use row groups and pieces of a few records each."""
    monkeypatch.setattr(writing, "ROW_GROUP_ROWS", 5)
    monkeypatch.setattr(tasks, "_JOINED_BYTES_MAX", 300)
    monkeypatch.setattr(tasks, "_PIECE_BYTES_MAX", 300)
    monkeypatch.setattr(tasks, "_PIECE_RECORDS_MAX", 3)


def aggregated(
    root: Path, inputs: list[list[str]], reducer: str, topics: TopicSelection
) -> dict[str, Any]:
    into = storage_of(root / "into")
    buckets = Buckets(BUCKETS, tuple(range(BUCKETS)))
    run = FoldRun(
        lake=storage_of(root / "lake"),
        source=None,
        topics=topics,
        reducer=reducer,
        directory=".",
        into=into,
        number=0,
        buckets=buckets,
        old={},
        points=Points(),
    )
    folded = fold_buckets(LocalRunner(), run, [FoldInput(files=files) for files in inputs])
    assert [one.bucket for one in folded] == list(range(BUCKETS))
    rows = (row for one in folded for row in read_states(into.file(one.file.path), COLUMNS))
    return {row["topic"]: row for row in rows}


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
        messages = [one for one in (message_of(topic, p, 0) for p in payloads[topic]) if one]
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


def piece(topic: str, epoch: int, ordinal: int, end_ordinal: int, records: bytes) -> Piece:
    """Make a piece of records of ten bytes each."""
    return Piece(topic, epoch, 10 * ordinal, 10 * end_ordinal, ordinal, end_ordinal, records)


@pytest.mark.parametrize("needs", Needs)
def test_pieces_that_follow_each_other_are_joined_unless_all_records_are_needed(needs):
    given = [
        piece("a", 1, 0, 2, b"1"),
        piece("b", 1, 0, 1, b"2"),
        piece("a", 1, 2, 3, b""),
        piece("b", 1, 1, 2, b"3"),
        piece("a", 1, 5, 6, b"4"),
        piece("b", 2, 2, 3, b"5"),
    ]
    found = list(joined(iter(given), needs))
    if needs is Needs.ALL:
        assert found == given
    else:
        assert sorted(found) == [
            piece("a", 1, 0, 3, b"1"),
            piece("a", 1, 5, 6, b"4"),
            piece("b", 1, 0, 2, b"3"),
            piece("b", 2, 2, 3, b"5"),
        ]


def test_letters_of_a_topic_stay_together_in_the_order_of_epochs_and_offsets():
    places = [(1, 0), (1, 255), (1, 256), (2, 3)]
    topics = ["a", "a\0", "a\0\0\0\0\0\0\0\1", "ä", "b"]
    given = [
        Piece(topic, epoch, offset, offset + 9, 1, 2, b"\0\0\0\5hello")
        for topic in topics
        for epoch, offset in places
    ]
    random.Random(1).shuffle(given)
    letters = sorted((letter_of(0, one) for one in given), key=lambda one: one.key)
    found = {
        topic: [(one.epoch, one.offset, one.payloads()) for one in map(piece_of, some)]
        for topic, some in groupby(letters, topic_of)
    }
    assert found == {topic: [(*place, [b"hello"]) for place in places] for topic in topics}
    assert len(list(groupby(letters, topic_of))) == len(topics)
