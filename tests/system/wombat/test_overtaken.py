"""A Wombat subscriber that the log overtakes learns of it, although it only compares serials."""

from tests.system.checked import offset_of
from tests.system.conftest import Start
from tests.system.wombat.foreign import PAYLOAD, Message, Wire

CONTENT = bytes(range(256)) * 64  # 16 KiB
RECORD_BYTES = 4 + len(CONTENT)
COUNT = 1000

KEEP = """
durability = "memory"

[limits]
memory_topic_bytes_max = 1048576
"""


def test_a_slow_subscriber_is_told_what_it_missed_when_it_attaches_again(start: Start) -> None:
    server = start(config=KEEP)
    with Wire(server.ws) as publisher, Wire(server.ws, receive_buffer_bytes=65536) as slow:
        slow.attach("t")
        for _ in range(COUNT // 50):
            publisher.publish("t", *[CONTENT] * 50)
        received, closed = slow.until_closed()
    check_without_gap(received, 0)
    assert (closed.code, closed.reason) == (1008, 'messages of "t" are gone: attach again')
    last = received[-1].serial
    with Wire(server.ws) as again:
        serial = again.attach("t", last)
        assert serial != last, "this is how the client knows"
        assert offset_of(serial) > offset_of(last)
        end = COUNT * RECORD_BYTES
        rest = again.expect_payloads((end - offset_of(serial)) // RECORD_BYTES)
        check_without_gap(rest, offset_of(serial))
        assert offset_of(rest[-1].serial) == end
    with Wire(server.ws) as once_more:
        assert once_more.attach("t", rest[-1].serial) == rest[-1].serial


def check_without_gap(messages: list[Message], offset: int) -> None:
    assert messages
    for message in messages:
        assert message.type == PAYLOAD
        assert message.data == CONTENT
        assert offset_of(message.serial) == offset + RECORD_BYTES
        offset += RECORD_BYTES
