"""Creating, appending, closing and deleting streams: answers, and what is in the log when they come."""

import asyncio
import json

import httpx
import pytest

from headrace.log.records import pack_record
from headrace.model import PAYLOAD_BYTES_MAX
from tests.server.http.streams.conftest import Server, until

TEXT, JSON = "text/plain", "application/json"


def offset(answer: httpx.Response) -> str:
    return answer.headers["stream-next-offset"]


async def test_a_stream_is_created_once(server: Server) -> None:
    made = await server.put("a/b", type="text/plain; charset=utf-8")
    assert made.status_code == 201
    assert made.headers["location"] == "http://localhost/v1/stream/a/b"
    assert made.headers["content-type"] == "text/plain; charset=utf-8"
    again = await server.put("a/b", type="TEXT/plain")
    assert (again.status_code, offset(again)) == (200, offset(made))
    assert server.steps.store.topic("a/b").exists
    for other in (
        {"type": JSON},
        {"type": TEXT, "stream_ttl": "5"},
        {"type": TEXT, "stream_closed": "true"},
    ):
        assert (await server.put("a/b", **other)).status_code == 409
    server.restart()
    assert (await server.put("a/b", type=TEXT)).status_code == 200


async def test_a_stream_may_begin_with_records_and_may_begin_closed(server: Server) -> None:
    made = await server.put("s", b"[1, 2]", type=JSON, stream_closed="true")
    assert (made.status_code, made.headers["stream-closed"]) == (201, "true")
    assert server.payloads("s") == [b"1", b"2"]
    assert (await server.put("t", b"[]", type=JSON)).status_code == 201
    assert server.payloads("t") == []


async def test_nothing_is_answered_or_shown_before_it_is_durable(server: Server) -> None:
    server.is_working = False
    making = asyncio.ensure_future(server.put("s", b"x", type=TEXT))
    await until(lambda: server.steps.store.pending_bytes)
    assert (await server.get("s")).status_code == 404
    assert (await server.post("s", b"y", type=TEXT)).status_code == 404
    again = asyncio.ensure_future(server.put("s", type=TEXT))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not making.done() and not again.done()
    await server.settle()
    assert ((await making).status_code, (await again).status_code) == (201, 200)
    server.is_working = False
    closing = asyncio.ensure_future(server.post("s", stream_closed="true"))
    await until(lambda: server.steps.store.topic("s").is_closed)
    assert "stream-closed" not in (await server.http.head("s")).headers
    late = asyncio.ensure_future(server.post("s", b"y", type=TEXT))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not late.done()
    await server.settle()
    assert ((await closing).status_code, (await late).status_code) == (204, 409)


async def test_bytes_are_appended(server: Server) -> None:
    first = await server.put("s")
    assert first.headers["content-type"] == "application/octet-stream"
    answers = [
        await server.post("s", body, type="application/octet-stream") for body in (b"ab", b"cd")
    ]
    assert [one.status_code for one in answers] == [204, 204]
    assert offset(first) < offset(answers[0]) < offset(answers[1])
    long = bytes(PAYLOAD_BYTES_MAX + 5)
    assert (await server.post("s", long, type="application/octet-stream")).status_code == 204
    assert [len(one) for one in server.payloads("s")] == [2, 2, PAYLOAD_BYTES_MAX, 5]
    found = await server.get("s", offset=offset(answers[0]))
    assert found.content == b"cd" + long


async def test_json_messages_are_records(server: Server) -> None:
    await server.put("s", type=JSON)
    assert (await server.post("s", b'[{"a": 1}, 2]', type=JSON)).status_code == 204
    assert (
        await server.post("s", b'"x"', type="application/json; charset=utf-8")
    ).status_code == 204
    assert server.payloads("s") == [b'{"a": 1}', b"2", b'"x"']
    for body in (b"[]", b"{", b"", b"[1,]"):
        assert (await server.post("s", body, type=JSON)).status_code == 400
    assert (await server.post("s", b"1", type=TEXT)).status_code == 409
    assert (await server.post("s", b"1")).status_code == 400
    found = await server.get("s")
    assert found.json() == [{"a": 1}, 2, "x"]


