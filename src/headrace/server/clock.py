"""The server's clock for times and ages: follows the wall clock, but not its jumps.

Theory of operation. The kernel has a clock that nobody can set, CLOCK_BOOTTIME. It counts from the machine's
start and keeps counting while the machine sleeps. The server's time is that clock plus an offset. Several
times a second `tick` compares the server's time with the wall clock:

    a step of at most `jump_s`, and no more in an hour ──▶ the offset follows: NTP keeps the clock right
    a larger step, or more small ones ──▶ a jump: the offset stays as it is
    the jump has stood for `confirm_s`, or an operator calls `confirm`  ──▶ the offset follows
    the wall clock is back ──▶ the jump is forgotten

All code that compares times uses this clock: the times of records, retention, leases, notes that are due.

A restart is not a jump. `saved` is the state that the last server process saved (`log/saved_time.py`). In the
same boot of the machine the offset is still right. After a reboot, time continues from the last saved time,
or, without a sound file, from the newest record. Nobody knows yet how long the machine was off: the battery
clock may be wrong by years. This *gap* is treated as a jump, with one difference: if it is at most `off_s`
long, the server follows the wall clock as soon as the kernel says that NTP has synchronised it. Until then
nothing gets older by the gap: no record, lease, producer or staged file.
"""

import ctypes
import logging
from collections.abc import Callable

from headrace.config.settings import ClockSettings
from headrace.log.saved_time import SavedTime, SeenOffset

logger = logging.getLogger(__name__)

HOUR_MS = 3_600_000
"""Interval in which small steps may add up to `jump_s`."""
READS_MAX = 5
"""Attempts to read both clocks without being interrupted in between."""


