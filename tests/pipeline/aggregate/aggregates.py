"""Helpers for tests of aggregations: channels of a real server with every reducer, and tables of states."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from deltalake import DeltaTable

from headrace import connect_blocking
from headrace.testing import ServerProcess, wait_until
from tests.spark.support import SMALL

JSON = "application/json"
REDUCERS = {"last": "last", "count": "count", "merge": "merge", "map": "map", "eq": "operator:eq"}
"""Reducers by the prefix of channel names."""

CONFIG = SMALL + "".join(
    f'[[topics]]\nprefix = "$channel/{prefix}/"\nreducer = "{name}"\n'
    for prefix, name in {**REDUCERS, "up": "uploaded"}.items()
)


@contextmanager
def channel_server(directory: Path) -> Iterator[ServerProcess]:
    (directory / "config.toml").write_text(CONFIG)
    flags = (f"--config={directory / 'config.toml'}", "--durability=written")
    with ServerProcess(directory / "data", *flags) as process:
        yield process
        assert "Traceback" not in process.stderr, process.stderr


class State(NamedTuple):
    """A channel's state, as a table of states or a server gives it."""

    epoch: int
    offset: int
    state: bytes
    is_json: bool


class Channels:
    """Sends messages as processor `a`. Processor `k` keeps the logs until it leaves."""

    def __init__(self, server: ServerProcess) -> None:
        self._http = httpx.Client(base_url=server.http_url)
        self._numbers: dict[str, int] = {}
        self._ends: dict[str, int] = {}

    def close(self) -> None:
        self._http.close()

    def send(self, name: str, data: bytes, *, is_json: bool) -> None:
        if name not in self._numbers:
            self._numbers[name] = 0
            for processor in "ak":
                self._ask("POST", "/join", name=name, processor=processor)
        self._numbers[name] += 1
        query = {"name": name, "processor": "a", "number": self._numbers[name]}
        headers = {"Content-Type": JSON} if is_json else {}
        told = self._ask("POST", "/messages", data, headers, **query).json()
        self._ends[name] = told["offset"]

    def leave(self, name: str) -> None:
        """Leave the channel with both processors. The server then folds its log because nobody needs it."""
        for processor in "ak":
            self._ask("POST", "/leave", name=name, processor=processor)

    def snapshot(self, name: str) -> State:
        """Return the snapshot that the server makes of a channel that was left."""

        def is_folded() -> bool:
            told = self._ask("GET", "", name=name).json()["snapshot"]
            return bool(told) and told["offset"] == self._ends[name]

        wait_until(is_folded, 120, "the server to fold")
        return self.kept(name)

    def kept(self, name: str) -> State:
        raw = {"Accept": "application/octet-stream"}
        answer = self._ask("GET", "/snapshot", None, raw, name=name)
        place = (int(answer.headers[f"Headrace-{one}"]) for one in ("Epoch", "Offset"))
        return State(*place, answer.content, answer.headers["Content-Type"] == JSON)

    def _ask(
        self,
        method: str,
        path: str,
        data: bytes | None = None,
        headers: dict[str, str] | None = None,
        **query: Any,
    ) -> httpx.Response:
        answer = self._http.request(
            method, f"/v1/channel{path}", params=query, content=data, headers=headers
        )
        assert answer.is_success, answer.text
        return answer


def fill(server: ServerProcess, payloads: dict[str, list[bytes]]) -> None:
    with connect_blocking(server.figg_url) as client:
        for topic, some in payloads.items():
            for payload in some:
                client.publish_nowait(topic, payload)
        client.flush(60)


def is_table(into: Path | str, options: Mapping[str, str] | None = None) -> bool:
    return DeltaTable.is_deltatable(str(into), {**(options or {}), "AWS_ALLOW_HTTP": "true"})


def rows_of(
    into: Path | str, options: Mapping[str, str] | None = None
) -> dict[str, dict[str, Any]]:
    options = {**(options or {}), "AWS_ALLOW_HTTP": "true"}
    found = DeltaTable(str(into), storage_options=options).to_pyarrow_table().to_pylist()
    assert len({row["topic"] for row in found}) == len(found)
    return {row["topic"]: row for row in found}
