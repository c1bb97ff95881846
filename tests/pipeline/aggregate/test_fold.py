"""Pieces of topics folded into states, for any division into pieces, and failures of a reducer."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import OptionError
from headrace.log.records import pack_record
from headrace.model import JUMP
from headrace.payload.channel import Content, StoredMessage, encode_message
from headrace.pipeline.aggregate.fold import NOTHING, Needs, Piece, fold, load_reducer, needs_of

CHANGES = [
    *({"key": key, "value": value} for key in "ab" for value in (1, [2.50], None)),
    {"key": "a", "delete": True},
]
CONTENTS = [Content(json.dumps(one).encode(), is_json=True) for one in CHANGES]
REDUCERS = ("last", "count", "merge", "map", "operator:eq")


def payloads_of(contents: list[Content]) -> list[bytes]:
    return [encode_message(StoredMessage("p", i, one)) for i, one in enumerate(contents, 1)]


def cut(reducer: str, payloads: list[bytes], places: list[int], topic: str = "t") -> list[Piece]:
    """Cut the records at these places into pieces, as the first tasks return them."""
    ends = [0]
    for payload in payloads:
        ends.append(ends[-1] + 4 + len(payload))
    found = []
    for first, last in pairwise(places):
        some = payloads[first:last]
        kept = {Needs.NONE: [], Needs.LAST: some[-1:], Needs.ALL: some}[needs_of(reducer)]
        records = b"".join(map(pack_record, kept))
        found.append(Piece(topic, 7, ends[first], ends[last], first, last, records))
    return found


@given(
    st.lists(st.sampled_from(CONTENTS), min_size=1, max_size=12),
    st.lists(st.integers(0, 12)),
    st.lists(st.integers(0, 12)),
    st.sampled_from(REDUCERS),
)
def test_however_records_are_cut_and_overlap_the_state_is_the_same(contents, some, others, name):
    reducer, payloads, count = load_reducer(name, "."), payloads_of(contents), len(contents)
    pieces = [
        piece
        for places in (some, others)
        for piece in cut(
            name, payloads, sorted({0, count, *(i for i in places if i < count)}), "$channel/c"
        )
    ]
    found = fold("$channel/c", sorted(pieces, key=lambda one: one.offset), reducer)
    messages = [StoredMessage("p", i, one) for i, one in enumerate(contents, 1)]
    size = sum(map(len, payloads)) + 4 * count
    expected = reducer.fold(None, messages)
    assert found == ("$channel/c", 7, size, count, count, name, *expected, True, None)


PAYLOADS = [*payloads_of(CONTENTS), *payloads_of([Content(b"x", is_json=False)]), b"no message"]


@given(
    st.lists(st.sampled_from(PAYLOADS), min_size=1, max_size=9),
    st.lists(st.integers(1, 8)),
    st.lists(st.integers(1, 9)),
    st.sampled_from([0, 1, JUMP]),
    st.sampled_from(REDUCERS),
)
def test_a_state_goes_on_as_if_it_had_been_folded_at_once(payloads, places, splits, gap, name):
    reducer, count = load_reducer(name, "."), len(payloads)
    places = sorted({0, count, *(i for i in places if i < count)})
    pieces = cut(name, payloads, places, "$channel/c")
    if needs_of(name) is Needs.LAST:
        # Tasks return only the last payload that is a message, if there is one.
        reads = [one for one in pieces if one.payloads() != [b"no message"]]
        pieces = [one if one in reads else one._replace(records=b"") for one in pieces]
    last = pieces[-1]
    pieces[-1] = last._replace(ordinal=last.ordinal + gap, end_ordinal=last.end_ordinal + gap)
    found = None
    for first, end in pairwise(sorted({0, len(pieces), *(i for i in splits if i < len(pieces))})):
        # Repeated pieces do no harm.
        found = fold("$channel/c", [*pieces[:first], *pieces[first:end]], reducer, found)
    assert found == fold("$channel/c", pieces, reducer)


@given(st.lists(st.integers(0, 8)), st.integers(0, 7))
def test_a_failure_ends_a_state_before_the_message(places, bad):
    payloads = [b'{"n": %d}' % i for i in range(8)]
    payloads[bad] = b"\xff"
    pieces = cut("merge", payloads, sorted({0, 8, *(i for i in places if i < 8)}), "numbers")
    found = fold("numbers", pieces, load_reducer("merge", "."))
    state = Content(b'{"n":%d}' % (bad - 1), is_json=True) if bad else NOTHING
    assert (found.ordinal, found.messages, found.content) == (bad, bad, state)
    assert found.offset == sum(4 + len(payload) for payload in payloads[:bad])
    assert (
        found.error
        == f'message {bad + 1} of "numbers" cannot be folded: it is bytes, and this reducer takes JSON'
    )


def test_what_is_no_message_of_a_channel_is_passed_over():
    [payload] = payloads_of([CONTENTS[0]])
    pieces = cut("merge", [b"x", payload, b"{}"], [0, 3], "$channel/c")
    found = fold("$channel/c", pieces, load_reducer("merge", "."))
    assert (found.ordinal, found.messages, found.error) == (3, 1, None)
    nothing = fold("$channel/c", [pieces[0]._replace(records=b"")], load_reducer("last", "."))
    assert nothing.content == NOTHING


@pytest.mark.parametrize("content", [b'{"a": 1}', b" 1.0 ", b"", b"\xff", b"[" * 200 + b"]" * 200])
def test_a_payload_is_json_where_it_is_json_within_the_limits(content):
    [piece] = cut("last", [content], [0, 1])
    found = fold("any topic", [piece], load_reducer("last", "."))
    assert found.content == Content(content, is_json=content in (b'{"a": 1}', b" 1.0 "))


@pytest.mark.parametrize(
    ("first", "second", "complete"),
    [(0, 2, True), (1, 3, False), (0, 3, False), (0, 2 + JUMP, True)],
)
def test_a_state_is_complete_when_no_record_is_missing(first, second, complete):
    pieces = [
        Piece("t", 1, 10 * first, 10 * first + 20, first, first + 2, b""),
        Piece("t", 2, 10 * second, 10 * second + 10, second, second + 1, b""),
    ]
    found = fold("t", pieces, load_reducer("count", "."))
    assert (found.complete, found.messages, found.epoch) == (complete, 3, 2)
    assert (found.offset, found.ordinal) == (10 * second + 10, second + 1)


@pytest.mark.parametrize("name", ["uploaded", "lsat", "no.such:module", "json:nothing"])
def test_a_reducer_that_folds_nothing_is_refused(name):
    with pytest.raises(OptionError):
        load_reducer(name, ".")
