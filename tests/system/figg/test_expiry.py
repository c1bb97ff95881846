"""Offsets of records that no longer exist: expired by retention, or destroyed with their topic."""

import pytest

from headrace.testing import wait_until
from tests.system.conftest import KEEP_LITTLE, SMALL, Start
from tests.system.figg.foreign import DATA, Wire
from tests.system.support import destroy, get, start_of


@pytest.mark.parametrize("asked", [0, 1, 500])
def test_an_expired_offset_is_answered_with_where_the_oldest_kept_record_begins(
    start: Start, asked: int
) -> None:
    server = start(config=KEEP_LITTLE)
    with Wire(server.figg) as wire, Wire(server.figg) as reader:
        # Whole runs expire, and a run has up to 500 records.
        for first in range(0, 5000, 500):
            wire.publish(b"t", *[b"%096d" % (first + i) for i in range(500)], first=first)
        wait_until(lambda: start_of(server, "t") > 10_000, 30, "records to expire")
        earlier = start_of(server, "t")
        given = reader.attach(b"t", asked)
        assert earlier <= given <= start_of(server, "t")
        first = reader.expect(DATA)
        assert first.number == given + 100, "that record is the first"
        assert first.data == b"%096d" % (given // 100)


def test_a_destroyed_topic_is_gone_and_its_offsets_are_never_used_again(start: Start) -> None:
    server = start(config=SMALL)
    with Wire(server.figg) as wire, Wire(server.figg) as reader:
        wire.publish(b"t", b"foo", b"bar")
        assert destroy(server, "t") == 14
        assert get(server, "/v1/topic?name=t")[0] == 404
        assert reader.attach(b"t") == 14
        wire.publish(b"t", b"new", first=2)
        message = reader.expect(DATA)
        assert (message.number, message.data) == (21, b"new")
    with Wire(server.figg) as reader:
        assert reader.attach(b"t", 0) == 14, "the old life is over"
        assert reader.expect(DATA).data == b"new"


@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_a_destroyed_topic_stays_destroyed_over_a_restart(start: Start, end: str) -> None:
    server = start(config=SMALL)
    with Wire(server.figg) as wire:
        wire.publish(b"t", b"foo", b"bar")
        wire.publish(b"other", b"foo", first=2)
    destroy(server, "t")
    getattr(server, end)()
    server.start()
    assert get(server, "/v1/topic?name=t")[0] == 404
    with Wire(server.figg) as wire:
        assert wire.attach(b"t", 0) == 14
    with Wire(server.figg) as wire:
        assert wire.attach(b"other", 0) == 0
        assert wire.expect(DATA).data == b"foo"
