"""Reads of streams: chunks, caching, positions of other protocols, long polls, server-sent events."""

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.config.protocols import StreamSettings
from headrace.model import Position
from headrace.server.http.streams import api, reading
from headrace.server.http.streams import events as events_module
from tests.fakes.disk import flip
from tests.server.http.streams.conftest import PAGE, Server, until
from tests.tools import TORTURE

TEXT, JSON = "text/plain", "application/json"
LONG = StreamSettings(long_poll_s=600.0)
EACH = 100 if TORTURE else 10
"""Requests that wait for each of 100 streams."""


async def test_a_read_says_where_to_go_on(server: Server) -> None:
    await server.put("s", b"[1,2]", type=JSON)
    first = await server.get("s")
    assert first.json() == [1, 2]
    assert first.headers["stream-up-to-date"] == "true"
    at = first.headers["stream-next-offset"]
    nothing = await server.get("s", offset=at)
    assert (nothing.json(), nothing.headers["stream-next-offset"]) == ([], at)
    await server.post("s", b"3", type=JSON)
    assert (await server.get("s", offset=at)).json() == [3]
    now = await server.get("s", offset="now")
    assert (now.json(), now.headers["cache-control"]) == ([], "no-store")
    assert "etag" not in now.headers
    assert now.headers["stream-next-offset"] > at


async def test_long_streams_come_in_chunks(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "CHUNK_BYTES_MAX", 300_000)
    monkeypatch.setattr(reading.read, "__defaults__", (300_000,))
    await server.put("s", type=TEXT)
    body = b"".join(b"%06d" % number for number in range(100_000))
    for at in range(0, len(body), 100_000):
        await server.post("s", body[at : at + 100_000], type=TEXT)
        server.steps.clock.ms += 1000
    token, parts, marks = "-1", [], []
    while True:
        found = await server.get("s", offset=token)
        parts.append(found.content)
        marks.append((found.headers.get("stream-up-to-date"), found.headers["cache-control"][:16]))
        token = found.headers["stream-next-offset"]
        if "stream-up-to-date" in found.headers:
            break
    assert b"".join(parts) == body and len(parts) > 1
    assert marks[:-1] == [(None, "private, max-age")] * (len(parts) - 1)
    assert marks[-1] == ("true", "private, no-cach")


async def test_many_short_records_come_in_chunks(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "CHUNK_RECORDS_MAX", 1000)
    wanted = list(range(10_000, 50_000))
    await server.put("s", json.dumps(wanted).encode(), type=JSON)
    first = await server.get("s")
    assert "stream-up-to-date" not in first.headers
    second = await server.get("s", offset=first.headers["stream-next-offset"])
    assert "stream-up-to-date" in second.headers
    assert first.json() + second.json() == wanted


async def test_an_answer_that_is_still_right_is_not_sent_again(server: Server) -> None:
    await server.put("s", b"x", type=TEXT)
    first = await server.get("s")
    again = {"If-None-Match": f'"other", {first.headers["etag"]}'}
    same = await server.http.get("s", headers=again)
    assert (same.status_code, same.content) == (304, b"")
    assert same.headers["etag"] == first.headers["etag"]
    await server.post("s", stream_closed="true")
    closed = await server.http.get("s", headers=again)
    assert (closed.status_code, closed.headers["stream-closed"]) == (200, "true")


async def test_positions_of_other_protocols_are_understood(server: Server) -> None:
    end: Position = server.steps.change("t", b"1")
    server.steps.append("t", b"2")
    for token in (f"{end.epoch}@{end.offset}", f"@{end.offset}", f"{end.epoch}_{end.offset}"):
        assert (await server.get("t", offset=token)).content == b"2"


async def test_offsets_that_were_never_given_are_refused(server: Server) -> None:
    await server.put("s", b"x", type=TEXT)
    past = f"{server.steps.store.topic('s').epoch:016d}_{99:020d}"
    for token in (past, "9" * 16 + "_" + "9" * 16, "x", ""):
        assert (await server.get("s", offset=token)).status_code == 400
    assert (await server.http.get("s?offset=-1&offset=now")).status_code == 400