async def test_every_writer_learns_where_its_own_records_end(server: Server) -> None:
    await server.put("s", type=JSON)
    server.is_working = False
    writing = [
        asyncio.ensure_future(server.post("s", b"[%d, %d]" % (n, n), type=JSON)) for n in range(5)
    ]
    for _ in range(200):
        await asyncio.sleep(0)
    await server.settle()
    for number, write in enumerate(writing):
        rest = (await server.get("s", offset=offset(await write))).json()
        assert rest == [n for n in range(number + 1, 5) for _ in range(2)]


async def test_a_body_that_is_too_long_is_answered(server: Server) -> None:
    await server.put("s", type=TEXT)
    answer = await server.post("s", bytes(10 << 20), type=TEXT)
    assert answer.status_code == 413
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert server.payloads("s") == []


async def test_producers_are_stored_once_also_after_a_restart(server: Server) -> None:
    await server.put("s", type=TEXT)

    def post(epoch: int, seq: int, body: bytes = b"x"):
        return server.post(
            "s",
            body,
            type=TEXT,
            producer_id="p",
            producer_epoch=str(epoch),
            producer_seq=str(seq),
        )

    stored = await post(0, 0)
    assert stored.status_code == 200
    assert (await post(0, 1, b"y")).headers["producer-seq"] == "1"
    for _ in range(2):
        again = await post(0, 0)
        assert (again.status_code, again.headers["producer-seq"]) == (204, "1")
        gap = await post(0, 3)
        assert gap.status_code == 409
        assert gap.headers["producer-expected-seq"] == "2"
        assert gap.headers["producer-received-seq"] == "3"
        server.restart()
    assert (await post(1, 1)).status_code == 400
    assert (await post(1, 0, b"z")).status_code == 200
    stale = await post(0, 2)
    assert (stale.status_code, stale.headers["producer-epoch"]) == (403, "1")
    assert server.payloads("s") == [b"x", b"y", b"z"]
    for _ in range(2):
        closed = await server.post(
            "s", producer_id="p", producer_epoch="1", producer_seq="1", stream_closed="true"
        )
        assert (closed.status_code, closed.headers["producer-seq"]) == (204, "1")


async def test_a_duplicate_waits_for_the_request_that_is_being_written(server: Server) -> None:
    await server.put("s", type=TEXT)
    server.is_working = False
    named = {"producer_id": "p", "producer_epoch": "0", "producer_seq": "0"}
    both = [asyncio.ensure_future(server.post("s", b"x", type=TEXT, **named)) for _ in range(2)]
    for _ in range(200):
        await asyncio.sleep(0)
    assert not any(one.done() for one in both)
    await server.settle()
    assert sorted([(await one).status_code for one in both]) == [200, 204]
    assert server.payloads("s") == [b"x"]


async def test_no_answer_shows_a_number_that_is_not_durable(server: Server) -> None:
    await server.put("s", type=TEXT)
    named = {"type": TEXT, "producer_id": "p", "producer_epoch": "0"}
    await server.post("s", b"0", producer_seq="0", **named)
    await server.settle()
    server.is_working = False
    sent = [
        asyncio.ensure_future(server.post("s", b"%d" % number, producer_seq=str(number), **named))
        for number in (1, 0)
    ]
    await idle()
    assert server.steps.runner.step()  # their commit is on its way
    later = asyncio.ensure_future(server.post("s", b"2", producer_seq="2", **named))
    await idle()
    assert server.steps.runner.step()  # and written
    await until(lambda: all(one.done() for one in sent))
    assert not later.done()
    assert [(await one).headers["producer-seq"] for one in sent] == ["1", "1"]
    await server.settle()
    assert (await later).headers["producer-seq"] == "2"


