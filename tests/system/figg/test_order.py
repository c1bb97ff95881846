"""Several publishers and subscribers at once: one order for all, verified by the log checker."""

from contextlib import ExitStack

import pytest

from headrace.testing import LogChecker
from tests.system.checked import assert_sound, end_of, in_threads, publisher, subscriber
from tests.system.conftest import SMALL, Start
from tests.system.figg import foreign as figg
from tests.system.figg.foreign import Client, Wire

RECORDS = 5000


@pytest.mark.parametrize("durability", ["synced", "written", "memory"])
def test_publishers_and_subscribers_see_one_order(start: Start, durability: str) -> None:
    server = start(f"--durability={durability}", config=SMALL)
    checker = LogChecker()
    with ExitStack() as stack:
        publishers = [stack.enter_context(publisher(server, checker, f"p{i}")) for i in range(3)]
        subscribers = [stack.enter_context(subscriber(server, checker, f"s{i}")) for i in range(4)]
        for reader in subscribers[:2]:
            reader.attach(b"t", 0)

        def publish_all(client: Client, name: int) -> None:
            for number in range(RECORDS):
                client.publish(b"t", b"%d/%d/" % (name, number) + bytes(number % 50))
                if (name, number) == (0, RECORDS // 2):
                    subscribers[2].attach(b"t", 0)
                    subscribers[3].attach(b"t")
            client.flush()

        with in_threads(*(lambda c=c, n=n: publish_all(c, n) for n, c in enumerate(publishers))):
            pass
        end = end_of(server, b"t")
        for reader in subscribers:
            reader.wait_offset(b"t", end)
    assert_sound(checker)
    assert checker.records("t") == 3 * RECORDS


def test_a_subscriber_that_reconnects_all_the_time_resumes_without_gap_or_double(
    start: Start,
) -> None:
    server = start(config=SMALL)
    checker = LogChecker()
    with publisher(server, checker, "p") as writer:

        def publish_all() -> None:
            for number in range(RECORDS):
                writer.publish(b"t", b"%d" % number)
            writer.flush()

        with in_threads(publish_all):
            position: int | None = 0
            while position is None or position < RECORDS * 4:
                with subscriber(server, checker, "s") as reader:
                    reader.attach(b"t", position)
                    reader.wait_offset(b"t", min((position or 0) + 500, RECORDS * 4))
                position = checker.position("s", "t")
        end = end_of(server, b"t")
        with subscriber(server, checker, "s") as reader:
            reader.attach(b"t", position)
            reader.wait_offset(b"t", end)
    assert_sound(checker)
    assert checker.records("t") == RECORDS


def test_a_record_is_shown_to_subscribers_only_when_it_can_be_resumed_from(start: Start) -> None:
    """A subscriber that sees a record may immediately attach just past it, or ask for the topic's end."""
    server = start()
    with Wire(server.figg) as live, Wire(server.figg) as writer:
        live.attach(b"t")
        for number in range(200):
            writer.send(figg.publish(b"t", number, b"foo"))
            offset = live.expect(figg.DATA).number
            assert end_of(server, b"t") == offset
            writer.wait_ack(number)
