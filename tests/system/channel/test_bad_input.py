"""Every kind of bad input over WebSocket: it gets a clear error, is not stored, and harms nobody else."""

import itertools
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from headrace.testing import ServerProcess, wait_until
from tests.system.conftest import Start
from tests.system.support import resident_bytes
from tests.tools import sampled

WAIT_S = 30
MIB = 1 << 20
POLICY, NOT_UTF8, TOO_BIG = 1008, 1007, 1009
HUGE = 10 * MIB
MEMORY_BYTES_MAX = 100 * MIB
"""Maximum memory for a peer that reads nothing. Without limits it would be several times that."""

NUMBER_MAX = 2**53 - 1
OFFSET_MAX = 2**63 - 1

_numbers = itertools.count()

Message = dict[str, Any]


class Peer:
    """A connection that sends given messages, in JSON or MessagePack."""

    def __init__(self, connection: ClientConnection, binary: bool) -> None:
        self.connection = connection
        self.binary = binary

    def write(self, message: object) -> str | bytes:
        return msgpack.packb(message) if self.binary else json.dumps(message)

    def say(self, kind: str, **fields: object) -> None:
        self.connection.send(self.write({"type": kind, **fields}))

    def say_late(self, kind: str, **fields: object) -> None:
        """Send a message that nobody receives; the connection may already be closed."""
        with suppress(ConnectionClosed):
            self.say(kind, **fields)

    def hear(self) -> Message:
        data = self.connection.recv(WAIT_S)
        assert isinstance(data, bytes) is self.binary
        message: Message = msgpack.unpackb(data) if isinstance(data, bytes) else json.loads(data)
        return message

    def ask(self, kind: str, **fields: object) -> Message:
        self.say(kind, **fields)
        return self.hear()

    def hello(self, processor: str) -> "Peer":
        assert self.ask("hello", processor=processor)["type"] == "welcome"
        return self

    def join(self, channel: str, receive: str = "poll") -> "Peer":
        assert self.ask("join", channel=channel, receive=receive)["type"] == "joined"
        return self

    def send(self, channel: str, number: int, payload: object = 1) -> Message:
        answer = self.ask("send", channel=channel, number=number, payload=payload)
        assert answer["type"] == "sent", answer
        return answer

    def until_closed(self) -> list[Message]:
        heard = []
        try:
            while True:
                heard.append(self.hear())
        except ConnectionClosed:
            return heard

    @property
    def code(self) -> int | None:
        return self.connection.close_code


Dial = Callable[[], Peer]


