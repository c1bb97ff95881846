"""The server's clock for times and ages: follows the wall clock, but not its jumps.

Theory of operation. The kernel has a clock that nobody can set, CLOCK_BOOTTIME. It counts from the machine's
start and keeps counting while the machine sleeps. The server's time is that clock plus an offset. Several
times a second `tick` compares the server's time with the wall clock:

    agrees within `jump_s` ──▶ the offset follows: NTP keeps the clock right, by slewing or small steps
    differs by more        ──▶ a jump: the offset stays as it is
    the jump has stood for `confirm_s`, or an operator calls `confirm`  ──▶ the offset follows
    the wall clock is back ──▶ the jump is forgotten

All code that compares times uses this clock: the times of records, retention, leases, notes that are due.

A restart is not a jump. `known` is the state that the last server process saved (`ClockFile`). In the
same boot of the machine the offset is still right. After a reboot, time continues from the last saved time.
The machine was off for a while, and NTP may need some time to set the clock. So for `SETTLE_MS` a step
forward of up to `off_s` is followed at once.

A file in the data directory carries this state to the next server process. It holds a line of JSON after its
crc32c, because one wrong digit could make every record too old. Without a file, or with a damaged file, the
server trusts the wall clock.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
from crc32c import crc32c
from msgspec import Struct

from headrace.config.settings import ClockSettings
from headrace.log.disk import Disk
from headrace.log.store import Runner

logger = logging.getLogger(__name__)

SETTLE_MS = 10 * 60 * 1000
"""Time after a reboot in which the clock may catch up with the time that the machine was off."""


class _Jump(NamedTuple):
    offset_ms: int
    """Offset from CLOCK_BOOTTIME to the wall clock."""
    since_ms: int
    """Time when the jump was first seen, by CLOCK_BOOTTIME."""


class KnownTime(Struct, frozen=True, forbid_unknown_fields=True):
    """State of the clock that the next server process needs."""

    boot_id: str
    offset_ms: int
    """Offset from CLOCK_BOOTTIME to the server's time. It is useless after a reboot."""
    now_ms: int
    jump: _Jump | None
    """The unconfirmed jump."""


class SteadyClock:
    def __init__(
        self,
        settings: ClockSettings,
        *,
        wall_ms: Callable[[], int],
        boot_ms: Callable[[], int],
        boot_id: str,
        known: KnownTime | None,
    ) -> None:
        self._jump_ms = int(settings.jump_s * 1000)
        self._confirm_ms = int(settings.confirm_s * 1000)
        self._off_ms = int(settings.off_s * 1000)
        self._wall_ms = wall_ms
        self._boot_ms = boot_ms
        self._boot_id = boot_id
        self._jump: _Jump | None = None
        now_ms = self._settled_ms = boot_ms()
        self.went_back: Callable[[], None] = lambda: None
        """Called when the server's time was set back."""
        if known is None:
            self._offset_ms = wall_ms() - now_ms
        elif known.boot_id == boot_id:
            self._offset_ms = known.offset_ms
            self._jump = known.jump
        else:
            self._offset_ms = known.now_ms - now_ms
            self._settled_ms = now_ms + SETTLE_MS
        self.tick()
        if self._jump is not None and self._jump.since_ms != now_ms:
            logger.warning("%s", self.trouble)  # the last server process saw it

    def now_ms(self) -> int:
        return self._boot_ms() + self._offset_ms

    def elapsed_ms(self) -> int:
        """Monotonic milliseconds, for durations inside this process."""
        return self._boot_ms()

    @property
    def known(self) -> KnownTime:
        return KnownTime(self._boot_id, self._offset_ms, self.now_ms(), self._jump)

    def tick(self) -> None:
        """Compare the server's time with the wall clock: follow it, or note or confirm a jump."""
        boot_ms = self._boot_ms()
        wall_offset_ms = self._wall_ms() - boot_ms
        ahead_ms = wall_offset_ms - self._offset_ms
        off_ms = self._off_ms if boot_ms < self._settled_ms else 0
        if -self._jump_ms <= ahead_ms <= max(self._jump_ms, off_ms):
            if self._jump is not None:
                logger.warning("the wall clock agrees with the server's time again")
            self._follow(wall_offset_ms)
        elif self._jump is None or abs(wall_offset_ms - self._jump.offset_ms) > self._jump_ms:
            self._jump = _Jump(wall_offset_ms, boot_ms)
            logger.warning("%s", self.trouble)
        else:
            self._jump = self._jump._replace(offset_ms=wall_offset_ms)
            if boot_ms - self._jump.since_ms >= self._confirm_ms:
                self.confirm()

    @property
    def ahead_ms(self) -> int:
        """Milliseconds that the wall clock is ahead of the server's time; 0 while the server follows it."""
        return self._jump.offset_ms - self._offset_ms if self._jump is not None else 0

    @property
    def followed_in_ms(self) -> int:
        """Milliseconds until a jump is followed without confirmation; 0 without a jump."""
        if self._jump is None:
            return 0
        return max(0, self._jump.since_ms + self._confirm_ms - self._boot_ms())

    @property
    def trouble(self) -> str:
        """Sentence that tells operators of a jump; empty without a jump."""
        if self._jump is None:
            return ""
        side = "ahead" if self.ahead_ms > 0 else "behind"
        return (
            f"the wall clock jumped and is {_span(abs(self.ahead_ms))} {side}: the server ignores the jump "
            f"until `headrace clock confirm`, or for {_span(self.followed_in_ms)}"
        )

    def confirm(self) -> int:
        """Follow the jump of the wall clock. Return the jump in milliseconds, 0 without a jump."""
        ahead_ms = self.ahead_ms
        if self._jump is not None:
            logger.warning(
                "the jump of the wall clock by %s%s is confirmed: the server follows it",
                "-" if ahead_ms < 0 else "",
                _span(abs(ahead_ms)),
            )
            self._follow(self._jump.offset_ms)
        return ahead_ms

    def _follow(self, offset_ms: int) -> None:
        is_back = offset_ms < self._offset_ms and self._jump is not None
        self._offset_ms, self._jump = offset_ms, None
        if is_back:
            self.went_back()


def _span(ms: int) -> str:
    for unit, length_ms in (("days", 86_400_000), ("hours", 3_600_000), ("minutes", 60_000)):
        if ms >= 2 * length_ms:
            return f"{ms / length_ms:.1f} {unit}"
    return f"{ms / 1000:.0f} seconds"


SAVE_MS = 60_000
"""Interval between saves of the time. After a reboot, the current time is at least the saved time."""


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
            return msgspec.json.decode(line, type=KnownTime) if crc == _crc(line) else None
        except (OSError, msgspec.MsgspecError):
            return None

    def tick(self, clock: SteadyClock) -> None:
        """Save the time every minute, and when a jump begins or ends."""
        known, saved = clock.known, self._saved
        is_due = (
            saved is None
            or abs(known.now_ms - saved.now_ms) >= SAVE_MS
            or (known.jump is None) != (saved.jump is None)
        )
        if is_due and not self._saving:
            self._saved, self._saving = known, True
            self._runner.background(lambda: self.save(known), self._is_saved)

    def save(self, known: KnownTime) -> None:
        """Write the file and fsync it. May be called from any thread."""
        new = self._path.with_suffix(".new")
        line = msgspec.json.encode(known) + b"\n"
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
