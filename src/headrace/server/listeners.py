"""Listening sockets of the server: inherited from a service manager, or opened as configured.

Inheriting follows sd_listen_fds(3): `LISTEN_FDS` sockets from descriptor 3 on, for the process `LISTEN_PID`,
with the names `LISTEN_FDNAMES`. Elsewhere: the protocol that answers on each socket (`server.py`).

A service manager is notified by datagrams to `NOTIFY_SOCKET`, if it is set, as in sd_notify(3).

A peer of another protocol that has connected to the wrong port is recognised by its first bytes.
"""

import logging
import os
import socket
import time
from collections.abc import Iterable, Mapping, MutableMapping
from http import HTTPStatus
from typing import NamedTuple

from headrace.config.settings import Listen
from headrace.config.values import LISTENERS, Address
from headrace.errors import ListenError
from headrace.printing import quoted

logger = logging.getLogger(__name__)

BACKLOG = 1024

_FIRST_DESCRIPTOR = 3
_VARIABLES = ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "LISTEN_PIDFDID")


class Inherited(NamedTuple):
    """An inherited socket as `assign` sees it."""

    descriptor: int
    name: str
    address: Address

    def __str__(self) -> str:
        named = f"named {quoted(self.name)}" if self.name else "without a name"
        return f"inherited socket {self.descriptor} ({named}, {self.address})"


def open_listeners(
    configured: Listen, environ: MutableMapping[str, str]
) -> dict[str, socket.socket]:
    """Return a listening socket by the name of each listener.

    An inherited socket takes the place of the listener's setting. The variables for inheriting are removed
    from `environ`.
    """
    given = inherited_names(environ, os.getpid())
    for variable in _VARIABLES:
        environ.pop(variable, None)  # child processes must not use them
    found: list[socket.socket] = []
    try:
        for number, name in enumerate(given):
            found.append(_inherit(_FIRST_DESCRIPTOR + number, name))
        seen = [
            Inherited(sock.fileno(), name, address_of(sock))
            for sock, name in zip(found, given, strict=True)
        ]
        by_name = dict(zip(assign(seen, configured), found, strict=True))
        for name in LISTENERS:
            if name not in by_name:
                by_name[name] = _listen(getattr(configured, name), name)
                found.append(by_name[name])
    except ListenError:
        for sock in found:
            sock.close()
        raise
    return {name: by_name[name] for name in LISTENERS}


def inherited_names(environ: MutableMapping[str, str], pid: int) -> list[str]:
    """Return the names of the sockets that this process inherits; "" for a socket without a name."""
    if environ.get("LISTEN_PID") != str(pid):
        return []  # nothing is inherited, or the sockets are for another process
    count = environ.get("LISTEN_FDS", "")
    if not (count.isascii() and count.isdigit() and int(count) <= len(LISTENERS)):
        raise ListenError(
            f"LISTEN_FDS is {quoted(count)}: the server inherits at most {len(LISTENERS)} sockets, "
            f"one for each listener ({', '.join(LISTENERS)})"
        )
    names = environ.get("LISTEN_FDNAMES")
    if names is None:
        return [""] * int(count)
    split = names.split(":") if names else []
    if len(split) != int(count):
        raise ListenError(
            f"LISTEN_FDNAMES has {len(split)} names for the {count} inherited sockets of LISTEN_FDS"
        )
    return split


def assign(inherited: Iterable[Inherited], configured: Listen) -> list[str]:
    """Return the listener of each inherited socket: by its name, or else by the port in the settings."""
    taken: dict[str, Inherited] = {}
    for one in inherited:
        name = one.name if one.name in LISTENERS else _listener_of(one.address, configured)
        if name is None:
            raise ListenError(
                f"{one} belongs to no listener: name it figg, ws or http (FileDescriptorName=), "
                f"or set a listener to its port"
            )
        if name in taken:
            raise ListenError(
                f"{taken[name]} and {one} are both for the listener {name}: pass one of them"
            )
        taken[name] = one
    return list(taken)


def address_of(sock: socket.socket) -> Address:
    return Address(*sock.getsockname()[:2])


def _listener_of(address: Address, configured: Listen) -> str | None:
    """Return the listener with this port. If several have this port, the host decides.

    The host does not decide alone, because a service manager may listen on more hosts.
    """
    of_port = [name for name in LISTENERS if getattr(configured, name).port == address.port]
    exact = [name for name in of_port if getattr(configured, name) == address]
    found = exact or of_port
    return found[0] if len(found) == 1 else None


