"""The file in the data directory from which a server learns what time it was for the last one.

The file is a line of JSON behind its crc32c: one wrong digit could make everything too old. A file that is
missing or damaged counts as none: the wall clock is then believed as it is.
"""

import logging
from pathlib import Path

import msgspec
from crc32c import crc32c

from headrace.log.disk import Disk
from headrace.log.runner import Runner
from headrace.server.clock import KnownTime, SteadyClock

logger = logging.getLogger(__name__)

SAVE_MS = 60_000
"""How often the time is saved: after a reboot it is known to be at least that."""


class ClockFile:
    def __init__(self, root: Path, disk: Disk, runner: Runner) -> None:
        self._path = root / "clock"
        self._disk = disk
        self._runner = runner
        self._saved: KnownTime | None = None
        self._saving = False

    def read(self) -> KnownTime | None:
        try:
            crc, _, line = self._path.read_bytes().partition(b" ")
            if crc != _crc(line):
                return None
            return msgspec.json.decode(line, type=KnownTime)
        except (OSError, msgspec.MsgspecError):
            return None

    def tick(self, clock: SteadyClock) -> None:
        """Save the time, every minute and after a jump."""
        known, saved = clock.known, self._saved
        if self._saving or (saved is not None and not _differ(known, saved)):
            return
        self._saved, self._saving = known, True
        self._runner.background(lambda: self.save(known), self._is_saved)

    def save(self, known: KnownTime) -> None:
        """For any thread."""
        new = self._path.with_suffix(".new")
        fd = self._disk.open(new, create=True)
        try:
            self._disk.cut(fd, 0)
            line = msgspec.json.encode(known) + b"\n"
            self._disk.write(fd, [_crc(line), b" ", line], 0)
            self._disk.sync(fd)
        finally:
            self._disk.close(fd)
        self._disk.rename(new, self._path)
        self._disk.sync_directory(self._path.parent)

    def _is_saved(self, result: object) -> None:
        self._saving = False
        if isinstance(result, BaseException):
            # Nothing is lost by it but a minute: the next one tries again.
            logger.debug("the time could not be saved: %s", result)


def _crc(line: bytes) -> bytes:
    return b"%08x" % crc32c(line)


def _differ(known: KnownTime, saved: KnownTime) -> bool:
    is_old = abs(known.now_ms - saved.now_ms) >= SAVE_MS
    return is_old or (known.jump is None) != (saved.jump is None)
