"""The file `clock` of a data directory: the server's time and its doubts, for the next server process.

Decides nothing: `server/clock.py` does. The file holds a line of JSON after the line's crc32c, because one
wrong digit could make every record too old.
"""

import logging
from typing import NamedTuple

import msgspec
from crc32c import crc32c
from msgspec import Struct

from headrace.errors import DataDirectoryError
from headrace.log.disk import Disk, load
from headrace.log.layout import Layout
from headrace.log.store import Runner

logger = logging.getLogger(__name__)

TIME_NAME = "clock"

SAVE_MS = 60_000
"""Interval between saves of the time. After a reboot, the current time is at least the saved time."""


class DamagedTimeError(DataDirectoryError):
    """The file is there, and its content cannot be used."""


class SeenOffset(NamedTuple):
    offset_ms: int
    """Offset from CLOCK_BOOTTIME to a time."""
    at_ms: int
    """Time by CLOCK_BOOTTIME."""


class SavedTime(Struct, frozen=True, forbid_unknown_fields=True):
    """State of the clock that the next server process needs. After a reboot, only `now_ms` is of use."""

    boot_id: str
    offset_ms: int
    """Offset from CLOCK_BOOTTIME to the server's time."""
    now_ms: int
    jump: SeenOffset | None
    """The unconfirmed jump: offset to the wall clock, and when the jump was first seen."""
    hour: SeenOffset | None = None
    """Offset to the server's time at the beginning of the hour that limits small steps."""
    gap: SeenOffset | None = None
    """Offset with which time continued after a reboot; None once the time that passed is confirmed."""


def read_time(layout: Layout) -> SavedTime | None:
    """Return the saved time, or None if there is no file; raise DamagedTimeError. May sleep on a bad disk."""
    path = layout.root / TIME_NAME
    try:
        data = bytes(load(path).data)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedTimeError(f"{path}: the file cannot be read: {error.strerror}") from error
    crc, _, line = data.partition(b" ")
    if crc != _crc(line):
        raise DamagedTimeError(f"{path}: the file is damaged: its checksum does not match")
    try:
        return msgspec.json.decode(line, type=SavedTime)
    except msgspec.MsgspecError as error:
        raise DamagedTimeError(f"{path}: the file is of another version: {error}") from error


class TimeFile:
    """Saves the time while the server runs. `write` is for the last save, at its end."""

    def __init__(self, layout: Layout, disk: Disk, runner: Runner) -> None:
        self._path = layout.root / TIME_NAME
        self._disk = disk
        self._runner = runner
        self._saved: SavedTime | None = None
        self._saving = False

    def save(self, state: SavedTime) -> None:
        """Save the time in a thread every minute, and when a jump begins or ends; else do nothing."""
        saved = self._saved
        is_due = (
            saved is None
            or abs(state.now_ms - saved.now_ms) >= SAVE_MS
            or (state.jump is None) != (saved.jump is None)
            or (state.gap is None) != (saved.gap is None)
        )
        if is_due and not self._saving:
            self._saved, self._saving = state, True
            self._runner.background(lambda: self.write(state), self._is_saved)

    def write(self, state: SavedTime) -> None:
        """Write the file and fsync it. May be called from any thread."""
        new = self._path.with_suffix(".new")
        line = msgspec.json.encode(state) + b"\n"
        self._disk.write_file(new, [_crc(line), b" ", line], synced=True)
        self._disk.rename(new, self._path)
        self._disk.sync_directory(self._path.parent)

    def _is_saved(self, result: object) -> None:
        self._saving = False
        if isinstance(result, BaseException):
            # Only a minute is lost: the next save is tried a minute later.
            logger.debug("cannot save the time: %s", result)


def _crc(line: bytes) -> bytes:
    return b"%08x" % crc32c(line)
