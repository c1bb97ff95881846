"""The applier as a child process, and the server's end of the line to it.

A child, because many small file calls in a thread would fight the event loop for the interpreter lock. It
shares the lock on the data directory and dies with its parent. Both ends speak in MessagePack frames over a
socket pair: the parent names closed journal files, the child answers when they are applied.
"""

import asyncio
import ctypes
import errno
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from headrace.config import Config
from headrace.log import journal
from headrace.log.applier import Applier
from headrace.log.catalogue import BACKUP_NAME, Catalogue
from headrace.log.disk import Disk
from headrace.log.layout import Layout
from headrace.log.ring import ClosedFile

logger = logging.getLogger(__name__)

BACKUP_S = 600.0
"""How often the catalogue is copied, when it has changed."""

_RETRY_S = 1.0
_PR_SET_PDEATHSIG = 1
_LENGTH = struct.Struct(">I")


class Apply(msgspec.Struct, tag="apply"):
    path: str
    until: int
    last: int


class Prepare(msgspec.Struct, tag="prepare"):
    path: str


class Applied(msgspec.Struct, tag="applied"):
    path: str
    reports: list[str]


class Prepared(msgspec.Struct, tag="prepared"):
    path: str


class Waiting(msgspec.Struct, tag="waiting"):
    """The child cannot go on for now; it tries again by itself."""

    reason: str


class Failed(msgspec.Struct, tag="failed"):
    reason: str


ToChild = Apply | Prepare
ToParent = Applied | Prepared | Waiting | Failed


def apply_file(applier: Applier, path: Path, until: int, last: int) -> list[str]:
    """Apply one closed journal file; returns what was damaged, in words."""
    reports: list[str] = []
    entries: list[journal.Entry] = []
    for item in journal.read_frames(path, until):
        if isinstance(item, journal.Problem):
            reports.append(f"journal {item.file} at byte {item.position}: {item.reason}")
            continue
        entries += item.entries
        entries += [
            problem.entry
            for problem in item.problems
            if problem.entry is not None and problem.entry.kind == journal.LOST
        ]
        reports += [
            f"journal {problem.file} at byte {problem.position}: {problem.reason}"
            for problem in item.problems
        ]
    return reports + [str(damage) for damage in applier.apply(entries, last)]


class ApplierProcess:
    """The parent's end. Answers arrive on the event loop."""

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
        self._closing = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace.log.applier_process", str(theirs.fileno())],
            pass_fds=(theirs.fileno(), lock),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # Ctrl-C at a terminal is for the server, which then lets the applier finish.
            start_new_session=True,
        )
        theirs.close()
        _send_bytes(self._socket, pickle.dumps((config, os.getpid())))
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._readable)

    @property
    def pid(self) -> int:
        return self._process.pid

    def apply(self, closed: ClosedFile) -> None:
        self._send(Apply(str(closed.path), closed.until, closed.last))

    def prepare(self, path: Path) -> None:
        self._send(Prepare(str(path)))

    def close(self) -> None:
        """Let the child end; what it has not applied stays in the journal."""
        self._closing = True
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._process.wait()

    def _send(self, message: ToChild) -> None:
        # Messages are few and tiny: at most one per journal file, far below a socket's buffer.
        _send_bytes(self._socket, msgspec.msgpack.encode(message))

    def _readable(self) -> None:
        try:
            data = self._socket.recv(65536)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._loop.remove_reader(self._socket.fileno())
            if not self._closing:
                code = self._process.wait()
                self._on_failed(f"the applier process ended with code {code}")
            return
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            stop = _LENGTH.size + length
            if len(self._buffer) < stop:
                return
            message = msgspec.msgpack.decode(self._buffer[_LENGTH.size : stop], type=ToParent)
            self._buffer = self._buffer[stop:]
            self._handle(message)

    def _handle(self, message: ToParent) -> None:
        if isinstance(message, Applied):
            for report in message.reports:
                logger.error("%s", report)
            self._on_applied(Path(message.path))
        elif isinstance(message, Prepared):
            self._on_prepared(Path(message.path))
        elif isinstance(message, Waiting):
            logger.warning("%s", message.reason)
            self._on_waiting(message.reason)
        else:
            self._on_failed(message.reason)


def main() -> None:
    """The child: takes orders until its parent hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    line = socket.socket(fileno=int(sys.argv[1]))
    config, parent = pickle.loads(_receive_bytes(line))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    try:
        _serve(config, line)
    except EOFError:
        pass
    except Exception as error:
        _send_bytes(line, msgspec.msgpack.encode(Failed(f"the applier failed: {error!r}")))
        raise


def _serve(config: Config, line: socket.socket) -> None:
    disk = Disk()
    layout = Layout(config.data_dir)
    catalogue = Catalogue.open(layout.root)
    applier = Applier(disk, layout, catalogue, config.rule)
    backed_up_s = time.monotonic()
    try:
        while True:
            order = msgspec.msgpack.decode(_receive_bytes(line), type=ToChild)
            answer: ToParent
            if isinstance(order, Prepare):
                path = Path(order.path)
                work = lambda: journal.prepare_file(disk, path, config.journal.file_bytes)  # noqa: E731
                _until_there_is_room(line, work)
                answer = Prepared(order.path)
            else:
                closed = Path(order.path), order.until, order.last
                reports: list[str] = []
                _until_there_is_room(line, lambda: reports.extend(apply_file(applier, *closed)))
                answer = Applied(order.path, reports)
            _send_bytes(line, msgspec.msgpack.encode(answer))
            if time.monotonic() - backed_up_s > BACKUP_S:
                back_up(disk, layout, catalogue)
                backed_up_s = time.monotonic()
    finally:
        catalogue.close()


def back_up(disk: Disk, layout: Layout, catalogue: Catalogue) -> None:
    made = layout.root / (BACKUP_NAME + ".new")
    catalogue.back_up(made)
    disk.rename(made, layout.root / BACKUP_NAME)
    disk.sync_directory(layout.root)


def _until_there_is_room(line: socket.socket, work: Callable[[], None]) -> None:
    """Run it; on a full disk say so, wait and run it again."""
    while True:
        try:
            work()
            return
        except Exception as error:
            reason = _no_room(error)
            if reason is None:
                raise
            _send_bytes(line, msgspec.msgpack.encode(Waiting(reason)))
            line.settimeout(_RETRY_S)
            try:
                if not line.recv(1, socket.MSG_PEEK):
                    raise EOFError from None
                time.sleep(_RETRY_S)
            except TimeoutError:
                pass
            finally:
                line.settimeout(None)


def _no_room(error: Exception) -> str | None:
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or "database or disk is full" in str(error):
        return "no space left on the disk: publishes are held back until there is room"
    return None


def _send_bytes(line: socket.socket, data: bytes) -> None:
    line.sendall(_LENGTH.pack(len(data)) + data)


def _receive_bytes(line: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_receive_exactly(line, _LENGTH.size))
    return _receive_exactly(line, length)


def _receive_exactly(line: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = line.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


if __name__ == "__main__":
    main()