async def test_a_reader_learns_what_retention_has_taken(server: Server) -> None:
    await server.put("s", b"12345678", type=TEXT)
    old = (await server.http.head("s")).headers["stream-next-offset"]
    await server.post("s", b"1234", type=TEXT)
    topic = server.steps.store.topic("s")
    await server.post("s", b"rest", type=TEXT)
    server.steps.trim("s", server.steps.store.locate_last(topic, 1))
    gone = await server.get("s", offset=old)
    assert (gone.status_code, gone.headers["stream-lost-bytes"]) == (410, "8")
    assert (await server.get("s")).content == b"rest"


async def test_a_position_in_an_earlier_life_is_gone_unless_nothing_was_missed(
    server: Server,
) -> None:
    first = await server.put("s", b"old", type=TEXT)
    middle, end = first.headers["stream-next-offset"], ""
    end = (await server.post("s", b"x", type=TEXT)).headers["stream-next-offset"]
    await server.http.delete("s")
    await server.put("s", b"new", type=TEXT)
    assert (await server.get("s", offset=middle)).status_code == 410
    assert (await server.get("s", offset=end)).content == b"new"


async def test_records_that_are_damaged_are_skipped_and_counted(server: Server) -> None:
    await server.put("s", b"[1]", type=JSON)
    for body in (b"[22,23]", b"[3]"):
        server.steps.clock.ms += 1000
        await server.post("s", body, type=JSON)
    server.steps.settle()
    [segment] = server.steps.layout.root.glob("segments/*/*.log")
    flip(segment, 6)
    server.restart()
    first = await server.get("s")
    assert first.json() == [1] and "stream-lost-bytes" not in first.headers
    rest = await server.get("s", offset=first.headers["stream-next-offset"])
    assert rest.json() == [3] and rest.headers["stream-lost-bytes"] == "12"
    query = f"offset={first.headers['stream-next-offset']}&live=sse"
    async with following(server, "s", query) as reader:
        await until(lambda: reader.data())
        assert reader.data() == ["[3]"]


async def test_a_reader_that_retention_overtakes_has_to_ask_again(server: Server) -> None:
    await server.put("s", b"[1,2,3]", type=JSON)
    store, topic = server.steps.store, server.steps.store.topic("s")
    async with following(server, "s") as reader:
        await until(lambda: reader.data())
        [subscription] = server.connections.broker.subscriptions(topic)
        subscription.sink.overtaken(subscription)
        await server.post("s", b"4", type=JSON)
        await until(lambda: len(reader.data()) == 2)
        subscription.offset = topic.start_offset
        server.steps.trim("s", store.locate_last(topic, 1))
        subscription.sink.overtaken(subscription)
        await until(lambda: reader.over)
        assert not server.connections.broker.subscriptions(topic)


# Headers


async def test_every_answer_is_safe_to_look_at(server: Server) -> None:
    await server.put("s", b"<script>", type="text/html")
    for answer in (
        await server.get("s"),
        await server.get("none"),
        await server.http.head("s"),
        await server.post("s", b""),
        await server.http.patch("s"),
    ):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-security-policy"] == "sandbox"
        assert answer.headers["content-disposition"] == "attachment"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in answer.headers


async def test_pages_of_listed_origins_may_use_streams_and_others_may_not(server: Server) -> None:
    await server.put("s", b"x", type=TEXT)
    for origin, status in ((PAGE, 204), ("https://evil.example", 403), ("http://localhost", 403)):
        headers = {"Origin": origin, "Content-Type": TEXT, "Sec-Fetch-Site": "cross-site"}
        answer = await server.http.post("s", content=b"y", headers=headers)
        assert answer.status_code == status
        shown = answer.headers.get("access-control-allow-origin")
        assert shown == (origin if origin == PAGE else None)
        found = await server.http.get("s", headers={"Origin": origin})
        assert found.headers.get("access-control-allow-origin") == shown
        preflight = await server.http.options("s", headers={"Origin": origin})
        assert preflight.status_code == 204
        assert "If-None-Match" in preflight.headers["access-control-allow-headers"]
        assert preflight.headers.get("access-control-allow-origin") == shown


