"""Serials: a client that resumes from a serial has missed something exactly when it gets another one."""

import pytest

from headrace.testing import ServerProcess, wait_until
from tests.system.checked import offset_of
from tests.system.conftest import KEEP_LITTLE, SMALL, Dial, Start
from tests.system.support import destroy, get_json, start_of
from tests.system.wombat.foreign import (
    ATTACHED,
    DETACHED,
    PAYLOAD,
    Wire,
    attach,
    detach,
)


def data(wire: Wire, records: int) -> list[bytes]:
    return [found.data for found in wire.expect_payloads(records)]


def epoch_of(server: ServerProcess, topic: str) -> int:
    epoch: int = get_json(server, f"/v1/topic?name={topic}")["epoch"]
    return epoch


@pytest.fixture
def foo_bar_car(dial: Dial, name: str) -> str:
    """A topic with three records that end at the offsets 7, 14 and 21."""
    dial().publish(name, b"foo", b"bar", b"car")
    return name


@pytest.fixture
def epoch(server: ServerProcess, foo_bar_car: str) -> int:
    return epoch_of(server, foo_bar_car)


# Resuming


def test_a_client_goes_on_from_any_serial_it_was_given(dial: Dial, name: str) -> None:
    live = dial()
    serials = [live.attach(name)]
    payloads = [b"%d" % number * (number % 7) for number in range(60)]
    dial().publish(name, *payloads)
    serials += [found.serial for found in live.expect_payloads(60)]
    assert len(set(serials)) == 61
    for received, serial in enumerate(serials):
        again = dial()
        assert again.attach(name, serial) == serial, "nothing was missed"
        assert data(again, 60 - received) == payloads[received:]
        assert again.alive(), "exactly the rest"
        again.close()


def test_what_is_published_between_two_connections_is_not_missed(dial: Dial, name: str) -> None:
    publisher = dial()
    publisher.publish(name, b"before")
    serial = dial().attach(name)
    for number in range(20):
        publisher.publish(name, *[b"%d/%d" % (number, i) for i in range(10)])
        again = dial()
        assert again.attach(name, serial) == serial
        found = again.expect_payloads(10)
        assert [one.data for one in found] == [b"%d/%d" % (number, i) for i in range(10)]
        serial = found[-1].serial
        again.close()


@pytest.mark.parametrize(("end", "durability"), [("kill", "synced"), ("terminate", "written")])
def test_serials_hold_over_a_restart(start: Start, end: str, durability: str) -> None:
    server = start(f"--durability={durability}", config=SMALL)
    with Wire(server.ws) as live, Wire(server.ws) as publisher:
        serials = [live.attach("t")]
        publisher.publish("t", *[b"%d" % number for number in range(5)])
        serials += [found.serial for found in live.expect_payloads(5)]
    getattr(server, end)()
    server.start()
    with Wire(server.ws) as publisher:
        publisher.publish("t", b"later")
    for received, serial in enumerate(serials):
        with Wire(server.ws) as again:
            assert again.attach("t", serial) == serial
            assert data(again, 6 - received) == [
                *(b"%d" % number for number in range(received, 5)),
                b"later",
            ]


def test_a_second_attach_puts_the_subscription_elsewhere(
    wombat: Wire, dial: Dial, foo_bar_car: str, epoch: int
) -> None:
    assert wombat.attach(foo_bar_car) == f"{epoch}@21"
    assert wombat.attach(foo_bar_car, f"{epoch}@14") == f"{epoch}@14"
    assert data(wombat, 1) == [b"car"]
    assert wombat.attach(foo_bar_car, "@0") == "@0"
    assert data(wombat, 3) == [b"foo", b"bar", b"car"]
    dial().publish(foo_bar_car, b"later")
    assert data(wombat, 1) == [b"later"], "once, from the last attachment alone"
    assert wombat.alive()


def test_a_second_attach_without_a_serial_ends_the_backlog_of_the_first(
    wombat: Wire, dial: Dial, name: str
) -> None:
    dial().publish(name, *[bytes(100_000)] * 100)
    wombat.attach(name, "@0")
    wombat.send(attach(name))
    while (found := wombat.receive()).type == PAYLOAD:
        pass
    assert found.type == ATTACHED
    assert found.serial.endswith(f"@{100 * 100_004}")
    dial().publish(name, b"later")
    assert data(wombat, 1) == [b"later"]


def test_attachments_asked_for_in_one_breath_are_each_answered_with_their_own_serial(
    wombat: Wire, foo_bar_car: str, epoch: int
) -> None:
    asked = ["@7", f"{epoch}@14", "@0", "@21", f"{epoch - 1}@0", "@7"]
    wombat.send(*(attach(foo_bar_car, serial) for serial in asked))
    assert [wombat.expect(ATTACHED).serial for _ in asked] == asked
    assert data(wombat, 2) == [b"bar", b"car"], "from the last of them alone"
    assert wombat.alive()


