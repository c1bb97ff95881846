"""The client's side of channels, message by message: every section of the protocol's page, and lost answers.

Messages are encoded with `msgpack`, so that our codec is tested against another implementation.
"""

from typing import Any

import msgpack
import pytest

from headrace.errors import LocalProtocolError, PayloadTooLargeError, QueueFullError
from headrace.payload.channel import BadMessageError
from headrace.session.channel.client import ChannelClientEvent, ChannelClientSession
from headrace.session.channel.membership import (
    RETRY_S,
    Answered,
    CursorMoved,
    Ended,
    JoinedChannel,
    LeftChannel,
    LostMessages,
    ReceivedMessages,
    Rejected,
    Restored,
    SendAccepted,
)
from headrace.session.client import Broken, ConnectionRefused, ConnectionState, Finished
from headrace.wire.channel import Delivered, MissedMessages, SnapshotBody

C = "doc/1"
WELCOME = {"type": "welcome", "processor": "a", "version": 1, "ping_s": 15}
JOINED = {
    "type": "joined",
    "channel": C,
    "epoch": 0,
    "start": 0,
    "end": 0,
    "cursor": 0,
    "number": 0,
}
HELLO = {"type": "hello", "processor": "a", "token": None, "instance": "", "attempt": 1}
SNAPSHOT = {"offset": 88, "epoch": 1, "payload": {"insert": "z"}}
STATE = SnapshotBody({"insert": "z"}, offset=88, epoch=1)


def message(offset: int, payload: Any = "x") -> dict[str, Any]:
    return {"offset": offset, "processor": "b", "number": 1, "ms": 7, "payload": payload}


def messages(*offsets: int, more: bool = False, channel: str = C) -> dict[str, Any]:
    told = [message(offset) for offset in offsets]
    fields = {"channel": channel, "count": len(told), "messages": told, "more": more}
    return {"type": "messages", **fields}


def received(*offsets: int) -> ReceivedMessages:
    return ReceivedMessages(
        C, [Delivered("x", offset=at, processor="b", number=1, ms=7) for at in offsets]
    )


def sent(number: int, offset: int) -> dict[str, Any]:
    return {"type": "sent", "channel": C, "number": number, "offset": offset}


def error(code: str, of: str, number: int | None = None, *, retry: bool = False) -> dict[str, Any]:
    told = {"type": "error", "code": code, "retry": retry, "text": f"it is {code}", "of": of}
    return told | {"channel": C} | ({} if number is None else {"number": number})


class Client:
    """A session, with its messages decoded as a server receives them."""

    def __init__(self, receive: str = "push", **options: Any) -> None:
        self.session = ChannelClientSession("a", **options)
        self.session.join(C, receive)
        self.now = 0.0

    def open(self) -> list[Any]:
        self.session.connecting()
        self.session.opened(self.now)
        return self.said()

    def connect(self, **joined: Any) -> list[ChannelClientEvent]:
        """Connect and join the channel."""
        opening = self.open()
        assert opening[0] | {"attempt": 1} == HELLO and opening[1]["type"] == "join"
        return self.hear(WELCOME, JOINED | joined)

    def cut(self) -> None:
        self.session.disconnected()

    def hear(self, *told: Any) -> list[ChannelClientEvent]:
        return self.session.receive_data([msgpack.packb(one) for one in told], self.now)

    def tick(self, seconds: float, reading: bool = True) -> list[ChannelClientEvent]:
        self.now += seconds
        return self.session.tick(self.now, reading)

    def said(self, bytes_max: int = 1 << 30) -> list[Any]:
        return [msgpack.unpackb(one) for one in self.session.data_to_send(bytes_max, self.now)]

    def sends(self) -> list[tuple[int, Any]]:
        """Return numbers and payloads of the messages to send, which must all be sends."""
        said = self.said()
        assert all(one["type"] == "send" for one in said), said
        return [(one["number"], one["payload"]) for one in said]

    def send(self, *contents: Any) -> list[int]:
        return [self.session.send(C, content) for content in contents]


