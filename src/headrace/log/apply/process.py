"""The server's end of the connection to its applier process (`child.py`).

The applier is a process because many small file calls in a thread would compete with the event loop for the
interpreter lock.
"""

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from headrace.config.settings import Config
from headrace.log.apply.child import (
    LENGTH,
    Applied,
    Apply,
    ChildWaiting,
    Prepare,
    Prepared,
    ToChild,
    ToParent,
    send_bytes,
)
from headrace.log.commit.ring import ClosedFile

logger = logging.getLogger(__name__)

_END_TIMEOUT_S = 5.0


class ApplierProcess:
    """The parent's end of the connection. Answers arrive on the event loop."""

    def __init__(
        self,
        config: Config,
        lock: int,
        *,
        applied: Callable[[Path], None],
        prepared: Callable[[Path], None],
        waiting: Callable[[str], None],
        failed: Callable[[str], None],
    ) -> None:
        self._on_applied = applied
        self._on_prepared = prepared
        self._on_waiting = waiting
        self._on_failed = failed
        self._socket, theirs = socket.socketpair()
        self._buffer = b""
        self._to_prepare: deque[Path] = deque()
        """Journal files to prepare. The child is working on the first one."""
        self._closing = self._failed = False
        self._trouble = ""
        """The reason why the child waits. The child repeats the reason, but the log gets it once."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace.log.apply.child", str(theirs.fileno())],
            pass_fds=(theirs.fileno(), lock),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # Ctrl-C at a terminal must reach only the server, which then lets the applier finish.
            start_new_session=True,
        )
        theirs.close()
        with contextlib.suppress(ConnectionError):  # a child that is already dead is noticed below
            send_bytes(self._socket, pickle.dumps((config, os.getpid())))
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._readable)

    @property
    def pid(self) -> int:
        return self._process.pid

    def apply(self, closed: ClosedFile) -> None:
        self._send(Apply(str(closed.path), closed.until, closed.last))

    def prepare(self, path: Path) -> None:
        """Request a new journal file. Sends one request at a time, so that applying waits for one at most."""
        self._to_prepare.append(path)
        if len(self._to_prepare) == 1:
            self._send(Prepare(str(path)))

    def close(self) -> None:
        """Let the child end; commits that it has not applied stay in the journal."""
        self._closing = True
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the journal still holds the commits it was applying
            self._process.wait()

    def _send(self, message: ToChild) -> None:
        if self._closing or self._failed:
            return
        try:
            # Messages are few and tiny: at most one per journal file, far less than a socket's buffer holds.
            send_bytes(self._socket, msgspec.msgpack.encode(message))
        except ConnectionError:
            self._ended()  # the loop has not noticed the end yet

    def _readable(self) -> None:
        try:
            data = self._socket.recv(65536)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._loop.remove_reader(self._socket.fileno())
            self._ended()
            return
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._buffer)
            stop = LENGTH.size + length
            if len(self._buffer) < stop:
                return
            message = msgspec.msgpack.decode(self._buffer[LENGTH.size : stop], type=ToParent)
            self._buffer = self._buffer[stop:]
            self._handle(message)

    def _ended(self) -> None:
        """Report once that the child ended without being told to."""
        if self._closing or self._failed:
            return
        code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        self._fail(f"the applier process {how}")

    def _fail(self, reason: str) -> None:
        self._failed = True
        self._on_failed(reason)

    def _handle(self, message: ToParent) -> None:
        trouble, self._trouble = self._trouble, ""
        if isinstance(message, Applied):
            for report in message.reports:
                logger.error("%s", report)
            self._on_applied(Path(message.path))
        elif isinstance(message, Prepared):
            self._on_prepared(self._to_prepare.popleft())
            if self._to_prepare:
                self._send(Prepare(str(self._to_prepare[0])))
        elif isinstance(message, ChildWaiting):
            self._trouble = message.reason
            if message.reason != trouble:
                logger.warning("%s", message.reason)
            self._on_waiting(message.reason)
        else:
            self._fail(message.reason)
