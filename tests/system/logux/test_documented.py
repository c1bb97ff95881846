"""The exchanges of docs/protocols/logux.md, with a raw WebSocket client that knows nothing else."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from headrace.testing import ServerProcess
from tests.system.logux.conftest import logux_url

PAGE = Path(__file__).parents[3] / "docs" / "protocols" / "logux.md"
EXCHANGES = re.findall(r"^```logux\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)

CONFIG = f"""
[[access.token]]
name = "correct"
sha256 = "{hashlib.sha256(b"correct").hexdigest()}"
"""


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
    return expected == "NOW" or found == expected


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_an_exchange_is_as_it_is_documented(tmp_path: Path, exchange: str) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    with ServerProcess(tmp_path / "data", f"--config={tmp_path / 'config.toml'}") as server:
        url = logux_url(server)
        with connect(url) as client, connect(url) as other:
            other.send(json.dumps(["connect", [0, 0], "client2", 0, "correct"]))
            assert hear(other)[0] == "connected"
            for line in exchange.splitlines():
                sign, _, rest = line.partition(" ")
                if sign == ">":
                    client.send(rest)
                elif sign == "<":
                    expected = json.loads(re.sub(r"\bNOW\b", '"NOW"', rest))
                    found = hear(client)
                    assert same(found, expected), (found, expected)
                else:
                    event, created = re.fullmatch(r"client2 adds (\{.*\}) (\[.*\])", rest).groups()  # type: ignore[union-attr]
                    other.send(f'["sync", 1, {event}, {created}]')
                    assert hear(other) == ["synced", 1]
