"""A server with access control, its tokens, and peers that send what a test says and collect the reaction."""

import contextlib
import socket
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import msgpack
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from headrace.access import tokens as stored
from headrace.access.operations import NAME_KINDS, NameKind, Operation
from headrace.log import shared_file
from headrace.log.disk import Disk
from headrace.testing import ServerProcess
from headrace.wire.figg import messages as figg
from headrace.wire.figg.decoder import ClientDecoder

NOW_MS = 1_800_000_000_000
WAIT_S = 30.0
EVERYTHING = ("all:*", "all:$*")

CONFIG = """
[limits]
refusal_delay_s = 0
"""


def grants_without(operation: Operation) -> list[str]:
    """Return grants for every operation but one."""
    found = []
    for one in Operation:
        if one is not operation and NAME_KINDS[one] is NameKind.MEMBER:
            found += [f"{one}:*/*", f"{one}:$*/*"]
        elif one is not operation:
            found += [f"{one}:*"] + [f"{one}:$*"] * (one is not Operation.ADMIN)
    return found


class Tokens:
    """The tokens in a data directory, changed as `headrace token` does. A token is its name."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / "tokens.json"
        data_dir.mkdir(exist_ok=True)

    def add(self, name: str, grants: Iterable[str], expires_ms: int | None = None) -> str:
        self.change(
            lambda known: stored.added(
                known, name, name, list(grants), now_ms=0, expires_ms=expires_ms
            )
        )
        return name

    def revoke(self, name: str) -> None:
        self.change(lambda known: stored.revoked(known, name, NOW_MS))

    def change(self, edit: Callable[[stored.Tokens], stored.Tokens]) -> None:
        def replaced(data: bytes | None) -> bytes:
            return stored.encode(edit(() if data is None else stored.decode(data)))

        shared_file.change(self._path, Disk(), 1 << 20, replaced)


class Figg:
    """A Figg connection. The server's reactions come as messages; None when it has closed."""

    def __init__(self, server: ServerProcess, token: str | None = None) -> None:
        self._socket = socket.create_connection(server.figg, WAIT_S)
        self._decoder = ClientDecoder()
        self._heard: list[Any] = []
        if token is not None:
            self.send(figg.encode_auth(token))

    def send(self, *frames: bytes) -> None:
        with contextlib.suppress(
            ConnectionError
        ):  # what the server said before is still to be read
            self._socket.sendall(b"".join(frames))

    def hear(self) -> Any:
        while not self._heard:
            try:
                data = self._socket.recv(65_536)
            except ConnectionError:
                return None
            if not data:
                return None
            self._heard += self._decoder.receive(data)
        return self._heard.pop(0)

    def hear_until(self, *kinds: type) -> Any:
        """Return the next message of one of these kinds; None if the server closes before."""
        while (message := self.hear()) is not None:
            if isinstance(message, kinds):
                return message
        return None

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> "Figg":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Socket:
    """A WebSocket. Messages are Python values; the last words are the code and reason of its end."""

    def __init__(
        self,
        server: ServerProcess,
        path: str,
        *,
        bearer: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        host, port = server.ws
        given = dict(headers or {}) | (
            {} if bearer is None else {"Authorization": f"Bearer {bearer}"}
        )
        opened = connect(
            f"ws://{host}:{port}{path}",
            additional_headers=given,
            close_timeout=1,
            max_size=None,
            open_timeout=WAIT_S,
        )
        self._socket: ClientConnection = opened.__enter__()
        self.last_words = (0, "")

    def send(self, value: Any) -> None:
        with contextlib.suppress(ConnectionClosed):
            self._socket.send(value if isinstance(value, bytes) else msgpack.packb(value))

    def hear(self) -> Any:
        """Return the next message; None if the server has closed."""
        try:
            data = self._socket.recv(timeout=WAIT_S)
        except ConnectionClosed as closed:
            if closed.rcvd is not None:
                self.last_words = closed.rcvd.code, closed.rcvd.reason
            return None
        assert isinstance(data, bytes)
        return msgpack.unpackb(data, strict_map_key=False)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> "Socket":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def status_of_handshake(server: ServerProcess, path: str, **given: Any) -> int:
    """Return the status of a handshake: 101 if it is accepted."""
    try:
        Socket(server, path, **given).close()
    except InvalidStatus as refused:
        return refused.response.status_code
    return 101


def bearer(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def ask(
    server: ServerProcess, token: str | None, method: str, path: str, **given: Any
) -> httpx.Response:
    headers = bearer(token) | given.pop("headers", {})
    return _http().request(method, server.http_url + path, headers=headers, **given)


@cache
def _http() -> httpx.Client:
    """Return one client for all requests: to make one takes longer than a request."""
    return httpx.Client(timeout=WAIT_S)
