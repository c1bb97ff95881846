"""The applier as a process of its own: the server's end of the socket, the orders and answers, and the child.

The applier is a process because many small file calls in a thread would compete with the event loop for the
interpreter lock. The two exchange lines of JSON over a socket pair: the server names closed journal
files, and the applier answers when they are applied. The applier shares the server's lock on the data
directory and ends with the server.
"""

import contextlib
import ctypes
import gc
import logging
import os
import pickle
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from headrace.config.settings import Config
from headrace.errors import DataDirectoryError, StoreFailedError
from headrace.log.apply.applier import Applier
from headrace.log.catalogue.catalogue import DATABASE_ERRORS, Catalogue, DamagedCatalogueError
from headrace.log.commit.journal import ClosedFile
from headrace.log.disk import ATTEMPTS_MAX, DISK_FULL, RETRY_S, Disk, is_full
from headrace.log.layout import Layout
from headrace.printing import described

logger = logging.getLogger(__name__)

T = TypeVar("T")

BACKUP_S = 600.0
"""Seconds between two copies of the catalogue."""

STARTED_AGAIN = (
    "the applier process was killed by SIGBUS and is started again: the disk may be full"
)

_END_TIMEOUT_S = 5.0
_RETRY_S = 1.0
_PR_SET_PDEATHSIG = 1


class Apply(msgspec.Struct, tag="apply"):
    path: str
    until: int
    last: int


class Prepare(msgspec.Struct, tag="prepare"):
    path: str


class Done(msgspec.Struct, tag="done"):
    """The oldest unanswered order is carried out."""

    reports: list[str]


class ChildWaiting(msgspec.Struct, tag="waiting"):
    """The child cannot continue for now. It retries by itself, or is started again."""

    reason: str


class Failed(msgspec.Struct, tag="failed"):
    reason: str


Order = Apply | Prepare
Answer = Done | ChildWaiting | Failed


class ApplierProcess:
    """The server's end of the connection. Answers arrive on the event loop."""

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
        import asyncio  # not at the top: the child runs this file too, and is smaller without asyncio

        self._config, self._lock = config, lock
        self._on_applied, self._on_prepared = applied, prepared
        self._on_waiting, self._on_failed = waiting, failed
        self._unanswered: deque[Order] = deque()
        self._to_prepare: deque[Path] = deque()
        """Journal files to prepare. The child is working on the first one."""
        self._closing = self._failed = False
        self._trouble = ""
        """The reason why the child waits. The child repeats the reason, but the log gets it once."""
        self._restart: asyncio.TimerHandle | None = None
        """Set while no child runs."""
        self._loop = asyncio.get_running_loop()
        self._start()

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._buffer = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace.log.apply.process", str(theirs.fileno())],
            pass_fds=(theirs.fileno(), self._lock),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # Ctrl-C at a terminal must reach only the server, which then lets the applier finish.
            start_new_session=True,
        )
        theirs.close()
        with contextlib.suppress(ConnectionError):  # a child that is already dead is noticed below
            self._socket.sendall(pickle.dumps((self._config, os.getpid())))
        self._socket.setblocking(False)
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
        if self._restart is not None:
            self._restart.cancel()
            return
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the journal still holds the commits it was applying
            self._process.wait()

    def _send(self, order: Order) -> None:
        if self._closing or self._failed:
            return
        self._unanswered.append(order)
        if self._restart is None:
            self._write(order)

    def _write(self, order: Order) -> None:
        # If the child has ended, the loop reads its last answers, and then its end.
        with contextlib.suppress(ConnectionError):
            # Orders are few and tiny: at most one per journal file, far less than a socket's buffer holds.
            _send(self._socket, order)

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
        while b"\n" in self._buffer:
            # An answer leaves the buffer alone: if its handling fails, the next read handles the others.
            answer, _, self._buffer = self._buffer.partition(b"\n")
            self._handle(msgspec.json.decode(answer, type=Answer))

    def _ended(self) -> None:
        """Handle the end of a child that was not told to end: start another one, or report it once."""
        if self._closing or self._failed:
            return
        code = self._process.wait()
        if code == -signal.SIGBUS:
            # The kernel sends SIGBUS when a full disk has no room for a page of SQLite's shared memory. The
            # journal still has all commits. Only the last order can be half or wholly carried out without an
            # answer, and repeating it is harmless.
            self._socket.close()
            self._handle(ChildWaiting(STARTED_AGAIN))
            self._restart = self._loop.call_later(_RETRY_S, self._start_again)
            return
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        self._fail(f"the applier process {how}")

    def _start_again(self) -> None:
        self._restart = None
        try:
            self._start()
        except OSError as error:
            self._fail(f"the applier process cannot be started: {error.strerror}")
            return
        for order in list(self._unanswered):
            self._write(order)

    def _fail(self, reason: str) -> None:
        self._failed = True
        self._on_failed(reason)

    def _handle(self, answer: Answer) -> None:
        trouble, self._trouble = self._trouble, ""
        if isinstance(answer, Done):
            order = self._unanswered.popleft()
            for report in answer.reports:
                logger.error("%s", report)
            if isinstance(order, Apply):
                self._on_applied(Path(order.path))
                return
            self._on_prepared(self._to_prepare.popleft())
            if self._to_prepare:
                self._send(Prepare(str(self._to_prepare[0])))
        elif isinstance(answer, ChildWaiting):
            self._trouble = answer.reason
            if answer.reason != trouble:
                logger.warning("%s", answer.reason)
            self._on_waiting(answer.reason)
        else:
            self._fail(answer.reason)


