"""Raw ranges over real HTTP: rows and bytes as in the files, including the tail; slow and rude clients."""

import os
import signal
import socket
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from crc32c import crc32c

from headrace.log.read.index import HEADER_BYTES, Row, decode_header, decode_rows
from headrace.log.records import split_records
from headrace.testing import ServerProcess, wait_until
from tests.system.support import children, resident_bytes

CONFIG = """
durability = "written"
[journal]
rotate_s = 0.1
[segment]
bytes = 4096
[retention]
check_s = 0.1
[[topics]]
prefix = "short/"
retention_bytes = 4096
[[topics]]
prefix = "memory/"
durability = "memory"
"""

PATHS = ["/v1/index", "/v1/range", "/v1/splits"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    root = tmp_path_factory.mktemp("ranges")
    (root / "config.toml").write_text(CONFIG)
    with ServerProcess(root / "data", f"--config={root / 'config.toml'}") as server:
        yield server
        assert server.running, server.stderr
        assert "Traceback" not in server.stderr, server.stderr


@pytest.fixture
def paused(server: ServerProcess) -> Iterator[None]:
    """Suspend the applier, so that published records stay in the tail."""
    # The applier also creates the journal's files, one after another. When three exist, the server has two of
    # them.
    journal = server.data_dir / "journal"
    wait_until(lambda: len(list(journal.glob("*.journal"))) >= 3, 30, "files of the journal")
    (applier,) = children(server.pid)
    os.kill(applier, signal.SIGSTOP)
    yield
    os.kill(applier, signal.SIGCONT)


def ask(http: httpx.Client, path: str, topic: str, start: int, end: int, **more: int) -> Any:
    answer = http.get(path, params={"topic": topic, "from": start, "to": end, **more})
    assert answer.status_code == 200, answer.text
    if path == "/v1/splits":
        return [(one["offset"], one["ordinal"]) for one in answer.json()["splits"]]
    assert answer.headers["content-type"] == "application/octet-stream"
    return list(decode_rows(answer.content)) if path == "/v1/index" else answer.content


def end_of(http: httpx.Client, topic: str) -> int:
    end: int = http.get("/v1/topic", params={"name": topic}).json()["end"]["offset"]
    return end


def applied_end(http: httpx.Client, topic: str) -> int:
    segments = http.get("/v1/topic", params={"name": topic}).json()["segments"]
    return segments[-1]["end"] if segments else 0


def files(server: ServerProcess, topic: str) -> tuple[list[Row], bytes]:
    """Return rows and bytes as the segments have them."""
    found = {}
    for index in server.data_dir.glob("segments/*/*.idx"):
        data = index.read_bytes()
        header = decode_header(data)
        if header is not None and header.name == topic:
            rows = [row for row in decode_rows(data[HEADER_BYTES:]) if row is not None]
            found[header.base] = rows, index.with_suffix(".log").read_bytes()
    rows = [row for base in sorted(found) for row in found[base][0]]
    return rows, b"".join(found[base][1] for base in sorted(found))


def publish(client: Any, topic: str, numbers: range) -> bytes:
    """Publish, and return the records as the log stores them."""
    sent = b""
    for number in numbers:
        payload = b"%d " % number * (number % 50)
        client.publish_nowait(topic, payload)
        sent += struct.pack(">I", len(payload)) + payload
    client.flush()
    return sent


def check(http: httpx.Client, topic: str, sent: bytes) -> None:
    """Check that rows and bytes hold exactly these records, wherever a request begins and ends."""
    rows = ask(http, "/v1/index", topic, 0, 1 << 63)
    assert ask(http, "/v1/range", topic, 0, 1 << 63) == sent
    at = ordinal = 0
    for row in rows:
        assert (row.offset, row.ordinal) == (at, ordinal)
        assert len(split_records(sent[at : row.end], row.record_count)) == row.record_count
        at, ordinal = row.end, ordinal + row.record_count
    assert at == len(sent)
    edges = [0, 1, len(sent) // 3, rows[-1].offset, rows[-1].offset + 1, len(sent) - 1, len(sent)]
    for start in edges:
        for end in edges:
            if start <= end:
                assert ask(http, "/v1/range", topic, start, end) == sent[start:end]
                check_rows(ask(http, "/v1/index", topic, start, end), sent, start, end)
    step = len(sent) // 4
    for start, end in ((0, len(sent)), (5, len(sent) - 5)):
        places = ask(http, "/v1/splits", topic, start, end, bytes=step)
        assert all(start < offset < end for offset, _ in places)
        for one, two in zip([(start, 0), *places], places, strict=False):
            assert two[0] - one[0] >= step


def check_rows(rows: list[Row], sent: bytes, start: int, end: int) -> None:
    """Check that the rows cover these offsets and no run more. The tail's runs may be split in any way."""
    assert bool(rows) == (start < end)
    for one, other in pairwise(rows):
        assert (one.end, one.ordinal + one.record_count) == (other.offset, other.ordinal)
    for row in rows:
        assert row.end > start and row.offset < end
        assert row.crc == crc32c(sent[row.offset : row.end])
    if rows:
        assert rows[0].offset <= start and rows[-1].end >= end


def test_rows_and_bytes_are_those_of_the_files(http, client, server, topic):
    sent = b""
    for turn in range(4):
        sent += publish(client, topic, range(turn * 60, turn * 60 + 60))
        wait_until(lambda: applied_end(http, topic) == len(sent), 30, "the applier")  # noqa: B023
    rows, data = files(server, topic)
    assert len(http.get("/v1/topic", params={"name": topic}).json()["segments"]) > 1
    assert ask(http, "/v1/index", topic, 0, 1 << 63) == rows
    assert data == sent
    check(http, topic, sent)
    splits = ask(http, "/v1/splits", topic, 0, len(sent), bytes=1)
    assert splits == [(row.offset, row.ordinal) for row in rows[1:]]


def test_the_tail_has_rows_and_bytes_too(http, client, topic, paused):
    sent = publish(client, topic, range(100))
    sent += publish(client, topic, range(100, 150))
    assert applied_end(http, topic) == 0
    check(http, topic, sent)


def test_segments_and_tail_are_one(http, client, server, topic):
    """This also holds at the moment when a part of the tail is already in segments."""
    sent = publish(client, topic, range(80))
    wait_until(lambda: applied_end(http, topic) == len(sent), 30, "the applier")
    (applier,) = children(server.pid)
    os.kill(applier, signal.SIGSTOP)
    try:
        sent += publish(client, topic, range(80, 200))
        assert applied_end(http, topic) < len(sent)
        check(http, topic, sent)
    finally:
        os.kill(applier, signal.SIGCONT)
    while applied_end(http, topic) < len(sent):
        assert ask(http, "/v1/range", topic, 0, len(sent)) == sent
        rows = ask(http, "/v1/index", topic, 0, len(sent))
        assert sum(row.length for row in rows) == len(sent)
    check(http, topic, sent)


def test_topics_in_memory_are_read_too(http, client):
    sent = publish(client, "memory/t", range(50))
    check(http, "memory/t", sent)


def test_what_is_past_the_end_is_empty(http, client, topic):
    sent = publish(client, topic, range(3))
    for start in (len(sent), len(sent) + 1, (1 << 64) - 1):
        assert ask(http, "/v1/range", topic, start, (1 << 64) - 1) == b""
        assert ask(http, "/v1/index", topic, start, (1 << 64) - 1) == []
        assert ask(http, "/v1/splits", topic, start, (1 << 64) - 1, bytes=1) == []
    for path in PATHS:
        assert not ask(http, path, topic, 2, 2, bytes=1)


def test_what_is_before_the_start_is_gone(http, client, server):
    topic = "short/t"
    for turn in range(8):
        sent = publish(client, topic, range(turn * 50, turn * 50 + 50))
        wait_until(lambda: applied_end(http, topic) == end_of(http, topic), 30, "the applier")
    assert sent

    def start() -> dict[str, int]:
        found: dict[str, int] = http.get("/v1/topic", params={"name": topic}).json()["start"]
        return found

    wait_until(lambda: start()["offset"] > 0, 30, "retention")
    for path in PATHS:
        query = {"topic": topic, "from": 0, "to": 10, "bytes": 5}
        answer = http.get(path, params=query)
        assert answer.status_code == 410
        assert set(answer.json()) == {"error", "start"}
        assert 0 < answer.json()["start"]["offset"] <= start()["offset"]
        assert answer.json()["error"].startswith("topic 'short/t' is kept from offset")


# Many small ranges at once


def ask_many(http: httpx.Client, *ranges: tuple[str, int, int]) -> list[tuple[bytes, bytes, int]]:
    """Return rows, bytes, and the offset of the bytes, for each range."""
    names, starts, ends = zip(*ranges, strict=True)
    answer = http.get("/v1/ranges", params={"topic": names, "from": starts, "to": ends})
    assert answer.status_code == 200, answer.text
    found, data = [], answer.content
    while data:
        # The format is that of the documentation page.
        rows, size, offset = struct.unpack_from(">IIQ", data)
        end = 16 + rows + size
        found.append((data[16 : 16 + rows], data[end - size : end], offset))
        data = data[end:]
    assert len(found) == len(ranges)
    return found


NOTHING = (b"", b"", 0)


def test_many_ranges_are_as_each_alone(http, client, server, topic):
    sent = publish(client, topic, range(60))
    wait_until(lambda: applied_end(http, topic) == len(sent), 30, "the applier")
    sent += publish(client, topic, range(60, 90))
    other = publish(client, f"{topic}/other", range(5))
    edges = [(0, 1), (0, 40), (len(sent) // 2, len(sent) // 2 + 1), (len(sent) - 1, len(sent) + 9)]
    asked = [(topic, *one) for one in edges] + [(f"{topic}/other", 3, len(other))]
    for (name, start, end), (rows, data, offset) in zip(asked, ask_many(http, *asked), strict=True):
        whole = sent if name == topic else other
        check_rows([one for one in decode_rows(rows) if one], whole, start, min(end, len(whole)))
        first, *_ = decode_rows(rows)
        assert first is not None and first.offset == offset
        assert data == whole[offset : offset + len(data)]
        assert offset + len(data) >= min(end, len(whole))


def test_a_range_that_is_not_there_harms_none_beside_it(http, client, topic):
    sent = publish(client, topic, range(3))
    asked = [("nope", 0, 9), (topic, 0, len(sent)), (topic, 2, 2), (topic, len(sent), 1 << 60)]
    missing, found, *empty = ask_many(http, *asked)
    assert (missing, found[1], empty) == (NOTHING, sent, [NOTHING, NOTHING])


def test_many_ranges_do_not_make_a_large_answer(http, client, large):
    publish(client, "behind", range(3))
    found = ask_many(http, *[("large", 5, 6)] * 255, ("behind", 0, 1))
    sizes = [len(data) for _, data, _ in found[:-1]]
    assert sum(sizes) <= 4 << 20 and sizes[0] and not sizes[-1]
    assert found[-1][1], "what fits is there"
    assert ask_many(http, ("large", 0, large)) == [NOTHING]


def test_what_does_not_fit_is_left_out_and_the_rest_is_there(http, client):
    for _ in range(3000):
        client.window()
        client.publish_nowait("memory/long", bytes(700))
    client.flush()
    end = end_of(http, "memory/long")
    wanted = ("memory/long", end - 1, end)
    (_, whole, _), (_, last, _) = ask_many(http, ("memory/long", 0, end), wanted)
    assert len(whole) == end and len(last) < end // 2
    *many, nothing = ask_many(http, *[("memory/long", 0, end)] * 255, wanted)
    assert [bool(data) for _, data, _ in many] == [True] + [False] * 254
    assert nothing[1] == last


@pytest.mark.parametrize(
    ("query", "word"),
    [
        ({}, "1 to 256"),
        ({"topic": ["a"] * 257, "from": ["0"] * 257, "to": ["0"] * 257}, "1 to 256"),
        ({"topic": ["a", "b"], "from": ["0", "0"], "to": ["0"]}, "every range has"),
        ({"topic": ["refused"], "from": ["5"], "to": ["4"]}, "to must not be less than from"),
        ({"topic": ["refused"], "from": ["x"], "to": ["4"]}, "from must be"),
        ({"topic": [""], "from": ["0"], "to": ["4"]}, "topic"),
    ],
)
def test_what_are_no_ranges_is_refused(http, client, query, word):
    client.publish("refused", b"foo")
    answer = http.get("/v1/ranges", params=query)
    assert answer.status_code == 400
    assert word in answer.json()["error"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("query", "word"),
    [
        ({"to": "5"}, "from"),
        ({"from": "0"}, "to"),
        ({"from": "-1", "to": "5"}, "from"),
        ({"from": "0", "to": "x"}, "to"),
        ({"from": "0", "to": str(1 << 64)}, "to"),
        ({"from": "0", "to": "9" * 5000}, "to"),
        ({"from": "٣", "to": "5"}, "from"),
        ({"from": "5", "to": "4"}, "to must not be less than from"),
    ],
)
def test_what_is_no_range_is_refused(http, client, path, query, word):
    client.publish("refused", b"foo")
    answer = http.get(path, params={"topic": "refused", "bytes": "1"} | query)
    assert answer.status_code == 400
    assert word in answer.json()["error"]


@pytest.mark.parametrize("size", [None, "0", "", "1.5", "-1"])
def test_splits_need_a_size(http, client, size):
    client.publish("refused", b"foo")
    query = {"topic": "refused", "from": "0", "to": "5"} | ({"bytes": size} if size else {})
    answer = http.get("/v1/splits", params=query)
    assert (answer.status_code, answer.json()["error"][:5]) == (400, "bytes")


@pytest.mark.parametrize("path", PATHS)
def test_a_range_needs_a_topic_that_exists(http, path):
    query = {"from": "0", "to": "5", "bytes": "1"}
    assert http.get(path, params=query).status_code == 400
    answer = http.get(path, params=query | {"topic": "nope"})
    assert (answer.status_code, answer.json()) == (404, {"error": 'there is no topic "nope"'})
    assert http.get(path, params=query | {"topic": ""}).status_code == 400
    assert http.post(path, params=query).status_code == 405


# Badly behaved clients


@pytest.fixture(scope="module")
def large(http: httpx.Client, client: Any) -> int:
    """Length of topic `large`, which exceeds any socket buffer."""
    for _ in range(160):
        client.window()
        client.publish_nowait("large", bytes(256 << 10))
    client.flush(60)
    return end_of(http, "large")


def request(server: ServerProcess, length: int) -> socket.socket:
    connection = socket.create_connection(server.http, 20)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    path = f"/v1/range?topic=large&from=0&to={length}"
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return connection


def test_a_client_that_reads_slowly_costs_little_memory(server, http, large):
    assert ask(http, "/v1/range", "large", 0, large)[:4] == struct.pack(">I", 256 << 10)
    before = resident_bytes(server.pid)
    slow = [request(server, large) for _ in range(20)]
    try:
        for connection in slow:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        for _ in range(20):
            assert http.get("/healthz").status_code == 200
            for connection in slow:
                connection.recv(10_000)
        # There are twenty answers of 40 MB. Of each one, a few pieces of a megabyte may wait.
        assert resident_bytes(server.pid) - before < 20 * (6 << 20)
    finally:
        for connection in slow:
            connection.close()
    assert http.get("/healthz").status_code == 200


def test_a_client_that_hangs_up_harms_nobody(server, http, large):
    for number in range(30):
        connection = request(server, large)
        connection.recv(1 + number * 1000)
        if number % 2:
            # The connection ends with a reset instead of an orderly close.
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        connection.close()
    assert http.get("/healthz").status_code == 200
    assert len(ask(http, "/v1/range", "large", 0, large)) == large
    wait_until(lambda: segments_open(server) <= 20, 30, "files to be closed")
    assert "Traceback" not in server.stderr
    assert "Exception" not in server.stderr


def segments_open(server: ServerProcess) -> int:
    """Return the number of segment files that the server has open."""
    found = 0
    for link in Path(f"/proc/{server.pid}/fd").iterdir():
        try:
            found += os.readlink(link).endswith(".log")
        except FileNotFoundError:
            continue
    return found
