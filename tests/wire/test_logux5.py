"""Ids and metas of protocol 5."""

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from headrace.log.records import pack_record
from headrace.model import Position
from headrace.payload.logux import Envelope, created_of, id_of, key_of, plain, raw_event
from headrace.wire.logux.events import ChannelEvents, OutgoingEvent, Shown, outgoing_of
from headrace.wire.logux.messages import client_of, parse_meta

BASE = 1794706580880
numbers = st.integers(-(10**6), 10**6) | st.integers(-100, 100).map(lambda one: one + 0.5)
nodes = st.text("abc:☃é", min_size=1, max_size=8)


@given(numbers, nodes, st.integers(0, 50), numbers, st.integers(-1000, 1000))
def test_what_one_client_says_another_hears(shift, node, counter, time, later):
    """Each client has its own base time, to which all times are relative."""
    meta = parse_meta({"id": [shift, node, counter], "time": time}, BASE, "own")
    envelope = Envelope(raw_event({"type": "a"}), id=meta.id, time=meta.time)
    assert key_of(created_of(envelope)) == key_of([BASE + shift, node, counter])
    shown = Shown(7, envelope, "posts/1")
    found = msgspec.json.decode(shown.sync(BASE + later))
    assert found[:3] == ["sync", 7, {"type": "a"}]
    assert found[3] == {
        "id": [shift - later, node, counter],
        "time": time - later,
        "channels": ["posts/1"],
    }
    assert shown.node == node


def test_events_of_older_protocols_have_ids_too():
    envelope = Envelope(raw_event({"type": "a"}), created=[BASE + 1.5, "host", 3])
    assert id_of(envelope) == f"{BASE + 1.5} host 3"
    assert msgspec.json.decode(Shown(1, envelope, "x").sync(BASE))[3] == {
        "id": [1.5, "host", 3],
        "time": 1.5,
        "channels": ["x"],
    }
    strange = Shown(1, Envelope(raw_event({"type": "a"}), created=["a", "b"]), "x")
    assert msgspec.json.decode(strange.sync(BASE))[3]["id"][0] == -BASE


def test_the_subprotocol_goes_with_it():
    envelope = Envelope(
        raw_event({"type": "a"}), id=f"{BASE} a 0", time=BASE, meta={"subprotocol": 3, "x": 1}
    )
    found = msgspec.json.decode(Shown(1, envelope, "x").sync(BASE))[3]
    assert found == {"id": [0, "a", 0], "time": 0, "channels": ["x"], "subprotocol": 3}


def test_a_client_is_the_first_two_parts_of_a_node():
    assert [client_of(one) for one in ("a:b:c", "a:b", "a", "a:b:c:d")] == [
        "a:b",
        "a:b",
        "a",
        "a:b",
    ]


@given(st.text('ab/\\"é☃', max_size=3), st.lists(st.text('ab/\\"é☃', max_size=3), max_size=8))
def test_a_channel_gets_its_events_and_no_others(wanted, channels):
    records = []
    for number, channel in enumerate(channels):
        text = json.dumps(channel, ensure_ascii=number % 2 == 0)
        made = (
            f'{{"event":{{"type":"a","text":"ab/","channel":{text}}},"created":[{number},"h",0]}}'
        )
        records.append(pack_record(made.encode()))
    records.append(pack_record(b"no event " + wanted.encode()))
    found = [one.ordinal for one in outgoing_of(wanted, Position(1, 0, 10), records)]
    assert found == [10 + number for number, channel in enumerate(channels) if channel == wanted]


@given(
    st.lists(
        st.tuples(numbers, st.sampled_from(["a", "b:c:d", "%d"]), numbers), min_size=1, max_size=5
    )
)
def test_events_that_are_filled_in_together_are_the_same(found):
    """This holds for any notation of the times: with blanks, or each by itself."""
    events = ChannelEvents()
    for number, (ms, node, time) in enumerate(found):
        event = raw_event({"type": "100 %", "channel": "x", "text": "y" * 90 * number})
        events.add(
            OutgoingEvent(
                number, Envelope(event, id=f"{plain(BASE + ms)} {node} 0", time=BASE + time)
            )
        )
    together = events.syncs(BASE + 7)
    apart = b"".join(one.sync5(BASE + 7, binary=False) for one in events.events)
    assert messages(together) == messages(apart)
    assert len(messages(together)) == len(found)


def test_times_that_do_not_fit_are_written_each_by_itself():
    events = ChannelEvents()
    events.add(OutgoingEvent(0, Envelope(raw_event({"type": "a"}), id=f"{10**15} a 0", time=1)))
    [message] = messages(events.syncs(BASE))
    assert message[3]["id"][0] == 10**15 - BASE


def messages(data):
    found = []
    while data:
        size, at = (data[1], 2) if data[1] < 126 else (int.from_bytes(data[2:4], "big"), 4)
        found.append(msgspec.json.decode(data[at : at + size]))
        data = data[at + size :]
    return found