# Connecting


def test_hello_and_join_are_said_at_once() -> None:
    client = Client("signal", token="t")
    client.session.join("other")
    assert client.open() == [
        HELLO | {"token": "t"},
        {"type": "join", "channel": C, "receive": "signal"},
        {"type": "join", "channel": "other", "receive": "push"},
    ]
    assert client.session.state is ConnectionState.CONNECTING
    assert client.hear(WELCOME) == []
    assert client.session.state is ConnectionState.CONNECTED
    assert client.hear(JOINED) == [JoinedChannel(C)]
    assert client.said() == []


def test_a_channel_that_is_joined_later_is_joined_on_the_open_connection() -> None:
    client = Client()
    client.connect()
    client.session.join("other")
    assert client.said() == [{"type": "join", "channel": "other", "receive": "push"}]
    with pytest.raises(LocalProtocolError, match="joined already"):
        client.session.join("other")


def test_every_connection_begins_anew() -> None:
    client = Client()
    client.connect()
    client.cut()
    assert client.session.state is ConnectionState.DISCONNECTED
    hello = HELLO | {"attempt": 2}
    assert client.open() == [hello, {"type": "join", "channel": C, "receive": "push"}]


@pytest.mark.parametrize(
    ("code", "kind"),
    [("wrong-credentials", "auth"), ("hello-first", "protocol"), ("bad-message", "protocol")],
)
def test_some_errors_are_the_end(code: str, kind: str) -> None:
    client = Client()
    client.open()
    told = {"type": "error", "code": code, "retry": False, "text": "no"}
    refused, finished = client.hear(told, WELCOME)
    assert refused == ConnectionRefused(kind, "the server refuses this client: no")
    assert isinstance(finished, Finished)
    client.cut()
    assert client.session.state is ConnectionState.REFUSED


def test_a_server_of_another_version_is_refused() -> None:
    client = Client()
    client.open()
    refused, _ = client.hear(WELCOME | {"version": 2})
    assert refused == ConnectionRefused("protocol", "the server speaks version 2, not 1")


@pytest.mark.parametrize(
    "told",
    [
        {"type": "nonsense"},
        {"type": "sent", "channel": C},
        {"type": "acked", "channel": C, "offset": -1},
        {"type": "messages", "channel": C, "messages": [{"offset": 1}], "more": False},
        {"type": "snapshot", "channel": C, "snapshot": {"offset": 1, "epoch": 1}},
        [1, 2],
    ],
)
def test_nonsense_ends_the_connection_and_not_the_client(told: Any) -> None:
    client = Client()
    client.connect()
    [finished] = client.hear(told, WELCOME)
    assert isinstance(finished, Finished) and "broke the protocol" in finished.reason
    client.cut()
    assert client.connect() == [JoinedChannel(C)]


def test_what_is_not_known_is_passed_over() -> None:
    client = Client()
    client.open()
    assert client.hear(WELCOME | {"motto": "x"}, JOINED | {"weather": [1]}) == [JoinedChannel(C)]
    assert client.hear({"type": "signal", "channel": "of another", "name": "pending"}) == []


def test_nothing_comes_before_welcome() -> None:
    client = Client()
    client.open()
    [finished] = client.hear(JOINED)
    assert isinstance(finished, Finished)


def test_a_silent_server_is_pinged_and_then_given_up() -> None:
    client = Client()
    client.connect()
    assert client.session.tick_at == 15
    assert client.tick(15) == []
    assert client.said() == [{"type": "ping"}]
    client.now += 0.25
    assert client.hear({"type": "pong"}) == []
    assert client.session.latency_s == 0.25
    client.tick(15)
    assert client.said() == [{"type": "ping"}]
    [broken] = client.tick(15)
    assert isinstance(broken, Broken)


def test_anything_heard_is_a_sign_of_life() -> None:
    client = Client(ping_interval_s=5)
    client.connect()
    for _ in range(5):
        client.tick(5)
        client.hear({"type": "signal", "channel": C, "name": "pending"})
    assert client.tick(4.9) == []


