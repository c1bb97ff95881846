"""A raw client of any Logux protocol: the test determines every message."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import msgpack
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

WAIT_S = 30


class Client:
    """Client that does only what the specification says."""

    def __init__(self, stack: ExitStack, url: str, binary: bool = False) -> None:
        self._binary = binary
        self.socket = stack.enter_context(connect(url, max_size=None, close_timeout=1))

    def say(self, *message: Any) -> None:
        self.say_plain(message)

    def say_plain(self, message: Any) -> None:
        self.socket.send(msgpack.packb(message) if self._binary else json.dumps(message))

    def hear(self) -> Any:
        data = self.socket.recv(timeout=WAIT_S)
        assert isinstance(data, bytes) is self._binary
        return msgpack.unpackb(data) if self._binary else json.loads(data)

    def hear_only(self, *types: str) -> Any:
        """Return the next message of one of these types. Skip a `pong`, which confirms what we have."""
        while True:
            message = self.hear()
            if message[0] in types:
                return message
            assert message[0] == "pong", message

    def connect(self, host: str, synced: int = 0, *credentials: Any) -> None:
        self.say("connect", [0, 0], host, synced, *credentials)
        answer = self.hear()
        assert answer[:3] == ["connected", [0, 0], "server"], answer

    def connect5(self, node: str) -> None:
        self.say("connect", 5, node, 0)
        assert self.hear() == ["headers", {"env": "development"}]
        assert self.hear()[:3] == ["connected", 5, "server"]

    def closed(self) -> int:
        """Receive until the connection is closed, and return the close code."""
        while True:
            try:
                self.socket.recv(timeout=WAIT_S)
            except ConnectionClosed as closed:
                return closed.rcvd.code if closed.rcvd is not None else 0


Open = Callable[..., Client]