# Long polls


async def test_a_long_poll_waits_for_records(server: Server) -> None:
    server.settings = LONG
    made = await server.put("s", type=TEXT)
    at = made.headers["stream-next-offset"]
    for start in (at, "now"):
        asking = asyncio.ensure_future(server.get("s", offset=start, live="long-poll"))
        await until(lambda: server.connections.waiting.total)
        await server.post("s", b"x", type=TEXT)
        found = await asking
        assert (found.status_code, found.content) == (200, b"x")
        assert found.headers["stream-cursor"].isdigit()
        at = found.headers["stream-next-offset"]
    asking = asyncio.ensure_future(server.get("s", offset=at, live="long-poll"))
    await until(lambda: server.connections.waiting.total)
    server.steps.append("s", b"from elsewhere")
    assert (await asking).content == b"from elsewhere"
    assert not server.connections.waiting.total


async def test_a_long_poll_ends_without_news(server: Server) -> None:
    made = await server.put("s", type=TEXT)
    at = made.headers["stream-next-offset"]
    found = await server.get("s", offset=at, live="long-poll", cursor="999999999")
    assert (found.status_code, found.content) == (204, b"")
    assert found.headers["stream-next-offset"] == at
    assert found.headers["stream-up-to-date"] == "true"
    assert found.headers["stream-cursor"] == "1000000000"


async def test_a_long_poll_learns_that_the_stream_is_closed_or_deleted(server: Server) -> None:
    server.settings = LONG
    for way, status in (("close", 204), ("delete", 404)):
        made = await server.put(way, type=TEXT)
        at = made.headers["stream-next-offset"]
        asking = asyncio.ensure_future(server.get(way, offset=at, live="long-poll"))
        await until(lambda: server.connections.waiting.total)
        if way == "close":
            await server.post(way, stream_closed="true")
        else:
            await server.http.delete(way)
        found = await asking
        assert found.status_code == status
        assert found.headers.get("stream-closed") == ("true" if way == "close" else None)
    again = await server.get("close", offset="now", live="long-poll")
    assert (again.status_code, again.headers["stream-closed"]) == (204, "true")


async def test_a_commit_wakes_only_those_who_wait_for_its_topics(server: Server) -> None:
    server.settings = LONG
    for name in ("a", "b"):
        await server.put(name, type=TEXT)
    asking = [
        asyncio.ensure_future(server.get(name, offset="now", live="long-poll"))
        for name in "a" * 3 + "b" * 3
    ]
    await until(lambda: server.connections.waiting.total == 6)
    await server.post("a", b"x", type=TEXT)
    for one in asking[:3]:
        assert (await one).content == b"x"
    assert not any(one.done() for one in asking[3:])
    server.connections.drain()
    server.streams.close()
    assert [(await one).status_code for one in asking[3:]] == [204] * 3


async def test_thousands_of_requests_wait_and_a_commit_wakes_those_of_its_topic(
    directory: Path,
) -> None:
    server = Server(directory, waiting_max=0)
    server.settings = LONG
    waiting: list[tuple[Events, asyncio.Future[None]]] = []
    for number in range(100):
        await server.put(f"s/{number}", type=TEXT)
        for _ in range(EACH):
            events = Events()
            query = "offset=now&live=long-poll"
            request = asyncio.ensure_future(asked(server, f"s/{number}", query, events))
            waiting.append((events, request))
    await until(lambda: server.connections.waiting.total == 100 * EACH)
    await server.post("s/7", b"x", type=TEXT)
    await until(lambda: server.connections.waiting.total == 99 * EACH)
    woken = waiting[7 * EACH : 8 * EACH]
    await asyncio.gather(*(request for _, request in woken))
    assert {events.text for events, _ in woken} == {"x"}
    assert sum(request.done() for _, request in waiting) == EACH
    server.connections.drain()
    server.streams.close()
    await asyncio.gather(*(request for _, request in waiting))
    assert {events.status for events, _ in waiting} == {200, 204}
    assert not server.connections.waiting.total
    await server.http.aclose()
    server.steps.crash()


# Server-sent events