def test_while_nothing_is_read_silence_proves_nothing() -> None:
    client = Client()
    client.connect()
    for _ in range(5):
        assert client.tick(15, reading=False) == []
        assert client.said() == [{"type": "ping"}]


def test_hello_has_to_be_answered() -> None:
    client = Client(ping_interval_s=5)
    client.open()
    [broken] = client.tick(5)
    assert broken == Broken("the server does not answer `hello`")


# 1. Sending


def test_messages_are_numbered_and_pipelined() -> None:
    client = Client()
    client.connect()
    x, y = client.send({"insert": "x"}, b"y")
    assert client.said() == [
        {"type": "send", "channel": C, "number": 1, "payload": {"insert": "x"}},
        {"type": "send", "channel": C, "number": 2, "bytes": b"y"},
    ]
    assert len(client.session._channels[C].sends) == 2
    assert client.hear(sent(1, 22), sent(2, 40)) == [SendAccepted(C, x, 22), SendAccepted(C, y, 40)]
    assert len(client.session._channels[C].sends) == 0


def test_what_is_sent_offline_goes_out_behind_what_the_server_has() -> None:
    client = Client()
    client.send("x", "y")
    client.connect(number=7)
    assert client.sends() == [(8, "x"), (9, "y")]


@pytest.mark.parametrize("stored", [0, 1, 2, 3])
def test_a_lost_answer_is_found_in_joined(stored: int) -> None:
    client = Client()
    client.connect()
    tickets = client.send("x", "y", "z")
    client.said()
    client.cut()
    joined, *events = client.connect(number=stored)
    assert joined == JoinedChannel(C)
    assert events == [SendAccepted(C, ticket, None) for ticket in tickets[:stored]]
    assert client.sends() == [(1, "x"), (2, "y"), (3, "z")][stored:]


def test_what_never_went_out_has_no_number_yet() -> None:
    # Another process has used the same name meanwhile, which processors should not do.
    client = Client()
    client.connect()
    client.send("x")
    client.cut()
    assert client.connect(number=5) == [JoinedChannel(C)]
    assert client.sends() == [(6, "x")]


def test_a_server_that_has_forgotten_the_processor_gets_everything_that_it_did_not_accept() -> None:
    client = Client()
    client.connect(number=6)
    client.send("x", "y")
    client.said()
    client.hear(sent(7, 10))
    client.cut()
    assert client.connect(number=0) == [JoinedChannel(C)]
    assert client.sends() == [(1, "y")]


def test_a_duplicate_counts_as_accepted() -> None:
    client = Client()
    client.connect()
    [x] = client.send("x")
    client.said()
    told = {"type": "sent", "channel": C, "number": 1, "duplicate": True}
    assert client.hear(told) == [SendAccepted(C, x, None)]
    assert client.hear(told) == []


def test_a_message_that_is_refused_for_good_frees_its_number() -> None:
    client = Client()
    client.connect()
    tickets = client.send("a", "bad", "c", "d")
    assert [number for number, _ in client.sends()] == [1, 2, 3, 4]
    refused = client.hear(error("cannot-fold", "send", 2), error("gap", "send", 3, retry=True))
    assert refused == [Rejected(C, tickets[1], "cannot-fold", "it is cannot-fold")]
    assert client.sends() == [], "two are not answered yet"
    client.hear(sent(1, 10))
    assert client.sends() == []
    client.hear(error("gap", "send", 4, retry=True))
    assert client.sends() == [(2, "c"), (3, "d")]
    assert client.hear(sent(2, 20), sent(3, 30)) == [
        SendAccepted(C, tickets[2], 20),
        SendAccepted(C, tickets[3], 30),
    ]


