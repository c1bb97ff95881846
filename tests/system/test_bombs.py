"""Small bodies that would become large: compressed and deeply nested ones, to every endpoint with a body.

Elsewhere: the same over WebSocket (`tests/system/wombat/test_bad_input.py`, `test_http.py`,
`tests/system/channel/test_bad_input.py`), and bodies that are large from the start (`test_http_flood.py`).
"""

import gzip
import zlib
from collections.abc import Iterator

import httpx
import pytest

from headrace.testing import ServerProcess
from tests.system.access.test_table import ENDPOINTS, STREAM
from tests.system.support import resident_bytes

BOMB_BYTES = 200 << 20
GROWTH_BYTES_MAX = 48 << 20
"""Far below the size of one decoded bomb. What grows is what any request costs."""
MEMBER = "?name=c&processor=p"
JSON = {"Content-Type": "application/json"}
TAKE_A_BODY = {
    ("POST", "/v1/cursors"): "/v1/cursors",
    ("POST", "/v1/batches"): "/v1/batches",
    ("POST", "/v1/staged"): "/v1/staged",
    ("POST", "/v1/channel/messages"): f"/v1/channel/messages{MEMBER}&number=1",
    ("PUT", "/v1/channel/snapshot"): f"/v1/channel/snapshot{MEMBER}&offset=0",
    ("POST", STREAM): "/v1/stream/bombs",
    ("PUT", STREAM): "/v1/stream/new",
}
"""Addresses of the endpoints, by method and route."""
DEPTH = 30_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("bombs") / "data") as process:
        assert httpx.post(f"{process.http_url}/v1/channel/join{MEMBER}").status_code == 200
        stream = httpx.put(f"{process.http_url}/v1/stream/bombs", headers=JSON)
        assert stream.status_code == 201
        yield process
        assert process.running, process.stderr
        assert "Traceback" not in process.stderr, process.stderr


@pytest.fixture(scope="module")
def bombs() -> dict[str, bytes]:
    """Return 200 MiB of zeros, by the name of the encoding that makes a few hundred KiB of them."""
    zeros = bytes(BOMB_BYTES)
    return {"gzip": gzip.compress(zeros, 1), "deflate": zlib.compress(zeros, 1)}


def test_every_endpoint_with_a_body_is_tried() -> None:
    assert {one for one, row in ENDPOINTS.items() if row.body is not None} <= TAKE_A_BODY.keys()


def test_a_compressed_body_is_never_decompressed(
    server: ServerProcess, bombs: dict[str, bytes]
) -> None:
    before = resident_bytes(server.pid)
    for (method, _), path in TAKE_A_BODY.items():
        for encoding, bomb in bombs.items():
            headers = JSON | {"Content-Encoding": encoding}
            answer = httpx.request(method, server.http_url + path, content=bomb, headers=headers)
            assert answer.status_code in (400, 413, 415), (path, answer.text)
    assert resident_bytes(server.pid) - before < GROWTH_BYTES_MAX


@pytest.mark.parametrize(
    "body",
    [
        b"[" * DEPTH,
        b"[" * DEPTH + b"]" * DEPTH,
        b'{"a":' * DEPTH + b"1" + b"}" * DEPTH,
        b'{"reader": "r", "positions": ' + b"[" * DEPTH + b"]" * DEPTH + b"}",
        b'{"producer": "p", "number": 0, "staged": ' + b"[" * DEPTH + b"]" * DEPTH + b"}",
    ],
    ids=["open", "arrays", "objects", "positions", "staged"],
)
def test_a_deeply_nested_body_is_refused(server: ServerProcess, body: bytes) -> None:
    for (method, _), path in TAKE_A_BODY.items():
        # Channel messages of another type are mere bytes.
        answer = httpx.request(method, server.http_url + path, content=body, headers=JSON)
        assert answer.status_code == 400, (path, answer.text)
        assert len(answer.content) < 1000