class SteadyClock:
    def __init__(
        self,
        settings: ClockSettings,
        *,
        wall_ms: Callable[[], int],
        boot_ms: Callable[[], int],
        is_synchronised: Callable[[], bool],
        boot_id: str,
        saved: SavedTime | None,
        newest_ms: int,
    ) -> None:
        """Continue the time of the last server process.

        `newest_ms` is the time of the newest record, which counts if no time is saved; 0 without records.
        """
        self._jump_ms = int(settings.jump_s * 1000)
        self._confirm_ms = int(settings.confirm_s * 1000)
        self._off_ms = int(settings.off_s * 1000)
        self._wall_ms = wall_ms
        self._boot_ms = boot_ms
        self._is_synchronised = is_synchronised
        self._boot_id = boot_id
        self._jump: SeenOffset | None = None
        self._gap: SeenOffset | None = None
        now_ms = boot_ms()
        self._hour = SeenOffset(0, now_ms)
        self.went_back: Callable[[], None] = lambda: None
        """Called when the server's time was set back."""
        if saved is not None and saved.boot_id == boot_id:
            self._offset_ms = saved.offset_ms
            self._jump, self._gap = saved.jump, saved.gap
            self._hour = saved.hour or SeenOffset(self._offset_ms, now_ms)
        elif saved is not None:
            self._begin_gap(saved.now_ms)
        elif newest_ms:
            # A record from the future must not make the others older.
            self._begin_gap(min(newest_ms, wall_ms()))
        else:
            self._follow(self._seen_offset().offset_ms)
        self.tick()
        if self._jump is not None and self._jump.at_ms != now_ms:
            logger.warning("%s", self.trouble)  # the last server process saw it

    def now_ms(self) -> int:
        return self._boot_ms() + self._offset_ms

    def elapsed_ms(self) -> int:
        """Monotonic milliseconds, for durations inside this process."""
        return self._boot_ms()

    @property
    def state(self) -> SavedTime:
        """State for the next server process."""
        return SavedTime(
            self._boot_id, self._offset_ms, self.now_ms(), self._jump, self._hour, self._gap
        )

    def tick(self) -> None:
        """Compare the server's time with the wall clock: follow it, or note or confirm a jump."""
        wall_offset_ms, boot_ms = self._seen_offset()
        if self._gap is not None and boot_ms - self._gap.at_ms >= self._confirm_ms:
            self._gap = None
        if boot_ms - self._hour.at_ms >= HOUR_MS:
            self._hour = SeenOffset(self._offset_ms, boot_ms)
        if self._is_small(wall_offset_ms):
            if self._jump is not None:
                logger.warning("the wall clock agrees with the server's time again")
                self._jump = None
            self._offset_ms = wall_offset_ms
            if self._gap is not None and self._is_synchronised():
                self._gap = None
        elif self._is_gap(wall_offset_ms) and self._is_synchronised():
            gap = _span(wall_offset_ms - self._offset_ms)
            logger.info("the clock is synchronised: %s have passed since the last saved time", gap)
            self._follow(wall_offset_ms)
        elif self._jump is None or abs(wall_offset_ms - self._jump.offset_ms) > self._jump_ms:
            # A jump that grows in small steps begins again too, and its day with it.
            self._jump = SeenOffset(wall_offset_ms, boot_ms)
            logger.warning("%s", self.trouble)
        elif boot_ms - self._jump.at_ms >= self._confirm_ms:
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
        return max(0, self._jump.at_ms + self._confirm_ms - self._boot_ms())

    @property
    def trouble(self) -> str:
        """Sentence that tells operators of a jump or a gap; empty without one."""
        if self._jump is None:
            return ""
        if self._is_gap(self._jump.offset_ms):
            return (
                f"the wall clock is {_span(self.ahead_ms)} ahead of the last saved time, perhaps because the "
                "machine was off: the server ignores this time until NTP has set the clock, until "
                f"`headrace clock confirm`, or for {_span(self.followed_in_ms)}"
            )
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
            if ahead_ms < 0:
                self.went_back()
        return ahead_ms

    def _seen_offset(self) -> SeenOffset:
        """Return the wall clock's offset from the boot clock.

        On a busy machine the process may be interrupted between two reads of the clocks, for longer than a
        second. Such an offset would be too large by that time, so the reads are repeated.
        """
        shortest_ms, seen = -1, SeenOffset(0, 0)
        for _ in range(READS_MAX):
            boot_ms = self._boot_ms()
            wall_ms = self._wall_ms()
            took_ms = self._boot_ms() - boot_ms
            if shortest_ms < 0 or took_ms < shortest_ms:
                shortest_ms, seen = took_ms, SeenOffset(wall_ms - boot_ms, boot_ms)
            if took_ms <= 1:
                break
        return seen

    def _begin_gap(self, now_ms: int) -> None:
        """Continue the time of another boot of the machine."""
        boot_ms = self._boot_ms()
        self._offset_ms = now_ms - boot_ms
        self._gap = self._hour = SeenOffset(self._offset_ms, boot_ms)

    def _is_small(self, offset_ms: int) -> bool:
        """True if this step is small, also together with the other steps of this hour."""
        return (
            abs(offset_ms - self._offset_ms) <= self._jump_ms
            and abs(offset_ms - self._hour.offset_ms) <= self._jump_ms
        )

    def _is_gap(self, offset_ms: int) -> bool:
        """True if the difference may be the time that the machine was off."""
        return self._gap is not None and 0 < offset_ms - self._gap.offset_ms <= self._off_ms

    def _follow(self, offset_ms: int) -> None:
        """Follow a jump, or the wall clock for the first time."""
        self._offset_ms, self._jump, self._gap = offset_ms, None, None
        self._hour = SeenOffset(offset_ms, self._boot_ms())


def _span(ms: int) -> str:
    for unit, length_ms in (("days", 86_400_000), ("hours", 3_600_000), ("minutes", 60_000)):
        if ms >= 2 * length_ms:
            return f"{ms / length_ms:.1f} {unit}"
    return f"{ms / 1000:.0f} seconds"


_libc = ctypes.CDLL(None, use_errno=True)

_STA_UNSYNC = 0x40
"""Flag from Linux's timex.h. The kernel sets it at its start, and whenever somebody sets the clock."""


class _Timex(ctypes.Structure):
    """The beginning of Linux's `struct timex`; the rest is room."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("room", ctypes.c_byte * 256),
    )


def is_synchronised() -> bool:
    """Ask the kernel whether NTP or the like has synchronised the wall clock. False if that is unknown."""
    timex = _Timex()  # with modes 0, the call only reads
    return _libc.adjtimex(ctypes.byref(timex)) >= 0 and not timex.status & _STA_UNSYNC