def test_refusals_of_different_kinds_are_told_of_the_right_messages() -> None:
    client = Client()
    client.connect()
    a, b, c = client.send("a", "b", "c")
    client.said()
    events = client.hear(
        error("bad-content", "send", 2),
        error("cannot-fold", "send", 1),
        error("gap", "send", 3, retry=True),
    )
    assert events == [
        Rejected(C, b, "bad-content", "it is bad-content"),
        Rejected(C, a, "cannot-fold", "it is cannot-fold"),
    ]
    assert client.sends() == [(1, "c")]
    assert client.hear(sent(1, 5)) == [SendAccepted(C, c, 5)]


def test_a_refusal_and_then_a_lost_connection() -> None:
    client = Client()
    client.connect()
    client.send("bad", "b", "c")
    client.said()
    client.hear(error("cannot-fold", "send", 1))
    client.cut()
    assert client.connect(number=0) == [JoinedChannel(C)]
    assert client.sends() == [(1, "b"), (2, "c")]


@pytest.mark.parametrize("code", ["gap", "unavailable"])
def test_what_may_be_tried_again_is_sent_from_the_number_that_joined_says(code: str) -> None:
    client = Client()
    client.connect()
    a, _ = client.send("a", "b")
    client.said()
    client.hear(error(code, "send", 1, retry=True))
    assert client.tick(RETRY_S) == [] and client.said() == [], "the second is not answered yet"
    client.hear(error("gap", "send", 2, retry=True))
    assert client.said() == []
    assert client.session.tick_at == client.now + RETRY_S
    client.tick(RETRY_S)
    assert client.said() == [{"type": "join", "channel": C, "receive": "push"}]
    assert client.session.tick_at > client.now, "nothing more to do for now"
    assert client.hear(JOINED | {"number": 1}) == [JoinedChannel(C), SendAccepted(C, a, None)]
    assert client.sends() == [(2, "b")]


def test_not_joined_means_join_again() -> None:
    client = Client()
    client.connect()
    client.send("a", "b")
    client.said()
    client.hear(error("not-joined", "send", 1))
    assert client.said() == []
    client.hear(error("not-joined", "send", 2))
    assert [one["type"] for one in client.said()] == ["join"]
    client.hear(JOINED)
    assert client.sends() == [(1, "a"), (2, "b")]


def test_what_is_sent_again_keeps_its_order_however_it_was_refused() -> None:
    client = Client()
    client.connect()
    client.send("a", "b", "c")
    client.said()
    client.hear(error("gap", "send", 3, retry=True), error("not-joined", "send", 1))
    client.hear(error("gap", "send", 2, retry=True))
    assert [one["type"] for one in client.said()] == ["join"]
    client.hear(JOINED)
    assert client.sends() == [(1, "a"), (2, "b"), (3, "c")]


def test_only_so_much_goes_out_at_once() -> None:
    client = Client()
    client.connect()
    client.send(*("x" * 1000 for _ in range(10)))
    assert [one["number"] for one in client.said(2000)] == [1, 2]
    client.tick(15)
    ping, *_ = client.said(2000)
    assert ping == {"type": "ping"}, "it does not wait behind messages"


def test_the_queue_is_bounded() -> None:
    client = Client(queue_max=2)
    client.send("a", "b")
    assert not client.session.has_room(C)
    with pytest.raises(QueueFullError, match="2 messages"):
        client.send("c")
    client.connect()
    client.said()
    client.hear(sent(1, 10))
    client.send("c")
    assert client.sends() == [(3, "c")]


def test_the_queue_is_bounded_in_bytes() -> None:
    client = Client(queue_bytes_max=2000)
    client.send("x" * 1990, "y")
    client.send("z" * 100)
    with pytest.raises(QueueFullError):
        client.send("one more")


@pytest.mark.parametrize(
    "content",
    [(1, 2), {1: "x"}, float("nan"), {"a": b"x"}, object(), "\ud800", [[]] * 3 + [{"x": (1,)}]],
)
def test_what_json_does_not_have_is_refused_before_it_is_sent(content: Any) -> None:
    client = Client()
    with pytest.raises(BadMessageError, match="what JSON has"):
        client.send(content)
    assert len(client.session._channels[C].sends) == 0


