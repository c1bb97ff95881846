"""Selection of the rows that remain, against a model that decides row by row, in any number of steps."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from headrace.pipeline.dedupe.keys import (
    KEY,
    ROW,
    Key,
    KeyKind,
    bucket_count,
    buckets_of,
    decide,
    hashes,
    identities,
    new_secret,
    topic_hash,
)

NOTHING = np.empty(0, KEY)

histories = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 5)), max_size=40
)
"""Topic, key, and time since the row before."""


def model(history, window_ms):
    """Return the places of the rows that are dropped."""
    since, dropped, at = {}, [], 0
    for place, (topic, key, later) in enumerate(history):
        at += later
        known = since.get((topic, key))
        if known is not None and (window_ms is None or at < known + window_ms):
            dropped.append(place)
        else:
            since[topic, key] = at
    return dropped


def rows_of(history):
    topics, keys, later = (np.array(column, np.int64) for column in zip(*history, strict=True))
    rows = np.empty(len(history), ROW)
    rows["high"], rows["low"], rows["topic"] = keys, topics, topics
    rows["ms"], rows["place"] = np.cumsum(later), np.arange(len(history))
    rows["offset"] = rows["place"] * 7
    return rows


@given(
    histories.filter(bool),
    st.sampled_from([1, 2, 5, 20, None]),
    st.lists(st.integers(0, 40)),
    st.randoms(),
)
def test_rows_are_dropped_as_if_they_came_one_by_one(history, window_ms, cuts, chance):
    rows = rows_of(history)
    keys, dropped = NOTHING, []
    for first, last in zip([0, *sorted(cuts)], [*sorted(cuts), len(history)], strict=True):
        places = list(range(first, min(last, len(history))))
        chance.shuffle(places)
        found = decide(keys, rows[places], window_ms)
        keys = found.keys
        dropped += found.dropped.tolist()
    assert sorted(dropped) == model(history, window_ms)


def test_keys_are_forgotten_when_their_window_is_over():
    history = [(0, 0, 0), (0, 1, 5), (1, 0, 0), (0, 2, 5)]
    found = decide(NOTHING, rows_of(history), 10)
    # The first key of topic 0 is 10 ms old. That of topic 1 is not, because nothing has come since.
    assert sorted(found.keys["ms"].tolist()) == [5, 5, 10]
    assert sorted(decide(NOTHING, rows_of(history), 11).keys["ms"].tolist()) == [0, 5, 5, 10]
    assert sorted(decide(NOTHING, rows_of(history), None).keys["ms"].tolist()) == [0, 5, 5, 10]


def test_buckets_are_as_many_as_are_needed_and_never_fewer_than_before():
    assert bucket_count(0, 0) == 4
    assert bucket_count(5 << 20, 0) == 8
    assert bucket_count(5 << 20, 64) == 64
    assert bucket_count(1 << 40, 64) == 1024


def test_a_bucket_is_a_part_of_one_of_fewer_buckets():
    rows = np.zeros(1000, ROW)
    rows["low"] = np.random.default_rng(5).integers(0, 2**64, 1000, np.uint64)
    assert set(buckets_of(rows, 4)) == set(range(4))
    assert (buckets_of(rows, 64) % 4 == buckets_of(rows, 4)).all()


def known_as(key, *payloads):
    return identities(key, pa.array(payloads, pa.binary())).to_pylist()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b'{"id":1}', b' {"x" : 2, "id" : 1.0} '),
        (b'{"id":100}', b'{"id":1e2}'),
        (b'{"id":0}', b'{"id":-0.0}'),
        (b'{"id":"A"}', b'{"id":"\\u0041"}'),
        (b'{"id":{"a":1,"b":[2.0]}}', b'{"id":{"b":[2],"a":1}}'),
        (b'{"id":2,"id":1}', b'{"id":1}'),
    ],
)
def test_equal_json_values_are_one_key(one, other):
    first, second = known_as(Key(KeyKind.JSON, "$.id"), one, other)
    assert first == second is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b'{"id":1}', b'{"id":"1"}'),
        (b'{"id":1}', b'{"id":true}'),
        (b'{"id":[]}', b'{"id":{}}'),
        (b'{"id":9007199254740993}', b'{"id":9007199254740992.0}'),
        (b'{"id":[1,2]}', b'{"id":[2,1]}'),
        (b'{"id":"null"}', b'{"id":""}'),
    ],
)
def test_other_json_values_are_others(one, other):
    first, second = known_as(Key(KeyKind.JSON, "$.id"), one, other)
    assert first != second


@pytest.mark.parametrize(
    "payload",
    [b"", b"no JSON", b"{}", b"[]", b'"id"', b'{"id":null}', b'{"id":1e999}', b'{"id":"\xff"}'],
)
def test_rows_without_a_value_have_no_key(payload):
    assert known_as(Key(KeyKind.JSON, "$.id"), payload) == [None]


def test_json_that_is_too_deep_has_no_key():
    assert known_as(Key(KeyKind.JSON, "$"), b"[" * 3000 + b"]" * 3000, b"[" * 9 + b"]" * 9) == [
        None,
        b"[[[[[[[[[]]]]]]]]]",
    ]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["a", None, "", "a"], pa.string()),
        ([b"a", None, b"", b"a"], pa.binary()),
        ([1, None, -1, 1], pa.int32()),
        ([0.1, None, 1e300, 0.1], pa.float64()),
        ([True, None, False, True], pa.bool_()),
        ([10**15, None, 0, 10**15], pa.timestamp("us", tz="UTC")),
        ([3, None, 4, 3], pa.date32()),
    ],
)
def test_values_of_a_column_are_keys(values, kind):
    found = identities(Key(KeyKind.COLUMN, "x"), pa.array(values, kind)).to_pylist()
    assert found[1] is None
    assert found[0] == found[3] != found[2]


@pytest.mark.parametrize("secret", [UNSET, new_secret()], ids=["none", "one"])
def test_equal_keys_of_two_topics_are_two(secret):
    topics = [topic_hash(name) for name in ("a", "ab")]
    values = pa.array([b"bc", b"c", b"bc", b"bc"], pa.binary())
    high, low = hashes(secret, topics, np.array([0, 1, 1, 0]), values)
    for words in (high, low):
        assert words[0] == words[3]
        assert len(set(words.tolist())) == 3
    assert not {*high.tolist()} & {*low.tolist()}


@pytest.mark.parametrize(
    ("secret", "words"),
    [
        (UNSET, ["a34b3a3cd3ef18af", "2701aabaa3738493", "78b1a8d8f3ed6b2e", "0b4edaf8ec50ce7e"]),
        (
            "0123456789abcdeffedcba9876543210",
            ["5413a1128226aae5", "228589eadbcaa03f", "834f29e390f1c9b6", "abe80fbee2afb6b7"],
        ),
    ],
)
def test_hashes_that_are_in_tables_never_change(secret, words):
    high, low = hashes(
        secret, [topic_hash("orders")], np.array([0, 0]), pa.array([b"", b"\0order 7" * 9])
    )
    assert [f"{word:016x}" for word in (*high.tolist(), *low.tolist())] == words


def test_secrets_make_other_hashes():
    topics, values = [topic_hash("a")], pa.array([b"one"], pa.binary())
    found = [hashes(new_secret(), topics, np.array([0]), values) for _ in range(2)]
    assert found[0] != found[1]
