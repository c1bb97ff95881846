"""The publishes of a client that are not acknowledged: which to send, and which to send again.

Publishes are numbered from 0 without gaps and acknowledged from the oldest on, so the unacknowledged ones
are a queue and the number that comes next. Each is in exactly one of three places on a connection:

    unsent ──take──▶ in flight ──not acknowledged in time──▶ overdue ──take──▶ in flight

With `alone`, only the oldest is sent: to learn whether it is the one that the server does not take.

A new connection has seen none of them: all are unsent again. What is not yet handed to the transport is never
overdue, however long it waits. Knows neither a protocol nor its numbers on the wire.
"""

from collections import deque
from itertools import islice
from math import inf

from headrace.errors import WindowFullError

WINDOW_MAX = 4096
WINDOW_BYTES_MAX = 16 * 1024 * 1024


class Window:
    """The unacknowledged publishes, as encoded frames."""

    __slots__ = (
        *("_bytes", "_bytes_max", "_frames", "_in_flight", "_overdue", "_publishes_max"),
        *("_resend_s", "_unsent", "alone", "next_number"),
    )

    def __init__(self, publishes_max: int, bytes_max: int, resend_s: float = inf) -> None:
        self.next_number = 0
        self.alone = False
        self._publishes_max = publishes_max
        self._bytes_max = bytes_max
        self._resend_s = resend_s
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self._unsent: deque[bytes] = deque()
        # When a run of numbers was sent, its first, and the one behind its last: in the order of time.
        self._in_flight: deque[tuple[float, int, int]] = deque()
        self._overdue: deque[tuple[int, bytes]] = deque()

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def has_room(self) -> bool:
        return len(self._frames) < self._publishes_max and self._bytes < self._bytes_max

    @property
    def sent(self) -> int:
        """How many of the oldest have been on this connection."""
        return len(self._frames) - len(self._unsent)

    @property
    def oldest(self) -> int:
        """The number of the oldest unacknowledged publish, or of the next one."""
        return self.next_number - len(self._frames)

    @property
    def oldest_sent_at(self) -> float:
        """When the oldest was last sent on this connection, if it was."""
        return self._in_flight[0][0] if self._in_flight else -inf

    @property
    def overdue_at(self) -> float:
        """When the next publish becomes overdue."""
        return self._in_flight[0][0] + self._resend_s if self._in_flight else inf

    def full(self) -> WindowFullError:
        return WindowFullError(
            f"{len(self._frames)} publishes ({self._bytes} bytes) are unacknowledged, "
            f"the window holds {self._publishes_max} ({self._bytes_max} bytes)"
        )

    def add(self, frame: bytes) -> None:
        """The publish of `next_number`."""
        self.next_number += 1
        self._frames.append(frame)
        self._bytes += len(frame)
        self._unsent.append(frame)

    def take(self, bytes_max: int, now: float) -> list[bytes]:
        """Frames to send now, about `bytes_max` at most; empty when there are none."""
        if self._overdue:
            return self._take_overdue(bytes_max, now)
        unsent = self._unsent
        if not unsent or (self.alone and self.sent):
            return []
        first = self.next_number - len(unsent)
        if self.alone:
            frames = [unsent.popleft()]
        elif self._bytes <= bytes_max:
            frames = list(unsent)
            unsent.clear()
        else:
            frames = []
            size = 0
            while unsent and size < bytes_max:
                frame = unsent.popleft()
                size += len(frame)
                frames.append(frame)
        self._in_flight.append((now, first, self.next_number - len(unsent)))
        return frames

    def acknowledge(self, count: int) -> None:
        """The oldest `count` are safe with the server."""
        frames = self._frames
        self._bytes -= sum(map(len, islice(frames, count)))
        if count == len(frames):
            frames.clear()
        else:
            for _ in range(count):
                frames.popleft()
        oldest = self.next_number - len(frames)
        while self._in_flight and self._in_flight[0][2] <= oldest:
            self._in_flight.popleft()
        while self._overdue and self._overdue[0][0] < oldest:
            self._overdue.popleft()

    def resend(self, now: float) -> None:
        """Let what is overdue be sent again."""
        if self.overdue_at > now:
            return
        frames = list(self._frames)
        oldest = self.next_number - len(frames)
        while self.overdue_at <= now:
            _, first, end = self._in_flight.popleft()
            for number in range(max(first, oldest), end):
                self._overdue.append((number, frames[number - oldest]))
        self._overdue = deque(sorted(self._overdue))  # by number and not by time

    def wait_longer(self, now: float) -> None:
        """Acknowledgements cannot be heard now: count anew for all that is in flight."""
        self._in_flight = deque((now, first, end) for _, first, end in self._in_flight)

    def start_over(self) -> None:
        """The connection is lost, and what was in flight with it."""
        self._in_flight.clear()
        self._overdue.clear()
        self._unsent = self._frames.copy()

    def _take_overdue(self, bytes_max: int, now: float) -> list[bytes]:
        frames: list[bytes] = []
        size = 0
        while self._overdue and size < bytes_max:
            number, frame = self._overdue.popleft()
            size += len(frame)
            frames.append(frame)
            self._in_flight.append((now, number, number + 1))
        return frames
