"""The exchanges of docs/protocols/channel.md, with a raw WebSocket client that knows nothing else."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from headrace.testing import ServerProcess

PAGE = Path(__file__).parents[3] / "docs" / "protocols" / "channel.md"
EXCHANGES = re.findall(r"^```channel\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def hear(client: ClientConnection) -> Any:
    return json.loads(client.recv(timeout=30))


def same(found: Any, expected: Any) -> bool:
    """Compare messages; NOW matches any time."""
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            same(found[key], expected[key]) for key in found
        )
    return bool(expected == "NOW" or found == expected)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_exchange_is_as_it_is_documented(tmp_path: Path, exchange: str) -> None:
    with ServerProcess(tmp_path / "data") as server:
        url = f"ws://{server.ws[0]}:{server.ws[1]}/v1/channels"
        with connect(url) as client, connect(url) as other:
            other.send('{"type": "hello", "processor": "other"}')
            other.send('{"type": "join", "channel": "doc/1", "receive": "poll"}')
            assert [hear(other)["type"] for _ in range(2)] == ["welcome", "joined"]
            for line in exchange.splitlines():
                sign, _, rest = line.partition(" ")
                if sign == ">":
                    client.send(rest)
                elif sign == "<":
                    expected = json.loads(re.sub(r"\bNOW\b", '"NOW"', rest))
                    found = hear(client)
                    assert same(found, expected), (found, expected)
                else:
                    number, payload = re.fullmatch(r"other sends (\d+) (.*)", rest).groups()  # type: ignore[union-attr]
                    other.send(
                        f'{{"type": "send", "channel": "doc/1", "number": {number}, "payload": {payload}}}'
                    )
                    assert hear(other)["type"] == "sent"


def test_there_are_exchanges() -> None:
    assert len(EXCHANGES) == 4