def _inherit(descriptor: int, name: str) -> socket.socket:
    called = f"inherited descriptor {descriptor}" + (f" ({name})" if name else "")
    try:
        sock = socket.socket(fileno=descriptor)
    except OSError as error:
        raise ListenError(f"{called} is not a socket: {error.strerror}") from error
    if trouble := _trouble_with(sock):
        sock.detach()  # with a wrong LISTEN_FDS it may be a descriptor of the event loop
        raise ListenError(f"{called} {trouble}")
    sock.set_inheritable(False)
    sock.setblocking(False)
    return sock


def _trouble_with(sock: socket.socket) -> str:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        family = getattr(sock.family, "name", sock.family)
        kind = getattr(sock.type, "name", sock.type)
        return f"is a socket of {family} and {kind}: listeners take TCP sockets only"
    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return "is not listening: pass the listening socket itself (Accept=no)"
    return ""


def _listen(address: Address, name: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address.host, address.port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ListenError(
            f"cannot listen on {address.host}:{address.port} for {name}: {error.strerror}"
        ) from error
    sock.setblocking(False)
    return sock


# The service manager

READY = "READY=1"
STOPPING = "STOPPING=1"


def reloading() -> str:
    """Return the message that the server is about to read its settings again. READY follows in any case."""
    return f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}"


class ServiceManager:
    """The service manager that started the server, if there is one."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """Remove the address from `environ`: child processes have nothing to send to the service manager."""
        path = environ.pop("NOTIFY_SOCKET", "")
        self._address = f"\0{path[1:]}" if path.startswith("@") else path

    def tell(self, state: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.sendto(state.encode(), self._address)
        except OSError as error:
            logger.warning("cannot notify the service manager of %s: %s", state, error.strerror)


# Peers at the wrong port

TLS_HELLO = b"\x16\x03"
"""First bytes of a TLS connection: a handshake record of any version."""

TLS_ON_PLAIN_PORT = (
    "this is TLS, and the port is plain: connect without TLS, or set listen.tls.cert"
)
PLAIN_ON_TLS_PORT = (
    "this is not TLS, and the port speaks only TLS: connect with figgs://, wombats:// or https://"
)

_METHODS = (b"GET ", b"HEAD ", b"POST ", b"PUT ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"PRI * HTTP")


class Stranger(NamedTuple):
    """A peer that does not speak Figg."""

    reason: str
    answer: bytes
    """Answer in the peer's own protocol, where that is cheap; else empty."""


def recognise(data: bytes, listeners: Mapping[str, str]) -> Stranger | None:
    """Recognise another protocol by its first bytes, with which no Figg message begins. None for Figg."""
    if data.startswith(TLS_HELLO):
        return Stranger(TLS_ON_PLAIN_PORT, b"")
    if not data.startswith(_METHODS):
        return None
    http, ws = listeners.get("http", "another port"), listeners.get("ws", "another port")
    if b"upgrade: websocket" in data.lower():
        reason = f"this is WebSocket, and the port speaks Figg: WebSocket listens at {ws}"
    else:
        reason = f"this is HTTP, and the port speaks Figg: HTTP listens at {http}"
    return Stranger(reason, http_answer(HTTPStatus.BAD_REQUEST, f"{reason}\n".encode()))


def plain_on_tls_port(data: bytes) -> Stranger:
    """Return the answer to a peer that has sent `data`, and no TLS, to a port with TLS."""
    answer = b""
    if data.startswith(_METHODS):
        answer = http_answer(HTTPStatus.BAD_REQUEST, f"{PLAIN_ON_TLS_PORT}\n".encode())
    return Stranger(PLAIN_ON_TLS_PORT, answer)


def http_answer(
    status: HTTPStatus, body: bytes, *, with_body: bool = True, **headers: str
) -> bytes:
    """Return an answer in HTTP, after which the connection ends. Underscores in `headers` are hyphens."""
    fields = {
        "Content_Type": "text/plain; charset=utf-8",
        "Content_Length": str(len(body)),
        "Connection": "close",
        **headers,
    }
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\n{lines}\r\n".encode()
    return head + body if with_body else head