def test_the_largest_message() -> None:
    client = Client()
    client.send(bytes(262_144 - 9), "x" * (262_144 - 11))
    for content in (bytes(262_144), "x" * 262_144):
        with pytest.raises(PayloadTooLargeError, match="262144"):
            client.send(content)


# 2. Receiving by signal


def test_a_signal_is_followed_by_a_fetch() -> None:
    client = Client("signal")
    client.connect()
    assert client.said() == []
    client.hear({"type": "signal", "channel": C, "name": "pending"})
    assert client.said() == [{"type": "fetch", "channel": C, "ack": None, "max": None}]
    assert client.hear(messages(26, more=True)) == [received(26)]
    client.session.ack(C, 26)
    assert client.said() == [{"type": "ack", "channel": C, "offset": 26}]
    client.hear({"type": "acked", "channel": C, "offset": 26})
    client.hear({"type": "signal", "channel": C, "name": "pending"})
    assert client.said() == [], "what came is not taken yet"
    client.session.more(C)
    assert [one["type"] for one in client.said()] == ["fetch"]


def test_a_signal_during_a_fetch_is_not_lost() -> None:
    client = Client("signal")
    client.connect()
    signal = {"type": "signal", "channel": C, "name": "pending"}
    client.hear(signal)
    client.said()
    client.hear(signal, messages())
    assert [one["type"] for one in client.said()] == ["fetch"]


# 4. Receiving by push


def test_messages_come_and_are_acknowledged() -> None:
    client = Client()
    client.connect()
    assert client.hear(messages(26, 52)) == [received(26, 52)]
    client.session.ack(C, 26)
    client.session.ack(C, 52)
    assert client.said() == [{"type": "ack", "channel": C, "offset": 52}]
    assert not client.session.is_acknowledged(C)
    assert client.hear({"type": "acked", "channel": C, "offset": 60}) == [CursorMoved(C, 60)]
    assert client.session.is_acknowledged(C) and client.session.acked(C) == 60


def test_one_acknowledgement_is_under_way_at_a_time() -> None:
    client = Client()
    client.connect()
    client.hear(messages(1, 2, 3))
    client.session.ack(C, 1)
    assert [one["offset"] for one in client.said()] == [1]
    client.session.ack(C, 2)
    client.session.ack(C, 3)
    assert client.said() == []
    client.hear({"type": "acked", "channel": C, "offset": 1})
    assert [one["offset"] for one in client.said()] == [3]


def test_an_acknowledgement_that_was_not_answered_is_said_again() -> None:
    client = Client()
    client.connect()
    client.hear(messages(26))
    client.session.ack(C, 26)
    client.said()
    client.cut()
    client.connect(end=26)
    assert client.hear(messages(26)) == [], "it came before"
    assert client.said() == [{"type": "ack", "channel": C, "offset": 26}]
    client.hear({"type": "acked", "channel": C, "offset": 26})
    client.cut()
    client.connect(end=26, cursor=26)
    assert client.said() == []


def test_what_comes_again_is_told_once() -> None:
    client = Client()
    client.connect()
    client.hear(messages(26, 52))
    client.cut()
    client.connect(end=80)
    assert client.hear(messages(26, 52, 80)) == [received(80)]


def test_only_what_came_can_be_acknowledged() -> None:
    client = Client()
    client.connect()
    client.hear(messages(26))
    with pytest.raises(LocalProtocolError, match="up to 27"):
        client.session.ack(C, 27)


def test_messages_that_cannot_be_read_any_more_are_told() -> None:
    client = Client()
    client.connect()
    assert client.hear(messages(26) | {"lost": 3}) == [
        LostMessages(C, MissedMessages(3, "lost")),
        received(26),
    ]


# 5. Polling


