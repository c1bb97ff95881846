"""Pack a data directory of a version that named channels `channel/…` and Logux logs `logux/…`.

    names=tests/log/old_versions/old_names
    python -m tests.log.old_versions.kept_names $names/served.tar.xz $names/conflicts.tar.xz

was run with the last such version, against its own server. The server was killed at the end, so that the
newest changes are only in the journal. The first archive has the directory as `data` and its expected content
as `expected.json`. The second archive has directories with ordinary topics whose names are reserved now. With
a later version, this script would pack the present names.
"""

import io
import json
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from headrace.log import layout
from headrace.payload.channel import Content, StoredMessage, encode_message
from headrace.testing import ServerProcess
from tests.fakes.store import StepStore, block
from tests.log.damage_matrix.worlds import small
from tests.log.old_versions.kept_format import _anonymous

FLAGS = [f"--set={one}" for one in ("journal.file_bytes=65536", "journal.rotate_s=3600")]
LONG = "long/" + "x" * 242
"""A channel name of the maximum length."""


class Api:
    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def ask(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        given = {"content": body} if isinstance(body, bytes) else {"json": body}
        answer = self._client.request(method, path, params=query, **given)
        assert answer.is_success, answer.text
        return answer.json()

    def join(self, name: str, *processors: str) -> None:
        for processor in processors:
            self.ask("POST", "/v1/channel/join", name=name, processor=processor)

    def send(self, name: str, number: int, processor: str = "a") -> int:
        asked = {"name": name, "processor": processor, "number": number}
        sent = self.ask("POST", "/v1/channel/messages", {"n": number}, **asked)
        return int(sent["offset"])

    def write(self, producer: str, number: int, *blocks: bytes) -> None:
        staged = self.stage(*blocks)
        batch = {"producer": producer, "number": number, "staged": [staged]}
        self.ask("POST", "/v1/batches", batch)

    def stage(self, *blocks: bytes) -> str:
        return str(self.ask("POST", "/v1/staged", b"".join(blocks))["id"])

    def set_cursor(self, reader: str, topic: str, offset: int) -> None:
        known = self.topic(topic)
        ordinal = known["end"]["ordinal"] if offset == known["end"]["offset"] else 1
        place = {"topic": topic, "epoch": known["epoch"], "offset": offset, "ordinal": ordinal}
        self.ask("POST", "/v1/cursors", {"reader": reader, "positions": [place]})

    def topic(self, name: str) -> Any:
        return self.ask("GET", "/v1/topic", name=name)


def event(number: int) -> bytes:
    return json.dumps({"event": {"type": "add"}, "created": [number, "host", 0]}).encode()


def message(number: int) -> bytes:
    return encode_message(StoredMessage("spark", number, Content(b'{"n":1}', is_json=True)))


def applied(api: Api) -> None:
    """Write what the clean stop puts into segments and the catalogue."""
    api.join("room", "a", "b")
    offsets = [api.send("room", number) for number in range(1, 6)]
    api.ask("POST", "/v1/channel/ack", name="room", processor="b", offset=offsets[2])
    api.join(LONG, "a", "b")
    api.send(LONG, 1)
    api.write("etl", 1, block("logux/main", [event(n) for n in range(4)]), block("orders", [b"o"]))
    api.write("etl", 2, block("logux/gone", [event(1)]), block("logux/gone too", [event(1)]))
    api.ask("DELETE", "/v1/topic", name="logux/gone")
    api.set_cursor("billing", "channel/room", offsets[1])
    api.set_cursor("lake", "logux/main", api.topic("logux/main")["end"]["offset"])


def unapplied(api: Api) -> dict[str, Any]:
    """Write what only the journal holds afterwards."""
    offsets = [api.send("room", number) for number in range(6, 8)]
    api.join("late", "a", "b")
    api.send("late", 1)
    api.write("etl", 3, block("logux/main", [event(n) for n in range(4, 6)]))
    api.write("etl", 4, block("logux/late", [event(1)]))
    api.ask("DELETE", "/v1/topic", name="logux/gone too")
    api.set_cursor("billing", "channel/room", offsets[0])
    staged = api.stage(block("logux/main", [event(9)]), block("channel/staged", [message(1)]))
    topics = api.ask("GET", "/v1/topics")["topics"]
    return {
        "topics": {one["name"]: one for one in topics},
        "cursors": api.ask("GET", "/v1/cursors")["cursors"],
        "channels": {name: api.ask("GET", "/v1/channel", name=name) for name in ("room", "late")},
        "staged": staged,
    }


def conflicts(path: Path) -> None:
    """Make directories with an ordinary topic whose name became reserved later."""
    for state in ("applied", "unapplied", "destroyed"):
        store = StepStore(small(path / state, 2))
        store.append("$channel/x", b"one")
        store.store.set_cursors("r", {"$channel/x": store.store.topic("$channel/x").end}, print)
        store.append("channel/x", b"two")
        if state == "applied":
            store.close()
            continue
        if state == "destroyed":
            store.destroy("$channel/x")
        store.crash()


def main() -> None:
    layout.SEGMENT_DIRECTORIES = 4  # the tests that open the archives use the same value
    with TemporaryDirectory() as scratch, tarfile.open(sys.argv[2], "w:xz", preset=9) as archive:
        conflicts(Path(scratch))
        archive.add(scratch, ".", filter=_anonymous)
    layout.SEGMENT_DIRECTORIES = 256
    with TemporaryDirectory() as scratch:
        data = Path(scratch) / "data"
        with ServerProcess(data, *FLAGS) as server, httpx.Client(base_url=server.http_url) as one:
            applied(Api(one))
            server.terminate()
        store = StepStore(small(data, 4))
        assert store.append_once("logux/main", "producer", 7, event(7)).duplicate is False
        store.close()
        with ServerProcess(data, *FLAGS) as server, httpx.Client(base_url=server.http_url) as one:
            expected = unapplied(Api(one))
            server.kill()
        described = json.dumps(expected, indent=1).encode()
        with tarfile.open(sys.argv[1], "w:xz", preset=9) as archive:
            member = tarfile.TarInfo("expected.json")
            member.size = len(described)
            archive.addfile(member, io.BytesIO(described))
            archive.add(data, "data", filter=_anonymous)


if __name__ == "__main__":
    main()
