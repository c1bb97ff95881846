"""Departures: detects peers that hang up although their sockets are not read."""

import asyncio
import contextlib
import select
from typing import Protocol


class UnreadPeer(Protocol):
    """The part of a connection that is known here."""

    def __hash__(self) -> int: ...

    @property
    def fd(self) -> int: ...

    def end_hold(self) -> None:
        """Called when the peer has left."""


class Departures:
    """All peers that are watched."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll: select.epoll | None = None
        self._peers: dict[int, UnreadPeer] = {}

    def watch(self, peer: UnreadPeer) -> None:
        fd = peer.fd
        if fd < 0 or not hasattr(select, "epoll"):
            return  # only the delay ends this hold
        if self._epoll is None:
            self._epoll = select.epoll()
            self._loop.add_reader(self._epoll.fileno(), self._hung_up)
        with contextlib.suppress(OSError):
            self._epoll.register(fd, select.EPOLLRDHUP | select.EPOLLONESHOT)
            self._peers[fd] = peer

    def forget(self, peer: UnreadPeer) -> None:
        fd = peer.fd
        if self._epoll is not None and self._peers.get(fd) is peer:
            del self._peers[fd]
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def close(self) -> None:
        if self._epoll is not None:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None
            self._peers.clear()

    def _hung_up(self) -> None:
        assert self._epoll is not None
        for fd, _ in self._epoll.poll(0):
            if peer := self._peers.get(fd):
                peer.end_hold()