def test_detaching_and_attaching_in_one_breath_is_answered_with_the_serial_asked_for(
    wombat: Wire, foo_bar_car: str
) -> None:
    wombat.send(detach(foo_bar_car), attach(foo_bar_car, "@7"))
    assert wombat.expect(DETACHED)
    assert wombat.expect(ATTACHED).serial == "@7"
    assert data(wombat, 2) == [b"bar", b"car"]


# Serials of other positions


@pytest.mark.parametrize(("offset", "rest"), [(0, 3), (7, 2), (14, 1), (21, 0)])
def test_an_offset_of_figg_is_a_serial_when_a_message_begins_there(
    wombat: Wire, foo_bar_car: str, offset: int, rest: int
) -> None:
    assert wombat.attach(foo_bar_car, f"@{offset}") == f"@{offset}"
    assert data(wombat, rest) == [b"foo", b"bar", b"car"][3 - rest :]
    assert wombat.alive()


@pytest.mark.parametrize("with_epoch", [False, True])
@pytest.mark.parametrize(
    ("offset", "begins"),
    [(1, 7), (6, 7), (8, 14), (20, 21), (22, 21), (2**32, 21), (2**63, 21), (2**64 - 1, 21)],
)
def test_an_offset_where_no_message_begins_is_answered_with_where_it_starts(
    wombat: Wire,
    dial: Dial,
    foo_bar_car: str,
    epoch: int,
    with_epoch: bool,
    offset: int,
    begins: int,
) -> None:
    asked = f"{epoch if with_epoch else ''}@{offset}"
    assert wombat.attach(foo_bar_car, asked) == f"{epoch}@{begins}"
    dial().publish(foo_bar_car, b"later")
    rest = [b"foo", b"bar", b"car", b"later"][begins // 7 :]
    assert data(wombat, len(rest)) == rest


FOREIGN = {
    "a word": "abc",
    "a life to come": "99999999999999@5",
    "a life to come, at a boundary": "99999999999999@7",
    "a life of 20 digits": "99999999999999999999@7",
    "a life of 21 digits": "999999999999999999999@7",
    "an offset over 64 bits": "@18446744073709551616",
    "an offset of 21 digits": "@000000000000000000007",
    "only the at": "@",
    "no offset": "17@",
    "no at": "7",
    "a negative offset": "@-7",
    "a sign": "@+7",
    "blanks": " @7",
    "a line end": "@7\n",
    "a zero byte": "@7\0",
    "two ats": "1@2@7",
    "other digits": "@７",
    "hexadecimal": "0x1@0x7",
    "an offset of another system": "0000017f-5c1e-0000",
    "not ASCII": "😀@7",
    "400 KB": "9" * 400_000,
    "400 KB before an offset": "9" * 400_000 + "@7",
    "400 KB of an offset": "@" + "7" * 400_000,
}


@pytest.mark.parametrize("serial", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_foreign_serial_attaches_at_the_oldest_kept_message_and_is_told_its_serial(
    wombat: Wire, foo_bar_car: str, epoch: int, serial: str
) -> None:
    assert wombat.attach(foo_bar_car, serial) == f"{epoch}@0"
    assert data(wombat, 3) == [b"foo", b"bar", b"car"]


@pytest.mark.parametrize("serial", ["abc", "99999999999999@5", "@7", "17@7"])
def test_any_serial_on_a_topic_that_does_not_exist_attaches_where_it_will_begin(
    wombat: Wire, dial: Dial, name: str, serial: str
) -> None:
    given = wombat.attach(name, serial)
    assert given != serial
    assert given.endswith("@0")
    dial().publish(name, b"foo")
    assert data(wombat, 1) == [b"foo"]


def test_a_serial_of_an_earlier_life_is_another_ones(
    wombat: Wire, foo_bar_car: str, epoch: int
) -> None:
    assert wombat.attach(foo_bar_car, f"{epoch - 1}@7") == f"{epoch}@0"
    assert data(wombat, 3) == [b"foo", b"bar", b"car"]


def test_who_attached_before_the_first_message_has_missed_nothing(
    dial: Dial, foo_bar_car: str
) -> None:
    before = dial().attach(f"{foo_bar_car}/other")
    dial().publish(f"{foo_bar_car}/other", b"foo")
    again = dial()
    assert again.attach(f"{foo_bar_car}/other", before) == before
    assert data(again, 1) == [b"foo"]


# Expired and destroyed


def test_an_expired_serial_is_answered_with_another_and_the_oldest_kept_message(
    start: Start,
) -> None:
    server = start(config=KEEP_LITTLE)
    with Wire(server.ws) as publisher, Wire(server.ws) as reader:
        # Whole runs expire, and a run has up to 500 records.
        for number in range(0, 5000, 500):
            publisher.publish("t", *[b"%096d" % (number + i) for i in range(500)])
        wait_until(lambda: start_of(server, "t") > 60_000, 30, "records to expire")
        epoch = epoch_of(server, "t")
        for asked in (f"{epoch}@0", f"{epoch}@100", f"{epoch}@50000", "@0", "@100", "0@0", "abc"):
            earlier = start_of(server, "t")
            given = reader.attach("t", asked)
            assert given != asked, "messages were missed"
            life, _, offset = given.partition("@")
            assert life == str(epoch)
            assert earlier <= int(offset) <= start_of(server, "t")
            first = reader.expect(PAYLOAD)
            assert first.serial == f"{epoch}@{int(offset) + 100}", "that message is the first"
            assert first.data == b"%096d" % (int(offset) // 100)
            reader.send(detach("t"))
            while reader.receive().type != DETACHED:
                pass


def test_a_topic_made_anew_answers_with_another_serial_unless_nothing_was_missed(
    start: Start,
) -> None:
    server = start(config=SMALL)
    with Wire(server.ws) as live, Wire(server.ws) as publisher:
        serials = [live.attach("t")]
        publisher.publish("t", b"foo", b"bar")
        serials += [found.serial for found in live.expect_payloads(2)]
        destroy(server, "t")
        publisher.publish("t", b"new")
        new = live.expect(PAYLOAD)
        assert new.data == b"new", "who is attached goes on in the next life"
    epoch = epoch_of(server, "t")
    assert new.serial == f"{epoch}@21"
    for serial in serials[:2]:
        with Wire(server.ws) as again:
            assert again.attach("t", serial) == f"{epoch}@14", "foo or bar was missed"
            assert data(again, 1) == [b"new"]
    with Wire(server.ws) as again:
        assert again.attach("t", serials[2]) == serials[2], "all of the old life was received"
        assert data(again, 1) == [b"new"]
    with Wire(server.ws) as again:
        assert again.attach("t", new.serial) == new.serial
        assert again.alive()


@pytest.mark.parametrize("restart", [False, True])
def test_a_destroyed_topic_is_attached_where_it_ended(start: Start, restart: bool) -> None:
    server = start(config=SMALL)
    with Wire(server.ws) as live, Wire(server.ws) as publisher:
        live.attach("t")
        publisher.publish("t", b"foo", b"bar")
        foo, bar = live.expect_payloads(2)
    destroy(server, "t")
    if restart:
        server.kill()
        server.start()
    with (
        Wire(server.ws) as behind,
        Wire(server.ws) as up_to_date,
        Wire(server.ws) as new,
        Wire(server.ws) as publisher,
    ):
        given = behind.attach("t", foo.serial)
        assert given != foo.serial
        assert given.endswith("@14")
        assert up_to_date.attach("t", bar.serial) == bar.serial
        first = new.attach("t")
        assert first.endswith("@14")
        publisher.publish("t", b"new")
        for wire in (behind, up_to_date, new):
            assert data(wire, 1) == [b"new"]
    for serial in (given, first, bar.serial):
        with Wire(server.ws) as again:
            assert again.attach("t", serial) == serial
            assert data(again, 1) == [b"new"]


def test_a_memory_topic_that_began_again_with_its_server_answers_with_another_serial(
    start: Start,
) -> None:
    server = start("--durability=memory")
    with Wire(server.ws) as live, Wire(server.ws) as publisher:
        live.attach("t")
        publisher.publish("t", b"foo", b"bar")
        serials = [found.serial for found in live.expect_payloads(2)]
    server.restart()
    with Wire(server.ws) as publisher:
        publisher.publish("t", b"new", b"and", b"more")
    for serial in serials:
        with Wire(server.ws) as again:
            assert again.attach("t", serial) != serial
            assert data(again, 3) == [b"new", b"and", b"more"]


def test_a_subscriber_that_retention_overtakes_is_told_and_not_left_with_a_gap(
    start: Start,
) -> None:
    """A client compares only the serials of ATTACHED, so it has to attach again."""
    server = start(config=KEEP_LITTLE)
    payloads = [b"%0996d" % number for number in range(12_000)]
    with Wire(server.ws, receive_buffer_bytes=65536) as slow:
        position = offset_of(slow.attach("t"))
        with Wire(server.ws) as publisher:
            for first in range(0, len(payloads), 100):
                publisher.publish("t", *payloads[first : first + 100])
        wait_until(lambda: start_of(server, "t") > 11_000_000, 30, "records to expire")
        messages, closed = slow.until_closed()
    for found in messages:
        assert offset_of(found.serial) == position + 1000, "no gap before it"
        assert found.data == payloads[position // 1000]
        position += 1000
    assert 0 < position < 11_000_000
    assert closed.code == 1008
    assert '"t"' in closed.reason
    with Wire(server.ws) as again:
        given = again.attach("t", messages[-1].serial)
        assert given != messages[-1].serial, "now it knows"
        assert offset_of(given) > 11_000_000
        assert again.expect(PAYLOAD).data == payloads[offset_of(given) // 1000]