async def test_a_refusal_that_tells_of_an_append_waits_for_it(server: Server) -> None:
    await server.put("s", type=TEXT)
    await server.settle()
    server.is_working = False
    claim = {"producer_id": "p", "producer_epoch": "0"}
    asked = [
        asyncio.ensure_future(server.post("s", b"x", type=TEXT, **headers))
        for headers in (
            {"stream_seq": "b", "producer_seq": "0", **claim},
            {"stream_seq": "b"},
            {"producer_seq": "2", **claim},
        )
    ]
    await idle()
    assert not any(one.done() for one in asked)
    await server.settle()
    assert [(await one).status_code for one in asked] == [200, 409, 409]


async def test_sequences_must_grow(server: Server) -> None:
    await server.put("s", type=TEXT)
    for text, status in (("a", 204), ("b", 204), ("b", 409), ("a", 409), ("c", 204)):
        assert (await server.post("s", b"x", type=TEXT, stream_seq=text)).status_code == status
    server.restart()
    assert (await server.post("s", b"x", type=TEXT, stream_seq="c")).status_code == 409


async def test_a_closed_stream_takes_nothing_more(server: Server) -> None:
    await server.put("s", b"1", type=TEXT)
    closed = await server.post("s", b"last", type=TEXT, stream_closed="true")
    assert (closed.status_code, closed.headers["stream-closed"]) == (204, "true")
    for _ in range(2):
        late = await server.post("s", b"late", type=TEXT)
        assert late.status_code == 409
        assert late.headers["stream-closed"] == "true"
        assert offset(late) == offset(closed)
        again = await server.post("s", stream_closed="true", type=JSON)
        assert (again.status_code, offset(again)) == (204, offset(closed))
        assert server.payloads("s") == [b"1", b"last"]
        assert server.steps.store.closed(["s"]) == "s"
        server.restart()
    found = await server.get("s")
    assert (found.content, found.headers["stream-closed"]) == (b"1last", "true")
    assert (await server.http.head("s")).headers["stream-closed"] == "true"
    assert (await server.put("s", type=TEXT)).status_code == 409
    assert (await server.put("s", type=TEXT, stream_closed="true")).status_code == 200


async def test_a_deleted_stream_is_gone_and_its_offsets_are_not_used_again(server: Server) -> None:
    await server.put("s", b"old", type=TEXT, stream_seq="1")
    await server.post("s", b"x", type=TEXT, stream_seq="b", stream_closed="true")
    old = offset(await server.get("s"))
    start = offset(await server.get("s", offset="now"))
    assert (await server.http.delete("s")).status_code == 204
    for answer in (
        await server.get("s"),
        await server.http.head("s"),
        await server.http.delete("s"),
        await server.post("s", b"x", type=TEXT),
    ):
        assert answer.status_code == 404
    assert server.steps.store.notes(b"", b"", 10) == []
    made = await server.put("s", b"[1]", type=JSON)
    assert made.status_code == 201 and offset(made) > old
    assert (await server.get("s", offset=start)).json() == [1]
    await server.post("s", b"2", type=JSON, stream_seq="a")
    server.restart()
    assert (await server.get("s")).json() == [1, 2]


async def test_a_stream_that_is_being_deleted_is_gone_and_a_put_waits(server: Server) -> None:
    await server.put("s", b"old", type=TEXT)
    server.is_working = False
    deleting = asyncio.ensure_future(server.http.delete("s"))
    await until(lambda: server.steps.store.note(b"sts") is None)
    assert (await server.get("s")).status_code == 404
    making = asyncio.ensure_future(server.put("s", b"new", type=TEXT))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not making.done()
    await server.settle()
    assert ((await deleting).status_code, (await making).status_code) == (204, 201)
    assert server.payloads("s") == [b"new"]


# Time to live


