"""The server's clock for times and ages: follows the wall clock, but not its jumps. Opens no file.

Theory of operation. The kernel has a clock that nobody can set, CLOCK_BOOTTIME; it counts from the machine's
start and goes on while the machine sleeps. The time here is that clock plus an offset. Several times a second
`tick` compares it with the wall clock:

    agrees within `jump_s` ──▶ the offset follows: NTP keeps the clock right, by slewing or small steps
    differs by more        ──▶ a jump: the offset stays as it is
    the jump has stood for `confirm_s`, or an operator calls `confirm`  ──▶ the offset follows
    the wall clock is back ──▶ the jump is forgotten

Whatever compares times with each other uses this clock: the times of records, retention, leases, notes that
are due.

A restart is not a jump. `known` is what the last server left (`clock_file.py`). In the same boot of the
machine the offset is still right. After a reboot, time goes on from the last known one. The machine was off
for a while: for `SETTLE_MS`, in which NTP may set the clock, a step forward of up to `off_s` is followed at
once.
"""

import logging
from collections.abc import Callable
from typing import NamedTuple

from msgspec import Struct

from headrace.config import ClockSettings

logger = logging.getLogger(__name__)

SETTLE_MS = 10 * 60 * 1000
"""How long after a reboot the time for which the machine was off is made up for."""


class KnownTime(Struct, frozen=True, forbid_unknown_fields=True):
    """The state of the clock that the next server has to know."""

    boot_id: str
    offset_ms: int
    """From CLOCK_BOOTTIME to the time here; of no use after a reboot."""
    now_ms: int
    jump: tuple[int, int] | None
    """The jump that was not confirmed, as in `_Jump`."""


class _Jump(NamedTuple):
    offset_ms: int
    """From CLOCK_BOOTTIME to the wall clock."""
    since_ms: int
    """When it was first seen, by CLOCK_BOOTTIME."""


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
        """Called when the time here was set back."""
        if known is None:
            self._offset_ms = wall_ms() - now_ms
        elif known.boot_id == boot_id:
            self._offset_ms = known.offset_ms
            self._jump = _Jump(*known.jump) if known.jump is not None else None
        else:
            self._offset_ms = known.now_ms - now_ms
            self._settled_ms = now_ms + SETTLE_MS
        self.tick()
        if self._jump is not None and self._jump.since_ms != now_ms:
            logger.warning("%s", self.trouble)  # it was seen by the last server

    def now_ms(self) -> int:
        return self._boot_ms() + self._offset_ms

    def elapsed_ms(self) -> int:
        """A count that only ever grows with time, for durations inside this process."""
        return self._boot_ms()

    @property
    def known(self) -> KnownTime:
        return KnownTime(self._boot_id, self._offset_ms, self.now_ms(), self._jump)

    def tick(self) -> None:
        """Look at the wall clock."""
        boot_ms = self._boot_ms()
        wall_offset_ms = self._wall_ms() - boot_ms
        ahead_ms = wall_offset_ms - self._offset_ms
        forward_max_ms = self._jump_ms
        if boot_ms < self._settled_ms:
            forward_max_ms = max(self._jump_ms, self._off_ms)
        if -self._jump_ms <= ahead_ms <= forward_max_ms:
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
        """By how much the wall clock is ahead of the time here; 0 while it is followed."""
        return self._jump.offset_ms - self._offset_ms if self._jump is not None else 0

    @property
    def followed_in_ms(self) -> int:
        """After how long a jump is followed if nobody confirms it before."""
        if self._jump is None:
            return 0
        return max(0, self._jump.since_ms + self._confirm_ms - self._boot_ms())

    @property
    def trouble(self) -> str:
        """The sentence that tells operators of a jump; empty while there is none."""
        if self._jump is None:
            return ""
        side = "ahead" if self.ahead_ms > 0 else "behind"
        return (
            f"the wall clock jumped and is {_span(abs(self.ahead_ms))} {side}: times and ages go on as "
            f"before until `headrace clock confirm`, or for {_span(self.followed_in_ms)}"
        )

    def confirm(self) -> int:
        """Follow the wall clock where it has jumped to; returns by how much, 0 when it has not."""
        ahead_ms = self.ahead_ms
        if self._jump is not None:
            logger.warning(
                "the jump of the wall clock by %s%s is confirmed: times and ages follow it",
                *("-" if ahead_ms < 0 else "", _span(abs(ahead_ms))),
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