class Events:
    """The answer of one reader, as it comes. A reader that does not take is slow."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.text = ""
        self.over = False
        self.takes = asyncio.Event()
        self.takes.set()
        self.left: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def send(self, message: Any) -> None:
        await self.takes.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.text += message["body"].decode()
            self.over = not message.get("more_body", False)

    async def receive(self) -> Any:
        await self.left
        return {"type": "http.disconnect"}

    def events(self) -> list[tuple[str, str]]:
        found = []
        for block in self.text.split("\n\n")[:-1]:
            first, *lines = block.split("\n")
            kind = first.removeprefix("event: ")
            found.append((kind, "\n".join(line.removeprefix("data:") for line in lines)))
        return found

    def data(self) -> list[str]:
        return [text for kind, text in self.events() if kind == "data"]

    def controls(self) -> list[dict[str, Any]]:
        return [json.loads(text) for kind, text in self.events() if kind == "control"]


@asynccontextmanager
async def following(server: Server, name: str, query: str = "offset=-1&live=sse"):
    events = Events()
    task = asyncio.ensure_future(asked(server, name, query, events))
    try:
        yield events
    finally:
        events.takes.set()
        if not events.left.done():
            events.left.set_result(None)
        await task
        assert server.connections.waiting.total or not server.connections.output_bytes


async def asked(server: Server, name: str, query: str, events: Events) -> None:
    """Send a request to the application, and return when its answer is complete."""
    path = f"/v1/stream/{name}"
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": query.encode(),
        "headers": [(b"host", b"localhost")],
        "client": ("127.0.0.1", 7),
        "server": ("localhost", 80),
    }
    await server.app(scope, events.receive, events.send)


async def test_events_follow_a_stream(server: Server) -> None:
    await server.put("s", b"a\nb", type=TEXT)
    async with following(server, "s") as reader:
        await until(lambda: reader.controls())
        assert reader.headers["content-type"] == "text/event-stream"
        assert reader.data() == ["a\nb"]
        await server.post("s", b"c", type=TEXT)
        await until(lambda: len(reader.controls()) == 2)
        assert [kind for kind, _ in reader.events()] == ["data", "control"] * 2
        assert reader.data()[1] == "c"
        last = reader.controls()[-1]
        assert last["upToDate"] is True and last["streamCursor"].isdigit()
        found = await server.get("s", offset=reader.controls()[0]["streamNextOffset"])
        assert found.content == b"c"
        server.steps.append("s", b"from elsewhere")
        await until(lambda: len(reader.controls()) == 3)
        assert not reader.over


async def test_events_of_an_empty_stream_begin_with_its_end(server: Server) -> None:
    made = await server.put("s", type=JSON)
    for start in ("-1", "now"):
        async with following(server, "s", f"offset={start}&live=sse") as reader:
            await until(lambda: reader.controls())
            [control] = reader.controls()
            assert control["streamNextOffset"] == made.headers["stream-next-offset"]
            assert control["upToDate"] is True and not reader.data()


async def test_events_carry_json_arrays_and_bytes_in_base64(server: Server) -> None:
    await server.put("j", b'[{"a":1},2]', type=JSON)
    async with following(server, "j") as reader:
        await until(lambda: reader.data())
        assert json.loads(reader.data()[0]) == [{"a": 1}, 2]
        assert "stream-sse-data-encoding" not in reader.headers
    await server.put("b", b"\0\xff", type="application/x-protobuf")
    async with following(server, "b") as reader:
        await until(lambda: reader.data())
        assert reader.headers["stream-sse-data-encoding"] == "base64"
        assert reader.data() == ["AP8="]


async def test_events_end_with_the_stream(server: Server) -> None:
    await server.put("s", b"x", type=TEXT)
    async with following(server, "s") as reader:
        await until(lambda: reader.controls())
        await server.post("s", b"last", type=TEXT, stream_closed="true")
        await until(lambda: reader.over)
        assert reader.data() == ["x", "last"]
        assert [one.get("streamClosed") for one in reader.controls()] == [None, True]
    async with following(server, "s") as reader:
        await until(lambda: reader.over)
        assert "".join(reader.data()) == "xlast"
        assert [one.get("streamClosed") for one in reader.controls()][-1] is True
    await server.put("t", type=TEXT)
    async with following(server, "t") as reader:
        await until(lambda: reader.controls())
        await server.post("t", stream_closed="true")
        await until(lambda: reader.over)
        assert reader.controls()[-1]["streamClosed"] is True
    await server.put("u", type=TEXT)
    async with following(server, "u") as reader:
        await until(lambda: reader.controls())
        await server.http.delete("u")
        await until(lambda: reader.over)


async def test_a_stream_with_a_reader_does_not_expire(server: Server) -> None:
    await server.put("s", type=TEXT, stream_ttl="10")
    async with following(server, "s") as reader:
        await until(lambda: reader.controls())
        for _ in range(3):
            server.steps.clock.ms += 15_000
            assert (await server.http.head("s")).status_code == 200
            server.tick()
            await server.settle()
        assert not reader.over
    server.steps.clock.ms += 10_000
    assert (await server.http.head("s")).status_code == 404


async def test_events_end_after_a_while(server: Server) -> None:
    server.settings = StreamSettings(sse_s=0.05)
    await server.put("s", type=TEXT)
    async with following(server, "s") as reader:
        await until(lambda: reader.over)


async def test_a_commit_is_encoded_once_for_all_readers(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.put("s", type=TEXT)
    encoded: list[str] = []
    monkeypatch.setattr(
        events_module,
        "data",
        lambda payloads, content_type, own=events_module.data: (
            encoded.append("x") or own(payloads, content_type)
        ),
    )
    async with following(server, "s") as one, following(server, "s") as two:
        await until(lambda: one.controls() and two.controls())
        await server.post("s", b"x", type=TEXT)
        await until(lambda: one.data() and two.data())
    assert encoded == ["x"]


async def test_a_slow_reader_goes_on_from_the_log_and_misses_nothing(server: Server) -> None:
    await server.put("s", type=JSON)
    async with following(server, "s") as slow, following(server, "s") as quick:
        await until(lambda: slow.controls() and quick.controls())
        slow.takes.clear()
        for number in range(40):
            body = json.dumps([number, "x" * 100_000])
            await server.post("s", f"[{body}]".encode(), type=JSON)
            limit = server.connections.limits.output_bytes_max
            assert server.connections.output_bytes <= 2 * limit + 200_000
        await until(lambda: len(quick.data()) >= 40)
        slow.takes.set()
        await until(lambda: sum(len(json.loads(one)) for one in slow.data()) == 40)
        for reader in (slow, quick):
            found = [one for text in reader.data() for one, _ in json.loads(text)]
            assert found == list(range(40))


async def test_a_reader_that_takes_nothing_is_cut_off(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "EVENTS_TIMEOUT_S", 0.01)
    await server.put("s", type=TEXT)
    async with following(server, "s") as reader:
        await until(lambda: reader.controls())
        reader.takes.clear()
        await server.post("s", b"x", type=TEXT)
        await until(lambda: not server.connections.waiting.total)
        assert not reader.over
    assert not server.connections.broker.subscriptions(server.steps.store.topic("s"))


async def test_a_reader_that_leaves_frees_its_place(server: Server) -> None:
    await server.put("s", type=TEXT)
    async with following(server, "s") as reader:
        await until(lambda: reader.controls())
        assert server.connections.waiting.total == 1
        topic = server.steps.store.topic("s")
        assert server.connections.broker.subscriptions(topic)
        reader.left.set_result(None)
        await until(lambda: not server.connections.waiting.total)
        assert not server.connections.broker.subscriptions(topic)


async def test_readers_above_the_limit_are_refused(directory: Path) -> None:
    server = Server(directory, waiting_max=1)
    await server.put("s", type=TEXT)
    async with following(server, "s") as reader:
        await until(lambda: reader.controls())
        for live in ("sse", "long-poll"):
            answer = await server.get("s", offset="now", live=live)
            assert answer.status_code == 429 and answer.headers["retry-after"]
    await server.http.aclose()
    server.steps.crash()