async def test_a_stream_expires_when_nobody_uses_it(server: Server) -> None:
    clock = server.steps.clock
    made = await server.put("s", b"x", type=TEXT, stream_ttl="10")
    assert made.headers["stream-ttl"] == "10"
    for use in (server.get("s"), server.get("s", offset="now"), server.post("s", b"y", type=TEXT)):
        clock.ms += 9_000
        assert (await use).is_success
    clock.ms += 9_000
    assert (await server.http.head("s")).status_code == 200
    clock.ms += 1_000
    assert (await server.http.head("s")).status_code == 404
    assert (await server.get("s")).status_code == 404
    assert server.payloads("s") == [b"x", b"y"]
    server.tick()
    await server.settle()
    assert server.payloads("s") == []
    assert server.steps.store.notes(b"", b"", 10) == []


async def test_a_jump_of_the_clock_makes_no_stream_older(server: Server) -> None:
    await server.put("s", type=TEXT, stream_ttl="10")
    server.restart()
    server.steps.clock.ms += 86_400_000
    server.jumped_ms = 86_400_000
    server.tick()
    await server.settle()
    assert (await server.http.head("s")).status_code == 200
    server.steps.clock.ms += 9_999
    assert (await server.http.head("s")).status_code == 200
    server.steps.clock.ms += 1
    server.tick()
    await server.settle()
    assert (await server.http.head("s")).status_code == 404
    assert server.due() == []


async def test_an_append_in_time_is_not_lost_however_long_its_commit_takes(server: Server) -> None:
    await server.put("s", type=TEXT, stream_ttl="10")
    await server.settle()
    server.is_working = False
    server.steps.clock.ms += 9_999
    server.connections.broker.publish({"s": [pack_record(b"in time")]}, lambda: None)
    server.steps.clock.ms += 10_000
    server.tick()
    server.tick()
    again = asyncio.ensure_future(server.put("s", type=TEXT, stream_ttl="10"))
    await idle()
    await server.settle()
    assert (await again).status_code == 200
    assert server.payloads("s") == [b"in time"]
    server.steps.clock.ms += 10_000
    server.tick()
    await server.settle()
    assert not server.steps.store.exists("s")


async def test_an_expired_name_can_be_used_again_at_once(server: Server) -> None:
    await server.put("s", b"old", type=TEXT, stream_ttl="10")
    server.steps.clock.ms += 10_000
    assert (await server.put("s", b"new", type=TEXT)).status_code == 201
    assert server.payloads("s") == [b"new"]
    server.steps.clock.ms += 10_000
    server.tick()
    await server.settle()
    assert (await server.get("s")).content == b"new"


async def test_notes_that_are_due_are_put_again_or_dropped(server: Server) -> None:
    await server.put("ttl", type=TEXT, stream_ttl="10")
    named = {"producer_id": "p", "producer_epoch": "0", "producer_seq": "0"}
    await server.put("kept", type=TEXT)
    await server.post("kept", b"x", type=TEXT, **named)
    server.steps.clock.ms += 5_000
    await server.get("ttl")
    server.steps.clock.ms += 5_000
    assert [one.key for one in server.due()] == [b"stttl"]
    server.tick()
    await server.settle()
    assert server.due() == [] and (await server.get("ttl")).status_code == 200
    server.steps.clock.ms += 30 * 86_400_000
    assert (await server.get("ttl")).status_code == 404
    server.tick()
    await server.settle()
    assert server.due() == []
    assert [one.key for one in server.steps.store.notes(b"", b"", 10)] == [b"stkept"]


async def test_an_absolute_expiry_is_not_extended(server: Server) -> None:
    server.steps.clock.ms = 1_893_456_000_000
    made = await server.put("s", b"x", type=TEXT, stream_expires_at="2030-01-01T00:01:00Z")
    assert made.headers["stream-expires-at"] == "2030-01-01T00:01:00.000Z"
    server.steps.clock.ms += 59_000
    assert (await server.get("s")).status_code == 200
    server.restart()
    server.steps.clock.ms += 1_000
    assert (await server.get("s")).status_code == 404