@pytest.fixture(params=[False, True], ids=["JSON", "MessagePack"])
def binary(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def dial(abused: ServerProcess, binary: bool) -> Iterator[Dial]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(dialled(abused, binary))


class dialled:  # noqa: N801 - used as a function
    def __init__(self, server: ServerProcess, binary: bool) -> None:
        host, port = server.ws
        url = f"ws://{host}:{port}/v1/channels"
        self._connecting = connect(url, max_size=None, compression=None, ping_interval=None)
        self._binary = binary

    def __enter__(self) -> Peer:
        return Peer(self._connecting.__enter__(), self._binary)

    def __exit__(self, *error: Any) -> None:
        self._connecting.__exit__(*error)


@pytest.fixture
def name() -> str:
    return f"doc/{next(_numbers)}"


class Bystander:
    """Another pair of peers in their own channel, which must keep working."""

    def __init__(self, dial: Dial, name: str) -> None:
        self.channel = f"beside {name}"
        self.sender = dial().hello("sender").join(self.channel)
        self.receiver = dial().hello("receiver").join(self.channel, "push")

    def is_well(self) -> bool:
        self.sender.send(self.channel, 1)
        heard = self.receiver.hear()
        return heard["type"] == "messages" and heard["count"] == 1


def facts(server: ServerProcess, name: str) -> Message | None:
    answer = httpx.get(f"{server.http_url}/v1/channel", params={"name": name})
    assert answer.status_code in (200, 404), answer.text
    found: Message | None = answer.json() if answer.status_code == 200 else None
    return found


def last_number(server: ServerProcess, name: str, processor: str = "p") -> int:
    """Return the last stored number of the processor: nothing after it was stored."""
    told = facts(server, name)
    assert told is not None
    return next(one["number"] for one in told["members"] if one["processor"] == processor)


# Errors that end a connection

WRONG: dict[str, list[object]] = {
    "text": [None, 5, 1.5, True, ["x"], {"x": 1}],
    "number": [None, 0, -1, 2**53, 2**63, 2**64 - 1, 1.5, "1", True, [1], {}],
    "offset": [None, -1, 2**63, 2**64 - 1, 1.5, "0", True, [0], {}],
    "place": [-1, 2**63, 2**64 - 1, 1.5, "0", True, [0], {}],
    "count": [0, -1, 2**31 + 1, 1.5, "1", True, [1], {}],
    "receive": [None, 1, "", "PUSH", "pushed", ["push"]],
    "bytes": [None, 5, True, ["eA=="], {}],
}
"""Values that are invalid for a field of this kind."""

FIELDS: dict[str, dict[str, str]] = {
    "join": {"channel": "text", "receive": "receive"},
    "leave": {"channel": "text"},
    "send": {"channel": "text", "number": "number", "bytes": "bytes"},
    "fetch": {"channel": "text", "ack": "place", "max": "count"},
    "ack": {"channel": "text", "offset": "offset"},
    "upload": {"channel": "text", "offset": "offset", "bytes": "bytes"},
    "snapshot": {"channel": "text"},
}
OPTIONAL = {"receive", "ack", "max", "bytes"}


def good(kind: str, name: str) -> Message:
    more: dict[str, Message] = {
        "send": {"number": 2, "payload": 1},
        "upload": {"offset": 0, "payload": 1},
        "ack": {"offset": 0},
    }
    return {"type": kind, "channel": name} | more.get(kind, {})


def wrong_fields(name: str) -> Iterator[Message]:
    for kind, fields in FIELDS.items():
        for field, sort in fields.items():
            for value in WRONG[sort]:
                yield good(kind, name) | {field: value}
            if field not in OPTIONAL:
                yield {key: value for key, value in good(kind, name).items() if key != field}


def no_messages() -> list[object]:
    return [
        *(None, True, 5, 1.5, "ping", [], ["ping"], {}, {"typ": "ping"}),
        *({"type": value} for value in (None, 5, True, [], {}, "", "Ping", "ping ", "nope")),
        # Only servers send these.
        *({"type": kind, "channel": "x"} for kind in ("welcome", "joined", "sent", "messages")),
        *({"type": kind, "channel": "x"} for kind in ("signal", "acked", "left", "error", "pong")),
    ]


def nested(depth: int, *, binary: bool) -> bytes:
    return b"\x91" * depth + b"\xc0" if binary else b"[" * depth + b"1" + b"]" * depth


def raw_send(name: str, payload: bytes, *, binary: bool) -> str | bytes:
    """Encode a `send` whose payload is given as raw bytes."""
    if not binary:
        head = json.dumps({"type": "send", "channel": name, "number": 2})
        return (head[:-1] + ', "payload": ' + payload.decode() + "}").encode().decode()
    head = msgpack.packb({"type": "send", "channel": name, "number": 2})
    return b"\x84" + head[1:] + msgpack.packb("payload") + payload


def unreadable(name: str, *, binary: bool) -> list[str | bytes]:
    deep = raw_send(name, nested(100_000, binary=binary), binary=binary)
    if not binary:
        texts = [
            *("", " ", "hello", "{", '{"type": "ping"', '{"type": "ping"}}', "{'type': 'ping'}"),
            *('{"type": "ping"} {"type": "ping"}', '{"type": "ping",}', "\ufeff{}", "\0"),
            '{"type": "join", "channel": "\\ud800"}',
            '{"type": "join", "channel": "a\nb"}',
            '{"type": "join", "channel": "\\x"}',
            '{"type": "ack", "channel": "x", "offset": 1e400}',
            '{"type": "ack", "channel": "x", "offset": ' + "9" * 5000 + "}",
            '{"type": "ping", "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
            '{"x":' * 50_000 + "1" + "}" * 50_000,
            raw_send(name, b"NaN", binary=False),
            raw_send(name, b'"\\ud800"', binary=False),
            raw_send(name, b"tru", binary=False),
            json.dumps({"type": "send", "channel": name, "number": 2, "bytes": "no base64!"}),
        ]
        return [*texts, deep]
    ping = msgpack.packb({"type": "ping"})
    return [
        *(b"", b"\xc1", b"hello", b'{"type": "ping"}', ping[:-1], ping + b"\0", ping * 2),
        *(b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff" * 1000, b"\xc9\xff\xff\xff\xff\1"),
        b"\x82\xa4type\xa4join\xa7channel\xa2\xff\xfe",
        b"\x82\xa4type\xa4join\xa7channel\xa3\xed\xa0\x80",
        b"\x82\xa4type\xa4join\xa7channel\xdb\xff\xff\xff\xffx",
        b"\x82\xa4type\xa4ping\xa1x" + nested(100_000, binary=True),
        msgpack.packb({b"type": b"ping"}),
        msgpack.packb({"type": b"ping"}),
        msgpack.packb({"type": "send", "channel": name, "number": 2, "bytes": "eA=="}),
        msgpack.packb(msgpack.ExtType(5, b"x")),
        raw_send(name, b"\xc6\xff\xff\xff\xffabc", binary=True),
        deep,
    ]


def bad_messages(kind: str, name: str, peer: Peer) -> list[str | bytes]:
    if kind == "unreadable":
        return unreadable(name, binary=peer.binary)
    if kind == "no messages":
        return [peer.write(value) for value in no_messages()]
    # In a usual run, each encoding has half of them.
    wrong = sampled(list(wrong_fields(name)), 2, int(peer.binary))
    return [peer.write(value) for value in wrong]


@pytest.mark.parametrize("kind", ["unreadable", "no messages", "wrong fields"])
def test_a_bad_message_closes_its_connection_and_what_came_before_is_stored(
    abused: ServerProcess, dial: Dial, name: str, binary: bool, kind: str
) -> None:
    bystander = Bystander(dial, name)
    for number, bad in enumerate(bad_messages(kind, f"{name}/0", Peer(None, binary))):  # type: ignore[arg-type]
        mine = f"{name}/{number}"
        with dialled(abused, binary) as peer:
            peer.hello("p").join(mine)
            peer.say("send", channel=mine, number=1, payload=1)
            peer.connection.send(bad)
            peer.say_late("send", channel=mine, number=2, payload=1)
            heard = peer.until_closed()
        said = repr(bad)[:100]
        assert sorted(one["type"] for one in heard) == ["error", "sent"], said
        error = next(one for one in heard if one["type"] == "error")
        assert (error["code"], error["retry"]) == ("bad-message", False), said
        assert error["text"], said
        assert peer.code == POLICY, said
        assert last_number(abused, mine) == 1, said
    assert bystander.is_well()


def test_text_and_binary_do_not_mix(abused: ServerProcess, dial: Dial, name: str) -> None:
    peer = dial().hello("p").join(name)
    ping = {"type": "ping"}
    peer.connection.send(json.dumps(ping) if peer.binary else msgpack.packb(ping))
    (error,) = peer.until_closed()
    assert error["code"] == "bad-message"
    assert peer.code == POLICY


@pytest.mark.parametrize("kind", [*FIELDS, "ping"])
def test_nothing_is_heard_before_hello(
    abused: ServerProcess, dial: Dial, name: str, kind: str
) -> None:
    peer = dial()
    peer.connection.send(peer.write(good(kind, name)))
    (error,) = peer.until_closed()
    assert (error["code"], error["retry"], peer.code) == ("hello-first", False, POLICY)
    assert facts(abused, name) is None


def test_hello_comes_once(abused: ServerProcess, dial: Dial, name: str) -> None:
    for processor in ("p", "q"):
        peer = dial().hello("p").join(name)
        peer.say("hello", processor=processor)
        peer.say_late("join", channel=f"{name}/late")
        (error,) = peer.until_closed()
        assert (error["code"], error["retry"], peer.code) == ("hello-first", False, POLICY)
    assert facts(abused, f"{name}/late") is None
    assert last_number(abused, name) == 0


PROCESSORS: list[object] = [
    *("", "x" * 256, "é" * 128, "x" * MIB, "a\0b", "a\nb", "\x1b[31m", "\x7f", "\x85"),
    *(None, 5, True, ["p"], {"p": 1}),
]


@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda name: repr(name)[:20])
def test_a_processor_has_a_name(dial: Dial, processor: object) -> None:
    peer = dial()
    peer.say("hello", processor=processor)
    (error,) = peer.until_closed()
    assert (error["code"], error["retry"], peer.code) == ("bad-message", False, POLICY)
    assert len(error["text"]) < 1000


def test_a_message_of_ten_megabytes_is_not_even_read(
    abused: ServerProcess, dial: Dial, name: str
) -> None:
    bystander = Bystander(dial, name)
    peer = dial().hello("p").join(name)
    before = resident_bytes(abused.pid)
    message = peer.write(good("send", name) | {"number": 1, "payload": "x" * HUGE})
    # The message is sent only once: a peer that sends more than the server discards may be cut off before it
    # has read the reason.
    with suppress(ConnectionClosed):
        peer.connection.send(message)
    assert peer.until_closed() == []
    assert peer.code == TOO_BIG
    assert resident_bytes(abused.pid) < before + HUGE
    assert last_number(abused, name) == 0
    assert bystander.is_well()


def test_a_text_that_is_not_utf_8_closes_its_connection(abused: ServerProcess, name: str) -> None:
    for data in (b"\xff\xfe", b'{"type": "join", "channel": "\xff"}', b"\xed\xa0\x80", b"\xc3"):
        with dialled(abused, binary=False) as peer:
            peer.hello("p").join(name)
            peer.connection.send(data, text=True)
            peer.until_closed()
            assert peer.code == NOT_UTF8
    assert last_number(abused, name) == 0


# Errors after which the connection stays open


def refused(peer: Peer, message: Message | str | bytes, code: str, *, retry: bool = False) -> None:
    """Check that the answer is an error that names its subject, and nothing else."""
    peer.connection.send(peer.write(message) if isinstance(message, dict) else message)
    error = peer.hear()
    said = f"{str(message)[:100]} → {str(error)[:300]}"
    assert error["type"] == "error", said
    assert (error["code"], error["retry"]) == (code, retry), said
    assert error["text"], said
    assert len(error["text"]) < 2000, said
    if isinstance(message, dict):
        for field in ("channel", "number"):
            assert error.get(field) == message.get(field), said
        assert error["of"] == message["type"], said
    assert peer.ask("ping") == {"type": "pong"}, said


CHANNELS = ["", "x" * 248, "é" * 124, "x" * MIB]


@pytest.mark.parametrize("kind", FIELDS)
def test_a_channel_has_a_name(dial: Dial, kind: str) -> None:
    peer = dial().hello("p")
    for channel in CHANNELS:
        refused(peer, good(kind, channel) | {"channel": channel}, "bad-channel")


@pytest.mark.parametrize("kind", ["send", "fetch", "ack", "upload"])
def test_who_has_not_joined_can_do_nothing(
    abused: ServerProcess, dial: Dial, name: str, kind: str
) -> None:
    peer = dial().hello("p")
    refused(peer, good(kind, name), "not-joined")
    assert facts(abused, name) is None
    peer.join(name)
    assert peer.ask("leave", channel=name)["type"] == "left"
    refused(peer, good(kind, name), "not-joined")
    assert facts(abused, name) is None


@pytest.mark.parametrize("has_sent", [False, True])
def test_who_has_left_over_http_can_do_nothing_on_its_connection(
    abused: ServerProcess, dial: Dial, name: str, has_sent: bool
) -> None:
    peer = dial().hello("p").join(name, "push")
    if has_sent:
        peer.send(name, 1)
    query = {"name": name, "processor": "p"}
    assert httpx.post(f"{abused.http_url}/v1/channel/leave", params=query).status_code == 200
    assert peer.hear() == {"type": "left", "channel": name, "reason": "left"}
    refused(peer, good("send", name), "not-joined")
    refused(peer, good("fetch", name), "not-joined")
    peer.join(name).send(name, 2 if has_sent else 1)


def test_a_request_over_http_changes_nothing_for_the_connection_of_its_processor(
    abused: ServerProcess, dial: Dial, name: str
) -> None:
    sender, peer = dial().hello("sender").join(name), dial().hello("p").join(name, "push")
    query = {"name": name, "processor": "p"}
    joined = httpx.post(f"{abused.http_url}/v1/channel/join", params=query, timeout=WAIT_S)
    assert joined.json()["cursor"] == 0
    sender.send(name, 1)
    assert peer.hear()["type"] == "messages"
    peer.send(name, 1)


def test_every_request_of_many_at_once_is_answered(dial: Dial, name: str) -> None:
    """This includes a join that left or was replaced before it was stored; else its connection never ends."""
    first, second = dial().hello("p"), dial().hello("p")
    for number in range(100):
        first.say("join", channel=f"{name}/{number}")
        first.say("leave", channel=f"{name}/{number}")
    heard = [first.hear() for _ in range(200)]
    assert sum(one["type"] == "left" for one in heard) == 100
    for number in range(100):
        first.say("join", channel=f"{name}/{number}")
        second.say("join", channel=f"{name}/{number}")
    for peer in (first, second):
        peer.say("join", channel=5)
        assert peer.until_closed()[-1]["type"] in ("error", "left", "joined")
        assert peer.code == POLICY


def test_contents_that_are_none_are_refused_and_their_number_is_free(
    abused: ServerProcess, dial: Dial, name: str, binary: bool
) -> None:
    peer = dial().hello("p").join(name)
    some = b"x" if binary else "eA=="
    for kind, more in (("send", {"number": 1}), ("upload", {"offset": 0})):
        bare: Message = {"type": kind, "channel": name} | more
        refused(peer, bare, "bad-content")
        refused(peer, bare | {"payload": None, "bytes": some}, "bad-content")
    for payload in (
        nested(101, binary=binary),
        nested(500, binary=binary),
        *([b"\xc4\x01x", b"\x81\1\2", b"\xd4\x05x", b"\xa2\xff\xfe"] if binary else [b"9" * 400]),
        *([msgpack.packb(float("nan")), msgpack.packb(float("inf"))] if binary else []),
    ):
        refused(peer, raw_send(name, payload, binary=binary), "bad-content")
    assert last_number(abused, name) == 0
    peer.send(name, 1)


def test_contents_at_the_limit_are_taken_and_above_it_refused(
    abused: ServerProcess, dial: Dial, name: str, binary: bool
) -> None:
    peer = dial().hello("p").join(name)
    room = 262_144 - len(msgpack.packb(["p", 1, "x" * 262_000])) + 262_000
    most = "x" * (room - 2)  # includes its quotes
    too_much = good("send", name) | {"number": 1, "payload": most + "x"}
    refused(peer, too_much, "too-large")
    assert last_number(abused, name) == 0
    peer.send(name, 1, most)
    deepest = raw_send(name, nested(100, binary=binary), binary=binary)
    peer.connection.send(deepest)
    assert peer.hear()["type"] == "sent"
    assert last_number(abused, name) == 2


def test_numbers_are_without_gaps(abused: ServerProcess, dial: Dial, name: str) -> None:
    peer = dial().hello("p").join(name)
    for number in (2, 2**31, 2**32, NUMBER_MAX):
        refused(peer, good("send", name) | {"number": number}, "gap", retry=True)
    assert last_number(abused, name) == 0
    peer.send(name, 1)


def test_an_offset_lies_behind_a_message(abused: ServerProcess, dial: Dial, name: str) -> None:
    end = dial().hello("other").join(name).send(name, 1)["offset"]
    peer = dial().hello("p").join(name)
    for offset in (1, end - 1, end + 1, 2 * end, 2**53, OFFSET_MAX):
        refused(peer, good("ack", name) | {"offset": offset}, "bad-offset")
        refused(peer, good("fetch", name) | {"ack": offset}, "bad-offset")
    told = facts(abused, name)
    assert told is not None
    assert [one["cursor"] for one in told["members"] if one["processor"] == "p"] == [0]
    assert peer.ask("fetch", channel=name, ack=0)["count"] == 1
    assert peer.ask("ack", channel=name, offset=end)["offset"] == end


def test_a_state_is_uploaded_for_a_message_and_where_states_are(
    abused: ServerProcess, dial: Dial, name: str
) -> None:
    peer = dial().hello("p").join(name)
    refused(peer, good("upload", name), "not-uploaded")
    uploaded = f"uploaded/{name}"
    end = peer.join(uploaded).send(uploaded, 1)["offset"]
    for offset in (1, end - 1, end + 1, 2**53, OFFSET_MAX):
        refused(peer, good("upload", uploaded) | {"offset": offset}, "bad-offset")
    much = "x" * (MIB + 1)
    refused(peer, good("upload", uploaded) | {"offset": end, "payload": much}, "too-large")
    assert peer.ask("snapshot", channel=uploaded)["snapshot"] is None
    assert peer.ask("upload", channel=uploaded, offset=end, payload=7)["offset"] == end


def test_what_a_reducer_cannot_fold_is_refused(
    abused: ServerProcess, dial: Dial, name: str
) -> None:
    folded = f"map/{name}"
    peer = dial().hello("p").join(folded)
    for payload in (None, 1, "x", [], {}, {"key": 1, "value": 1}, {"key": "k"}):
        refused(peer, good("send", folded) | {"number": 1, "payload": payload}, "cannot-fold")
    assert last_number(abused, folded) == 0
    peer.send(folded, 1, {"key": "k", "value": 1})


def test_a_state_that_has_become_too_large_is_told_and_the_channel_goes_on(
    abused: ServerProcess, dial: Dial, name: str
) -> None:
    folded = f"map/{name}"
    sender, reader = dial().hello("p").join(folded), dial().hello("reader").join(folded)
    for number in range(1, 6):
        # Together, the values are a few bytes longer than the limit for a state.
        value = "x" * (MIB // 5)
        end = sender.send(folded, number, {"key": f"k{number}", "value": value})["offset"]
    assert reader.ask("ack", channel=folded, offset=end)["type"] == "acked"
    wait_until(lambda: (facts(abused, folded) or {})["trouble"], WAIT_S)
    told = facts(abused, folded)
    assert told is not None
    assert (told["messages"], told["snapshot"]) == (5, None)
    sender.send(folded, 6, {"key": "k1", "delete": True})
    dial().hello("late").join(folded)


def test_names_that_look_odd_are_names(abused: ServerProcess, dial: Dial, name: str) -> None:
    """Names may contain zero bytes and control characters, and different names stay different."""
    odd = [f"{name}{end}" for end in ("", "\0", "\0\0", "\0\1", "\0\xff", "\n", "\x1b", "/../x")]
    peer = dial().hello("p")
    for number, channel in enumerate(odd):
        peer.join(channel)
        for one in range(number):
            peer.send(channel, one + 1)
    listed = httpx.get(f"{abused.http_url}/v1/channels", params={"prefix": name}).json()
    found = {one["name"]: one["members"][0]["number"] for one in listed["channels"]}
    assert found == {channel: number for number, channel in enumerate(odd)}
    for channel in odd:
        assert peer.ask("leave", channel=channel) == {"type": "left", "channel": channel}


def test_fields_that_are_not_named_are_passed_over(dial: Dial, name: str) -> None:
    peer = dial().hello("p").join(name)
    unknown = {"x": None, "": [], "offset": {}, "é": {"deep": [[[]]]}}
    assert peer.ask("ping", **unknown) == {"type": "pong"}
    assert peer.ask("send", channel=name, number=1, payload=1, **unknown)["type"] == "sent"


# Floods


def test_a_flood_of_joins_is_bounded(start: Start, binary: bool) -> None:
    limit = 50
    server = start("--set", f"limits.topics_attached_max={limit}")
    with dialled(server, binary) as peer:
        peer.hello("p")
        for number in range(2000):
            peer.say("join", channel=f"flood/{number}")
        heard = [peer.hear() for _ in range(2000)]
        answers = [one["type"] for one in heard]
        assert answers.count("joined") == limit
        assert {one["code"] for one in heard if one["type"] == "error"} == {"too-many"}
        assert peer.ask("ping") == {"type": "pong"}
        assert len(all_channels(server)) == limit


SLOW = """
import pathlib, time
here = pathlib.Path(__file__).parent
def reduce(state, message):
    (here / "folding").touch()
    while not (here / "go on").exists():
        time.sleep(0.01)
    return len(message)
"""


def test_hundreds_join_while_a_channel_is_busy(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    with ExitStack() as stack:
        server = stack.enter_context(
            ServerProcess(
                tmp_path / "data",
                *("--set", "channels.reducer=slow:reduce"),
                env={"PYTHONPATH": str(tmp_path)},
            )
        )
        with dialled(server, False) as sender, dialled(server, False) as reader:
            sender.hello("sender").join("c")
            end = sender.send("c", 1, "x" * 100_000)["offset"]
            reader.hello("reader").join("c")
            reader.ask("ack", channel="c", offset=end)
            wait_until((tmp_path / "folding").exists)
            for number in range(400):
                peer = stack.enter_context(Deaf(server))
                peer.say("hello", processor=f"p{number}")
                peer.say("join", channel="c")
                peer.say("send", channel="c", number=1, payload=number)
            reader.say("join", channel="c")
            reader.say("ping")
            assert reader.hear()["type"] == "pong"
            (tmp_path / "go on").touch()
            assert reader.hear()["type"] == "joined"
            wait_until(lambda: present(server, "c") == 402, WAIT_S)
            sender.send("c", 2)
        assert "Traceback" not in server.stderr, server.stderr


def test_floods_of_joins_and_leaves_leave_nothing_behind(start: Start, binary: bool) -> None:
    server = start()
    with dialled(server, binary) as peer:
        peer.hello("p")

        def flood(prefix: str, count: int) -> None:
            for number in range(count):
                peer.say("join", channel=f"{prefix}/{number}")
                peer.say("leave", channel=f"{prefix}/{number}")
                peer.say("leave", channel=f"never/{prefix}/{number}")
                peer.say("fetch", channel=f"never/{prefix}/{number}")
            answers = [peer.hear()["type"] for _ in range(4 * count)]
            assert answers.count("left") == 2 * count

        flood("first", 2000)
        before = resident_bytes(server.pid)
        for number in range(3):
            flood(f"again{number}", 2000)
        assert all_channels(server) == []
        # If kept, each of the 12,000 would take a few kilobytes.
        assert resident_bytes(server.pid) < before + 12 * MIB


def all_channels(server: ServerProcess) -> list[str]:
    page = httpx.get(f"{server.http_url}/v1/channels").json()
    assert not page["more"]
    return [one["name"] for one in page["channels"]]


class Deaf:
    """A peer that sends anything and never reads."""

    def __init__(self, server: ServerProcess) -> None:
        self.socket = socket.create_connection(server.ws)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.settimeout(WAIT_S)
        self.socket.sendall(
            b"GET /v1/channels HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
            b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        assert self.socket.recv(4096).startswith(b"HTTP/1.1 101")

    def __enter__(self) -> "Deaf":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def say(self, kind: str, times: int = 1, **fields: object) -> None:
        data = json.dumps({"type": kind, **fields}).encode()
        is_short = len(data) < 126
        size = bytes([0x80 | len(data)]) if is_short else b"\xff" + len(data).to_bytes(8, "big")
        # The mask is 0, which changes nothing.
        self.socket.sendall((b"\x81" + size + bytes(4) + data) * times)


def present(server: ServerProcess, name: str) -> int:
    told = facts(server, name)
    return sum(one["present"] for one in told["members"]) if told is not None else 0


def is_member(server: ServerProcess, name: str, processor: str) -> bool:
    """True also for a member that is away: on a busy machine, a peer may be given up at any moment."""
    told = facts(server, name)
    return told is not None and any(one["processor"] == processor for one in told["members"])


def is_present(server: ServerProcess, name: str, processor: str) -> bool:
    told = facts(server, name)
    members = told["members"] if told is not None else []
    return any(one["present"] for one in members if one["processor"] == processor)


def test_peers_that_never_read_cost_little_and_are_given_up(start: Start) -> None:
    server = start("--set", "channels.ping_s=1")
    with ExitStack() as stack:
        sender, reader = (stack.enter_context(dialled(server, False)) for _ in range(2))
        sender.hello("sender").join("c")
        reader.hello("reader").join("c", "push")
        deaf = [stack.enter_context(Deaf(server)) for _ in range(10)]
        for number, peer in enumerate(deaf):
            peer.say("hello", processor=f"deaf{number}")
            peer.say("join", channel="c", receive="push" if number % 2 else "signal")
            wait_until(lambda number=number: is_member(server, "c", f"deaf{number}"))  # type: ignore[misc]
        before = resident_bytes(server.pid)
        got = 0
        for block in range(40):
            numbers = range(100 * block + 1, 100 * block + 101)
            for number in numbers:
                sender.say("send", channel="c", number=number, payload="x" * 1000)
            for _ in numbers:
                assert sender.hear()["type"] == "sent"
            while got < numbers[-1]:
                heard = reader.hear()
                got += heard["count"]
                reader.say("ack", channel="c", offset=heard["messages"][-1]["offset"])
                while (heard := reader.hear())["type"] != "acked":
                    got += heard["count"]
        assert got == 4000
        assert resident_bytes(server.pid) < before + MEMORY_BYTES_MAX
        for number in range(10):
            wait_until(lambda number=number: not is_present(server, "c", f"deaf{number}"), WAIT_S)  # type: ignore[misc]
        sender.send("c", 4001)
        assert "Traceback" not in server.stderr


@pytest.mark.parametrize("kind", ["fetch", "snapshot", "join"])
def test_answers_that_nobody_reads_are_not_made(
    abused: ServerProcess, name: str, kind: str
) -> None:
    """Thirty bytes ask for a megabyte, and thousands of such requests come in one read."""
    channel = f"uploaded/{name}"
    with dialled(abused, False) as writer, Deaf(abused) as deaf:
        writer.hello("writer").join(channel)
        for number in range(1, 300):
            end = writer.send(channel, number, "x" * 1000)["offset"]
        if kind != "fetch":
            writer.ask("upload", channel=channel, offset=end, payload="x" * 1_000_000)
        deaf.say("hello", processor="deaf")
        if kind == "fetch":
            deaf.say("join", channel=channel, receive="poll")
        # The read buffer of a connection grows with its largest message.
        deaf.say("ping", x="x" * MIB)
        before = resident_bytes(abused.pid)
        Path(f"/proc/{abused.pid}/clear_refs").write_text("5")  # resets the peak
        deaf.say(kind, channel=channel, times=2000)
        if kind != "snapshot":
            wait_until(lambda: is_present(abused, channel, "deaf"), WAIT_S)
        for number in range(300, 310):
            writer.send(channel, number)
        assert peak_bytes(abused) < before + 2 * MEMORY_BYTES_MAX
    wait_until(lambda: not is_present(abused, channel, "deaf"), WAIT_S)


def peak_bytes(server: ServerProcess) -> int:
    """Return the server's peak memory."""
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def test_answers_that_waited_come_when_they_are_read(abused: ServerProcess, name: str) -> None:
    with dialled(abused, False) as writer, dialled(abused, False) as slow:
        writer.hello("writer").join(name)
        slow.hello("slow").join(name)
        for number in range(1, 201):
            writer.send(name, number, "x" * 1000)
        for _ in range(200):
            slow.say("fetch", channel=name)
        slow.say("send", channel=name, number=1, payload=1)
        heard = [slow.hear() for _ in range(201)]
    assert [one.get("count") for one in heard[:200]] == [200] * 200
    assert heard[200]["type"] == "sent"
