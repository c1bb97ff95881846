"""Checks of the reports of channel scenarios, for every program that runs them."""

import json
from typing import Any
from urllib.request import Request, urlopen

import headrace
from headrace.payload.channel import StoredMessage, decode_message
from headrace.testing import ServerProcess
from tests.js.support import Reports

TIMEOUT_S = 30


def channel_url(server: ServerProcess) -> str:
    """Return the URL of the channels, without a channel's name."""
    return server.wombat_url.replace("wombat://", "channel://")


def keep(server: ServerProcess, channel: str) -> None:
    """Keep the whole log: a member joins that never acknowledges anything."""
    url = f"{server.http_url}/v1/channel/join?name={channel}&processor=keeper"
    with urlopen(Request(url, method="POST"), timeout=TIMEOUT_S) as answer:
        assert answer.status == 200


def describe(server: ServerProcess) -> Any:
    with urlopen(f"{server.http_url}/v1/channels", timeout=TIMEOUT_S) as answer:
        return json.load(answer)


def check_crash(server: ServerProcess, reports: Reports) -> None:
    """Kill the server half way through the scenario, and compare what the scenario saw with the log."""
    reports.expect("half")
    server.kill()
    server.start()
    done = reports.expect("done")

    sent, states = done["sent"], done["states"]
    assert sent >= 2 * done["half"] + done["offline"] and done["offline"] == 50
    assert states[0] == "connected" and "disconnected" in states and states[-1] == "closed"

    # Every message occurs once and in order, in the log and among the received ones, wherever the crash
    # interrupted.
    log = log_of(server, "crash", sent + 1)
    contents = [json.loads(message.content.data) for _, message in log]
    assert contents == [*range(sent), "last"]
    assert [message.number for _, message in log] == [*range(1, sent + 2)]
    assert done["received"] == [
        [offset, "a", message.number, content]
        for (offset, message), content in zip(log, contents, strict=True)
    ]

    offsets = [offset for offset, _ in log]
    assert [payload for payload, _ in done["accepted"]] == [*range(sent)]
    known = [(payload, offset) for payload, offset in done["accepted"] if offset is not None]
    assert all(offsets[payload] == offset for payload, offset in known)
    assert len(known) >= sent - 32  # at most 32 were in flight


def check_contents(server: ServerProcess, reports: Reports) -> None:
    done = reports.expect("done")
    assert done["same"] == [True] * 11
    assert done["offsets"] == done["accepted"]
    assert done["large"] == "too-large"
    log = log_of(server, "contents", 12)
    assert [offset for offset, _ in log] == [*done["accepted"], done["behind"]]
    assert [message.number for _, message in log] == [*range(1, 13)]
    assert log[9][1].content == (bytes(range(256)), False)
    assert log[6][1].content == (b'{"a":[{"b":null}]}', True)


def log_of(server: ServerProcess, channel: str, count: int) -> list[tuple[int, StoredMessage]]:
    """Return the first messages of a channel, read over another protocol."""
    log = []
    with headrace.connect_blocking(server.figg_url) as client:
        for record in client.subscribe(f"$channel/{channel}", offset=0, timeout_s=TIMEOUT_S):
            log.append((record.next_offset, decode_message(record.payload)))
            if len(log) == count:
                break
    return log