async def test_expiry_waits_for_readers_that_retention_waits_for(server: Server) -> None:
    await server.put("held/s", b"x", type=TEXT, stream_ttl="10")
    server.steps.clock.ms += 10_000
    server.tick()
    await server.settle()
    assert (await server.get("held/s")).status_code == 404
    assert server.payloads("held/s") == [b"x"]
    assert (await server.put("held/s", type=TEXT)).status_code == 409
    store = server.steps.store
    store.set_cursors("lake", {"held/s": store.topic("held/s").end}, lambda: None)
    await server.settle()
    server.steps.clock.ms += 60_000
    server.tick()
    await server.settle()
    assert server.payloads("held/s") == []


# Other topics


async def test_topics_of_other_protocols_are_streams_of_bytes(server: Server) -> None:
    server.steps.append("figg", b"1", b"2")
    found = await server.get("figg")
    assert (found.content, found.headers["content-type"]) == (b"12", "application/octet-stream")
    assert (await server.post("figg", b"3", type="application/octet-stream")).status_code == 204
    named = {"producer_id": "p", "producer_epoch": "0", "producer_seq": "0"}
    other = await server.post("figg", b"4", type="application/octet-stream", **named)
    assert other.status_code == 200
    assert (await server.put("figg")).status_code == 200
    assert (await server.put("figg", type=JSON)).status_code == 409
    assert (await server.post("figg", stream_closed="true")).status_code == 409
    server.steps.append("figg", b"5")
    assert server.payloads("figg") == [b"1", b"2", b"3", b"4", b"5"]


async def test_foreign_payloads_in_a_json_stream_do_not_break_it(server: Server) -> None:
    await server.put("s", b"[1]", type=JSON)
    server.steps.append("s", b"2],[3", b"\xff", b'{"a": 4}')
    found = json.loads((await server.get("s")).content)
    assert found == [1, {"$base64": "Ml0sWzM="}, {"$base64": "/w=="}, {"a": 4}]


async def test_topics_in_memory_are_read_and_not_written(server: Server) -> None:
    store = server.steps.store
    store.append({store.topic("memory/t"): [pack_record(b"x")]}, lambda: None)
    await server.settle()
    assert (await server.get("memory/t")).content == b"x"
    assert (await server.put("memory/s", type=TEXT)).status_code == 409
    answer = await server.post("memory/t", b"y", type="application/octet-stream")
    assert answer.status_code == 409
    assert (await server.http.delete("memory/t")).status_code == 204


@pytest.mark.parametrize(
    "name", ["$logux/x", "$channel/x", "$audit", "__ds/x", "%ff", "x" * 256, ""]
)
async def test_other_names_are_refused(server: Server, name: str) -> None:
    assert (await server.put(name, type=TEXT)).status_code == 400
    assert (await server.post(name, b"x", type=TEXT)).status_code == 400
    assert (await server.http.delete(name)).status_code == 400


@pytest.mark.parametrize("name", ["%E6%97%A5", "a%3Fb%23c%20d", "%5B%3A%3A1"])
async def test_the_location_of_a_stream_is_the_url_that_was_asked(
    server: Server, name: str
) -> None:
    made = await server.put(name, type=TEXT)
    assert (made.status_code, made.headers["location"]) == (
        201,
        f"http://localhost/v1/stream/{name}",
    )
    assert (await server.get(name)).status_code == 200


async def test_the_beginning_of_the_path_is_not_encoded(server: Server) -> None:
    for path in ("/v1%2Fstream/name", "/v1/stre%61m/name"):
        assert (await server.http.put(f"http://localhost{path}")).status_code == 400
    assert server.steps.store.topics("", "", 10) == []


async def test_a_name_is_decoded_once(server: Server) -> None:
    await server.put("a%2Fb%20%C3%A9%252F", b"x", type=TEXT)
    assert server.payloads("a/b é%2F") == [b"x"]


async def idle() -> None:
    """Let requests go on until they wait for the store."""
    for _ in range(200):
        await asyncio.sleep(0)