def main() -> None:
    """Run the child: take orders until the server closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    line = socket.socket(fileno=int(sys.argv[1]))
    orders = line.makefile("rb")
    try:
        config, parent = pickle.load(orders)
    except (EOFError, ConnectionError, pickle.UnpicklingError):
        return  # the server ended before it had sent its settings
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    try:
        _serve(config, line, orders)
    except (EOFError, ConnectionError):
        pass  # the server closed the socket
    except Exception as error:
        is_known = isinstance(error, (StoreFailedError, DataDirectoryError))
        reason = str(error) if is_known else described(error)
        with contextlib.suppress(ConnectionError):
            _send(line, Failed(f"the applier failed: {reason}"))
        if is_known:
            sys.exit(1)
        raise


def _serve(config: Config, line: socket.socket, orders: Iterable[bytes]) -> None:
    # Entries are many and hold no cycles: the garbage collector would take a sixth of the time.
    gc.disable()
    libc = ctypes.CDLL(None)
    disk = Disk()
    layout = Layout(config.data_dir)
    backed_up_s = time.monotonic()
    with contextlib.closing(_retried(line, lambda: Catalogue.open(layout.root))) as catalogue:
        applier = Applier(disk, layout, catalogue, config.rule)
        for text in orders:
            order = msgspec.json.decode(text, type=Order)
            path = Path(order.path)
            work: Callable[[], list[str] | None]
            if isinstance(order, Prepare):
                work = partial(applier.prepare, path, config.journal.file_bytes)
            else:
                work = partial(applier.apply_file, ClosedFile(path, order.until, order.last))
            reports: list[str] | None = _retried(line, work)
            _send(line, Done(reports or []))
            # The entries of a file take much memory: give it back, because topics may stay idle now.
            libc.malloc_trim(0)
            if time.monotonic() - backed_up_s > BACKUP_S:
                # If the disk is full or has a bad sector, the last copy stays.
                with contextlib.suppress(OSError, sqlite3.Error, DataDirectoryError):
                    catalogue.keep_backup(disk)
                backed_up_s = time.monotonic()


def _retried(line: socket.socket, work: Callable[[], T]) -> T:
    """Run `work`. While the disk is full or fails, report that, wait and retry.

    A retry loses nothing: the journal is unchanged, and half-written data is truncated first.

    A catalogue that cannot be read is different. SQLite calls a page malformed, whether the disk cannot read
    the page or the page is damaged. If that lasts, only a start can rebuild the catalogue.
    """
    attempts = 0
    while True:
        try:
            return work()
        except (OSError, sqlite3.OperationalError) as error:
            _send(line, ChildWaiting(_trouble(error)))
            line.settimeout(_RETRY_S)
            try:
                if not line.recv(1, socket.MSG_PEEK):
                    raise EOFError from None
                time.sleep(_RETRY_S)
            except TimeoutError:
                pass
            finally:
                line.settimeout(None)
        except (DamagedCatalogueError, *DATABASE_ERRORS) as error:
            attempts += 1
            if attempts == ATTEMPTS_MAX:
                raise StoreFailedError(
                    f"the catalogue cannot be read ({error}): the journal keeps everything, and the next "
                    "start rebuilds the catalogue if it is damaged"
                ) from error
            time.sleep(RETRY_S)


def _trouble(error: Exception) -> str:
    if is_full(error) or "database or disk is full" in str(error):
        return DISK_FULL
    return f"segments cannot be written: {error}; publishes are held back until writing works again"


def _send(line: socket.socket, message: Order | Answer) -> None:
    line.sendall(msgspec.json.encode(message) + b"\n")


if __name__ == "__main__":
    main()