def test_it_is_asked_again_and_again() -> None:
    client = Client("poll", poll_interval_s=2.0)
    client.connect()
    fetch = {"type": "fetch", "channel": C, "ack": None, "max": None}
    assert client.said() == [fetch]
    assert client.said() == []
    client.hear(messages())
    assert client.said() == []
    assert client.session.tick_at == 2
    client.tick(2)
    assert client.said() == [fetch]
    assert client.hear(messages(26)) == [received(26)]
    client.tick(10)
    assert client.said() == [], "nobody has taken what there is"
    client.session.ack(C, 26)
    client.session.more(C)
    ack, again = client.said()
    assert (ack["type"], again) == ("ack", fetch)


def test_what_is_not_acknowledged_does_not_make_it_ask_without_end() -> None:
    client = Client("poll", poll_interval_s=2.0)
    client.connect()
    client.said()
    client.hear(messages(26, more=True))
    client.session.more(C)
    client.said()
    assert client.hear(messages(26, more=True)) == []
    client.session.more(C)
    assert client.said() == []
    assert client.session.tick_at == 2


# 6. Forgetting


def test_a_snapshot_comes_before_the_messages_behind_it() -> None:
    client = Client()
    missed = {"messages": 3, "reason": "trimmed"}
    joined = {"start": 88, "end": 110, "cursor": 88, "missed": missed, "snapshot": SNAPSHOT}
    events = client.connect(**joined)
    assert events == [JoinedChannel(C), Restored(C, STATE, MissedMessages(3, "trimmed"), 88)]
    assert client.said() == [], "nobody has taken it"
    client.session.ack(C, 88)
    assert client.said() == [{"type": "ack", "channel": C, "offset": 88}]
    # The answer is lost. The server repeats the state, which the client already has.
    client.cut()
    assert client.connect(**joined) == [JoinedChannel(C)]
    assert client.said() == [{"type": "ack", "channel": C, "offset": 88}]
    assert client.hear(messages(110)) == [received(110)]


def test_a_snapshot_at_the_very_beginning_is_told() -> None:
    client = Client()
    snapshot = SNAPSHOT | {"offset": 0}
    [_, restored] = client.connect(snapshot=snapshot)
    assert isinstance(restored, Restored) and restored.offset == 0


def test_who_has_everything_that_a_snapshot_covers_misses_nothing() -> None:
    client = Client()
    client.connect()
    client.hear(messages(26, 52, 88, 99))
    client.cut()
    missed = {"messages": 3, "reason": "destroyed"}
    joined = {"start": 88, "end": 110, "cursor": 88, "missed": missed, "snapshot": SNAPSHOT}
    assert client.connect(**joined) == [JoinedChannel(C)]
    assert client.hear(messages(99, 110)) == [received(110)]


def test_missing_messages_without_a_snapshot_are_told_too() -> None:
    client = Client()
    missed = {"messages": None, "reason": "lost"}
    events = client.connect(start=88, end=88, cursor=88, missed=missed)
    assert events == [JoinedChannel(C), Restored(C, None, MissedMessages(None, "lost"), 88)]


def test_a_log_that_is_shorter_than_it_was_is_followed() -> None:
    client = Client()
    client.connect()
    client.hear(messages(26, 52))
    client.session.ack(C, 52)
    client.said()
    client.cut()
    events = client.connect(end=26)
    assert events == [JoinedChannel(C), Restored(C, None, MissedMessages(None, "lost"), 0)]
    assert client.hear(messages(26)) == [received(26)]
    assert client.said() == []


# Snapshots and uploads


def test_the_last_known_state_is_asked_for() -> None:
    client = Client()
    client.connect()
    first, second = client.session.snapshot(C), client.session.snapshot(C)
    assert client.said() == [{"type": "snapshot", "channel": C}]
    told = {"type": "snapshot", "channel": C, "snapshot": SNAPSHOT}
    assert client.hear(told) == [Answered(C, first, STATE)]
    assert client.said() == [{"type": "snapshot", "channel": C}]
    client.cut()
    client.connect()
    assert client.said() == [{"type": "snapshot", "channel": C}]
    assert client.hear(told | {"snapshot": None}) == [Answered(C, second, None)]
    assert client.hear(told) == []


