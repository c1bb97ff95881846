"""The applier as a separate process: takes orders from the server until the server closes the socket.

The two exchange MessagePack frames over a socket: the server names closed journal files, and the applier
answers when they are applied. The applier shares the server's lock on the data directory and dies with the
server. The other end is `process.py`.
"""

import contextlib
import ctypes
import gc
import os
import pickle
import signal
import socket
import sqlite3
import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from headrace.config.settings import Config
from headrace.errors import DataDirectoryError, StoreFailedError
from headrace.log.apply.applier import Applier
from headrace.log.catalogue.catalogue import Catalogue
from headrace.log.commit import journal
from headrace.log.disk import DISK_FULL, Disk, is_full
from headrace.log.layout import Layout
from headrace.log.recovery.frames import Frame, Problem, read_frames
from headrace.printing import described

BACKUP_S = 600.0
"""Seconds between two copies of the catalogue."""

LENGTH = struct.Struct(">I")
_RETRY_S = 1.0
_PR_SET_PDEATHSIG = 1

T = TypeVar("T")


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


class ChildWaiting(msgspec.Struct, tag="waiting"):
    """The child cannot continue for now; it retries by itself."""

    reason: str


class Failed(msgspec.Struct, tag="failed"):
    reason: str


ToChild = Apply | Prepare
ToParent = Applied | Prepared | ChildWaiting | Failed


def apply_file(applier: Applier, path: Path, until: int, last: int) -> list[str]:
    """Apply one closed journal file; return descriptions of the damage found."""
    reports: list[str] = []
    entries: list[journal.Entry] = []
    for item in read_frames(path, until, generation=applier.generation):
        problems = [item] if isinstance(item, Problem) else item.problems
        for problem in problems:
            report = f"journal {problem.file} at byte {problem.position}: damage: {problem.reason}"
            if problem.entry is None and not problem.harmless:
                # The lost content is unknown. The next start keeps it in quarantine, and topics jump ahead.
                raise StoreFailedError(report)
            applier.quarantine(path, problem)
            reports.append(report)
        if isinstance(item, Frame):
            entries += item.entries
    return reports + [str(damage) for damage in applier.apply(entries, last)]


def send_bytes(line: socket.socket, data: bytes) -> None:
    line.sendall(LENGTH.pack(len(data)) + data)


def main() -> None:
    """Run the child: take orders until the parent closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    line = socket.socket(fileno=int(sys.argv[1]))
    config, parent = pickle.loads(_receive_bytes(line))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    try:
        _serve(config, line)
    except (EOFError, ConnectionError):
        pass  # the server closed the socket
    except StoreFailedError as error:
        _say_failed(line, f"the applier failed: {error}")
        sys.exit(1)
    except Exception as error:
        _say_failed(line, f"the applier failed: {described(error)}")
        raise


def _say_failed(line: socket.socket, reason: str) -> None:
    with contextlib.suppress(ConnectionError):
        send_bytes(line, msgspec.msgpack.encode(Failed(reason)))


def _serve(config: Config, line: socket.socket) -> None:
    # Entries are many and hold no cycles: the garbage collector would take a sixth of the time.
    gc.disable()
    libc = ctypes.CDLL(None)
    disk = Disk()
    layout = Layout(config.data_dir)
    catalogue = Catalogue.open(layout.root)
    applier = Applier(disk, layout, catalogue, config.rule)
    backed_up_s = time.monotonic()
    try:
        while True:
            order = msgspec.msgpack.decode(_receive_bytes(line), type=ToChild)
            path = Path(order.path)
            answer: ToParent
            if isinstance(order, Prepare):
                prepare = partial(applier.prepare, path, config.journal.file_bytes)
                _until_it_works(line, prepare)
                answer = Prepared(order.path)
            else:
                apply = partial(apply_file, applier, path, order.until, order.last)
                answer = Applied(order.path, _until_it_works(line, apply))
            send_bytes(line, msgspec.msgpack.encode(answer))
            # The entries of a file take much memory: give it back, because topics may stay idle now.
            libc.malloc_trim(0)
            if time.monotonic() - backed_up_s > BACKUP_S:
                # If the disk is full or has a bad sector, the last copy stays.
                with contextlib.suppress(OSError, sqlite3.Error, DataDirectoryError):
                    catalogue.keep_backup(disk)
                backed_up_s = time.monotonic()
    finally:
        catalogue.close()


def _until_it_works(line: socket.socket, work: Callable[[], T]) -> T:
    """Run `work`; while the disk is full or fails, report that, wait and retry. A retry loses nothing: the
    journal is unchanged, and half-written data is truncated first."""
    while True:
        try:
            return work()
        except Exception as error:
            reason = _trouble(error)
            if reason is None:
                raise
            send_bytes(line, msgspec.msgpack.encode(ChildWaiting(reason)))
            line.settimeout(_RETRY_S)
            try:
                if not line.recv(1, socket.MSG_PEEK):
                    raise EOFError from None
                time.sleep(_RETRY_S)
            except TimeoutError:
                pass
            finally:
                line.settimeout(None)


def _trouble(error: Exception) -> str | None:
    """Return a description of the disk's problem; None for any other error."""
    if not isinstance(error, OSError | sqlite3.OperationalError):
        return None
    if is_full(error) or "database or disk is full" in str(error):
        return DISK_FULL
    return f"segments cannot be written, publishes are held back until they can: {error}"


def _receive_bytes(line: socket.socket) -> bytes:
    (length,) = LENGTH.unpack(_receive_exactly(line, LENGTH.size))
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
