"""The applier as a process of its own: takes orders from the server until it hangs up.

Speaks MessagePack frames over a socket: the server names closed journal files, this answers when they are
applied. It shares the server's lock on the data directory and dies with it. The other end is
`applier_process.py`.
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

from headrace.config import Config
from headrace.errors import DataDirectoryError, StoreFailedError
from headrace.log import journal
from headrace.log.applier import Applier
from headrace.log.catalogue import Catalogue
from headrace.log.disk import DISK_FULL, Disk, is_full
from headrace.log.journal_reading import Frame, Problem, read_frames
from headrace.log.layout import Layout
from headrace.printing import described

BACKUP_S = 600.0
"""How often the catalogue is copied."""

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
    for item in read_frames(path, until, generation=applier.generation):
        problems = [item] if isinstance(item, Problem) else item.problems
        for problem in problems:
            report = f"journal {problem.file} at byte {problem.position}: damage: {problem.reason}"
            if problem.entry is None and not problem.harmless:
                # Nothing says what it was. The next start keeps it in quarantine, and topics jump ahead.
                raise StoreFailedError(report)
            applier.quarantine(path, problem)
            reports.append(report)
        if isinstance(item, Frame):
            entries += item.entries
    return reports + [str(damage) for damage in applier.apply(entries, last)]


def send_bytes(line: socket.socket, data: bytes) -> None:
    line.sendall(LENGTH.pack(len(data)) + data)


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
    except (EOFError, ConnectionError):
        pass  # the server hung up
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
    # Entries are many and hold no cycles: looking for those again and again costs a sixth of the time.
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
            # A file's worth of entries is much: give back what they took, topics may stay idle now.
            libc.malloc_trim(0)
            if time.monotonic() - backed_up_s > BACKUP_S:
                # Without room for it, or on a bad spot, the last one stays.
                with contextlib.suppress(OSError, sqlite3.Error, DataDirectoryError):
                    catalogue.keep_backup(disk)
                backed_up_s = time.monotonic()
    finally:
        catalogue.close()


def _until_it_works(line: socket.socket, work: Callable[[], T]) -> T:
    """Run it; when the disk is full or fails say so, wait and run it again: nothing is lost by that,
    since the journal stays as it is and what was half written is cut off first."""
    while True:
        try:
            return work()
        except Exception as error:
            reason = _trouble(error)
            if reason is None:
                raise
            send_bytes(line, msgspec.msgpack.encode(Waiting(reason)))
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
    """What the disk's trouble is, in words; None for anything else."""
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
