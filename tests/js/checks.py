"""Checks of a scenario's reports, for every program that runs it."""

from itertools import pairwise
from typing import Any

import headrace
from headrace.testing import ServerProcess
from tests.js.support import Reports


def check_crash(server: ServerProcess, reports: Reports) -> None:
    """Kill the server half way through the scenario, and compare what the scenario saw with the log."""
    reports.expect("half")
    server.kill()
    server.start()
    done = reports.expect("done")

    published, half, states = done["published"], done["half"], done["states"]
    assert published >= 2 * half
    assert states[0] == "connected" and "disconnected" in states and states[-1] == "closed"
    assert done["missed"] == []
    assert done["acknowledged"] == list(range(published))

    received = [(offset, text) for offset, text in done["received"]]
    assert received == log_of(server, "numbers", len(received))
    # The only duplicates are publishes whose acknowledgement was lost with the server.
    texts = [text for _, text in received]
    assert list(dict.fromkeys(texts)) == [*map(str, range(published)), "last"]
    steps = [int(b) - int(a) for a, b in pairwise(texts[:-1])]
    assert sum(step != 1 for step in steps) <= 1
    assert done["resumed"] == done["received"][half + 1 :]


def check_slow(reports: Reports) -> None:
    done = reports.expect("done")
    assert done["received"] == list(range(2000))
    assert done["detached"] > 0


def check_payloads(server: ServerProcess, reports: Reports) -> None:
    done = reports.expect("done")
    expected = [
        b"",
        b"text",
        "\U0001f30a".encode(),
        bytes(range(256)),
        b"\7" * 65_536,
        b"\10" * 262_144,
    ]
    assert done["payloads"] == [[len(payload), _sum(payload)] for payload in expected]
    log = _read(server, "payloads", len(expected) + 1)
    assert [payload for _, payload in log] == [*expected, b"unheard"]
    nexts = [offset for offset, _ in log][:-1]
    assert done["offsets"] == [list(both) for both in pairwise([0, *nexts])]
    assert done["began"].endswith("@0")
    assert done["ended"] is True
    assert done["latencyMs"] >= 0
    assert (done["state"], done["lastError"]) == ("closed", "")


def check_readers(reports: Reports) -> None:
    done = reports.expect("done")
    assert done["first"] == ["0", "1", "2"]
    assert done["ordinals"] == [0, 1, 2]
    assert all(1.7e12 < one < 1e13 for one in [*done["times"], *done["epochs"]])
    assert done["acknowledged"] == 10
    assert done["second"] == ["2", "3", "4"]
    assert done["changes"] == ["waiting", "active"]
    assert done["handled"] == ["5"]
    assert done["third"] == "6"
    assert done["plain"] == [None, None]
    assert done["plainEpoch"] == done["epochs"][0]
    assert done["refused"] == "ReaderRefusedError"
    assert done["summed"] < 2000, "nothing was acknowledged before the last message"


def log_of(server: ServerProcess, topic: str, count: int) -> list[tuple[int, str]]:
    """Return the first messages of a topic, read over another protocol."""
    return [(offset, payload.decode()) for offset, payload in _read(server, topic, count)]


def _read(server: ServerProcess, topic: str, count: int) -> list[tuple[int, Any]]:
    with headrace.connect_blocking(server.figg_url) as client:
        log = []
        for message in client.subscribe(topic, offset=0, timeout_s=30):
            log.append((message.next_offset, message.payload))
            if len(log) == count:
                break
        return log


def _sum(payload: bytes) -> int:
    total = 0
    for byte in payload:
        total = (total * 31 + byte) % 1_000_003
    return total