def test_uploads_go_one_after_the_other() -> None:
    client = Client()
    client.connect()
    one, two = client.session.upload(C, 26, [1]), client.session.upload(C, 52, b"2")
    assert client.said() == [{"type": "upload", "channel": C, "offset": 26, "payload": [1]}]
    assert client.hear(error("not-uploaded", "upload")) == [
        Rejected(C, one, "not-uploaded", "it is not-uploaded")
    ]
    assert client.said() == [{"type": "upload", "channel": C, "offset": 52, "bytes": b"2"}]
    assert client.hear({"type": "uploaded", "channel": C, "offset": 52}) == [Answered(C, two, 52)]


def test_a_question_that_cannot_be_answered_for_now_is_asked_again() -> None:
    client = Client()
    client.connect()
    ticket = client.session.snapshot(C)
    client.said()
    assert client.hear(error("unavailable", "snapshot", retry=True)) == []
    assert client.said() == []
    client.tick(RETRY_S)
    assert [one["type"] for one in client.said()] == ["join"]
    client.hear(JOINED)
    assert [one["type"] for one in client.said()] == ["snapshot"]
    told = {"type": "snapshot", "channel": C, "snapshot": None}
    assert client.hear(told) == [Answered(C, ticket, None)]


def test_a_state_that_no_server_reads_is_not_sent() -> None:
    client = Client()
    with pytest.raises(PayloadTooLargeError):
        client.session.upload(C, 26, bytes(3 << 20))


# Ends


def test_leaving() -> None:
    client = Client()
    client.session.join("other")
    client.open()
    client.hear(WELCOME, JOINED)
    client.session.leave(C)
    assert client.said() == [{"type": "leave", "channel": C}]
    assert client.said() == []
    client.cut()
    assert client.open()[1:] == [
        {"type": "leave", "channel": C},
        {"type": "join", "channel": "other", "receive": "push"},
    ]
    client.hear(WELCOME)
    assert client.hear({"type": "left", "channel": C}) == [LeftChannel(C)]
    with pytest.raises(LocalProtocolError, match="not joined"):
        client.session.send(C, "x")


def test_the_last_channel_takes_the_client_with_it() -> None:
    client = Client()
    client.connect()
    client.session.leave(C)
    client.said()
    left, finished = client.hear({"type": "left", "channel": C})
    assert left == LeftChannel(C) and isinstance(finished, Finished)
    client.cut()
    assert client.session.state is ConnectionState.REFUSED


def test_who_is_replaced_does_not_come_back() -> None:
    client = Client()
    client.connect()
    client.send("x")
    ended, finished = client.hear({"type": "left", "channel": C, "reason": "replaced"})
    assert isinstance(ended, Ended) and ended.code == "replaced"
    assert isinstance(finished, Finished)
    assert client.said() == []


def test_who_has_left_elsewhere_does_not_come_back() -> None:
    client = Client()
    client.connect()
    client.send("x")
    ended, finished = client.hear({"type": "left", "channel": C, "reason": "left"})
    assert isinstance(ended, Ended) and ended.code == "left"
    assert ended.text == f"over HTTP or on another connection, the processor has left channel {C!r}"
    assert isinstance(finished, Finished)
    client.cut()
    assert client.session.state is ConnectionState.REFUSED


def test_who_wishes_to_leave_may_have_left_elsewhere() -> None:
    for is_said in (False, True):
        client = Client()
        client.connect()
        client.session.leave(C)
        if is_said:
            client.said()
        left, _ = client.hear({"type": "left", "channel": C, "reason": "left"})
        assert left == LeftChannel(C)


@pytest.mark.parametrize("code", ["forbidden", "bad-channel", "too-many"])
def test_a_join_that_is_refused_for_good_ends_the_channel(code: str) -> None:
    client = Client()
    client.session.join("other")
    client.open()
    client.hear(WELCOME)
    assert client.hear(error(code, "join")) == [Ended(C, code, f"it is {code}")]
    assert client.hear(JOINED | {"channel": "other"}) == [JoinedChannel("other")]


