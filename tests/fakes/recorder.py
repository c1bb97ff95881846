"""A TCP proxy that keeps what clients send, to search it for secrets. Knows no protocol."""

import socket
import threading
from contextlib import suppress
from typing import Self


class Recorder:
    """Proxy in front of a listener. Its address is `host`, what clients have sent is in `sent`."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.sent: list[bytearray] = []
        """Bytes of each connection from its client."""
        self.ended = 0
        """Number of connections that their clients have ended."""

    @property
    def host(self) -> str:
        return "{}:{}".format(*self._listener.getsockname())

    def __enter__(self) -> Self:
        self._run(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self._listener, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in (self._listener, *self._sockets):
            one.close()

    def has_seen(self, secret: bytes) -> bool:
        """True if a client has sent this secret, be it in a WebSocket frame: a mask repeats after 4 bytes."""
        masked = _without_mask(secret)
        return any(masked in _without_mask(bytes(one)) for one in self.sent)

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed at the end
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._sockets += (client, server)
                self.sent.append(bytearray())
                self._run(self._record, client, server, self.sent[-1])
                self._run(self._pump, server, client, bytearray())

    def _record(self, client: socket.socket, server: socket.socket, kept: bytearray) -> None:
        self._pump(client, server, kept)
        self.ended += 1

    def _pump(self, source: socket.socket, to: socket.socket, kept: bytearray) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                kept += data
                to.sendall(data)
        with suppress(OSError):
            to.shutdown(socket.SHUT_WR)

    def _run(self, function: object, *args: object) -> None:
        thread = threading.Thread(target=function, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()


def _without_mask(data: bytes) -> bytes:
    return bytes(one ^ other for one, other in zip(data, data[4:], strict=False))
