"""Fixtures for tests of the pure parts: one log, made by a real server, that nobody changes afterwards."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import settings

from headrace import connect_blocking
from headrace.log.read.index import decode_header
from headrace.reader.files import FileLog
from headrace.reader.server import ServerLog
from headrace.reader.view import LogLocation, LogRange, LogView, TopicState, open_log
from headrace.testing import ServerProcess, wait_until
from tests.system.support import destroy, get_json
from tests.tools import EXAMPLES

# The machine that runs the tests is shared, so the duration of an example means nothing.
settings.register_profile("shared", deadline=None, max_examples=EXAMPLES)
settings.load_profile("shared")

CONFIG = """
durability = "written"
[journal]
file_bytes = 1048576
files = 4
rotate_s = 0.1
[segment]
bytes = 8192
[retention]
check_s = 0.1
[[topics]]
prefix = "short/"
retention_bytes = 8192
"""


class Record(NamedTuple):
    """A record that was published and is still in the log."""

    offset: int
    ordinal: int
    payload: bytes

    @property
    def end(self) -> int:
        return self.offset + 4 + len(self.payload)


class Filled(NamedTuple):
    """A server whose log is fully applied, and the expected content of that log."""

    server: ServerProcess
    records: dict[str, list[Record]]

    @property
    def path(self) -> Path:
        return self.server.data_dir

    def segments(self, topic: str) -> list[Path]:
        """Return the topic's segment files, oldest first."""
        found = {}
        for index in self.path.glob("segments/*/*.idx"):
            header = decode_header(index.read_bytes())
            if header is not None and header.name == topic:
                found[header.base] = index.with_suffix(".log")
        return [found[base] for base in sorted(found)]


def start_server(root: Path, config: str = CONFIG) -> ServerProcess:
    (root / "config.toml").write_text(config)
    return ServerProcess(root / "data", f"--config={root / 'config.toml'}")


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    """Topics with one or many segments, a recreated one, and one that retention has mostly trimmed."""
    with start_server(tmp_path_factory.mktemp("log")) as server:
        yield Filled(server, _fill(server))
        assert server.running, server.stderr
        assert "Traceback" not in server.stderr, server.stderr


def _fill(server: ServerProcess) -> dict[str, list[Record]]:
    sent: dict[str, list[bytes]] = {}
    with connect_blocking(server.figg_url) as client:

        def publish(topic: str, payload: bytes) -> None:
            client.publish_nowait(topic, payload)
            sent.setdefault(topic, []).append(payload)

        for number in range(7):
            publish("anew", b"of the first life %d" % number)
        client.flush()
        destroy(server, "anew")
        with client.subscribe("$audit", offset=0) as trail:
            sent["$audit"] = [bytes(next(trail).payload)]  # says that the topic was destroyed
        for part in range(12):
            for number in range(60):
                publish("many", b"%d " % number * (number % 40))
                publish("anew", bytes(number % 3))
                publish("short/many", b"x" * (100 + number % 7))
            client.flush()
            time.sleep(0.12)  # lets times differ, and the applier work in several rounds
            publish("é/☃ +&%", b"%d" % part)
        publish("one", b"")
        client.flush()
        wait_until(lambda: all(_is_settled(server, name) for name in sent), 30, "the applier")
    return {name: _kept(server, name, payloads) for name, payloads in sent.items()}


def state_of(server: ServerProcess, name: str) -> TopicState:
    with closing(ServerLog(LogLocation(urls=(server.http_url,)))) as log:
        return log.topics([name])[name]


def _is_settled(server: ServerProcess, name: str) -> bool:
    if not name.startswith("short/"):
        return _is_applied(server, name)
    # Compare the views before the segments, so that all records are in them, and again afterwards: a trim
    # may have come in between, and its files be deleted later.
    return _is_applied(server, name) and _is_trimmed(server, name) and _is_applied(server, name)


def _is_trimmed(server: ServerProcess, name: str) -> bool:
    later = get_json(server, f"/v1/topic?name={name}")["segments"][1:]
    return sum(segment["bytes"] for segment in later) < 8192


def _is_applied(server: ServerProcess, name: str) -> bool:
    return FileLog(str(server.data_dir)).topics([name]).get(name) == state_of(server, name)


def _kept(server: ServerProcess, name: str, payloads: list[bytes]) -> list[Record]:
    state = state_of(server, name)
    offset = ordinal = 0
    kept = []
    for payload in payloads:
        record = Record(offset, ordinal, payload)
        if offset >= state.start.offset:
            kept.append(record)
        offset, ordinal = record.end, ordinal + 1
    assert (offset, ordinal) == state.end[1:], name
    return kept


class Announced(ServerLog):
    """View that expects the parts of a split to be read in order, so that it fetches small parts together."""

    def split(self, whole: LogRange, bytes_max: int) -> Sequence[LogRange]:
        parts = super().split(whole, bytes_max)
        self.expect(parts)
        return parts


VIEWS = ["files", "server", "server, together"]


def view_of(filled: Filled, kind: str) -> LogView:
    if kind == "files":
        return open_log(LogLocation(path=str(filled.path)))
    place = LogLocation(urls=(filled.server.http_url,))
    return open_log(place) if kind == "server" else Announced(place)


@pytest.fixture(params=VIEWS)
def log(request: pytest.FixtureRequest, filled: Filled) -> Iterator[LogView]:
    """The same log, through each of the views."""
    with closing(view_of(filled, request.param)) as found:
        yield found