def test_a_join_that_may_succeed_later_is_tried_again() -> None:
    client = Client()
    client.open()
    client.hear(WELCOME)
    assert client.hear(error("unavailable", "join", retry=True)) == []
    assert client.said() == []
    client.tick(RETRY_S)
    assert [one["type"] for one in client.said()] == ["join"]
    assert client.hear(JOINED) == [JoinedChannel(C)]


@pytest.mark.parametrize("of", ["ack", "fetch"])
def test_not_joined_is_mended_whatever_it_was_said_to(of: str) -> None:
    client = Client("poll")
    client.connect()
    client.said()
    client.hear(messages(26))
    client.session.ack(C, 26)
    client.session.more(C)
    ack, fetch = client.said()
    assert (ack["type"], fetch["type"]) == ("ack", "fetch")
    client.hear(error("not-joined", of))
    assert client.said() == [], "the other one is not answered yet"
    client.hear(error("not-joined", "fetch" if of == "ack" else "ack"))
    assert [one["type"] for one in client.said()] == ["join"]
    client.hear(JOINED | {"end": 26})
    assert [one["type"] for one in client.said()] == ["ack", "fetch"]


# Joins from a state, and many channels


def test_the_first_join_asks_for_the_state_and_every_other_for_what_lies_behind() -> None:
    client = Client()
    client.session = ChannelClientSession("a")
    client.session.join(C, from_state=True, lease_s=60)
    join = {"type": "join", "channel": C, "receive": "push", "lease_s": 60}
    assert client.open()[1] == join | {"from": "state"}
    empty = {"offset": 0, "epoch": 0, "payload": None}
    told = client.hear(WELCOME, JOINED | {"snapshot": empty})
    assert told == [JoinedChannel(C), Restored(C, SnapshotBody(None, offset=0, epoch=0), None, 0)]
    assert client.hear(messages(20, 40)) == [received(20, 40)]
    client.cut()
    assert client.open()[1] == join | {"from": 40}
    assert client.hear(WELCOME, JOINED | {"end": 60, "cursor": 40}) == [JoinedChannel(C)]
    assert client.hear(messages(60)) == [received(60)]
    # The server no longer has what the client has: a state replaces it, even an earlier one.
    client.cut()
    assert client.open()[1] == join | {"from": 60}
    told = client.hear(WELCOME, JOINED | {"end": 88, "cursor": 88, "snapshot": SNAPSHOT})
    assert told == [JoinedChannel(C), Restored(C, STATE, None, 88)]


def test_a_channel_that_nothing_more_is_wanted_of_is_polled_by_nobody() -> None:
    session = ChannelClientSession("a", is_shared=True)
    client = Client()
    client.session = session
    assert [one["type"] for one in client.open()] == ["hello"]
    client.hear(WELCOME)
    session.join(C, lease_s=60)
    assert client.said()[0]["type"] == "join"
    assert client.hear(JOINED) == [JoinedChannel(C)]
    session.part(C)
    poll = {"type": "join", "channel": C, "receive": "poll", "lease_s": 60}
    assert client.said() == [poll]
    assert client.hear(messages(20)) == []
    # After a new join, the answer to the first join is not taken for that to the second.
    session.join(C, from_state=True)
    assert client.said()[0]["from"] == "state"
    assert client.hear(JOINED) == []
    told = client.hear(JOINED | {"end": 88, "cursor": 88, "snapshot": SNAPSHOT})
    assert told == [JoinedChannel(C), Restored(C, STATE, None, 88)]
    assert session.state is ConnectionState.CONNECTED


def test_a_shared_connection_outlives_its_last_channel() -> None:
    client = Client()
    client.session = ChannelClientSession("a", is_shared=True)
    client.session.join(C)
    client.open()
    client.hear(WELCOME, JOINED)
    told = client.hear({"type": "left", "channel": C, "reason": "destroyed"})
    text = f"an operator has destroyed channel {C!r}"
    assert told == [Ended(C, "destroyed", text)]
    client.session.join(C)
    assert client.said()[0]["type"] == "join"
