"""The unacknowledged publishes of a client: which to send, and which to send again.

Publishes are numbered from 0 without gaps and acknowledged from the oldest on, so the unacknowledged
publishes are a queue and the next number. On a connection, each is in exactly one of three places:

    unsent ──take──▶ in flight ──not acknowledged in time──▶ overdue ──take──▶ in flight

With `alone`, only the oldest publish is sent, to learn whether it is the one that the server refuses.

A new connection has seen none of the publishes: all are unsent again. A publish that is not yet handed to the
transport is never overdue, however long it waits. Elsewhere: the protocols and their numbers on the wire.
"""

from collections import deque
from itertools import islice
from math import inf

from headrace.errors import WindowFullError

WINDOW_MAX = 4096
WINDOW_BYTES_MAX = 16 * 1024 * 1024


class Window:
    """The unacknowledged publishes, as encoded frames."""

    def __init__(self, publishes_max: int, bytes_max: int, resend_s: float) -> None:
        self.next_number = 0
        self.alone = False
        self._publishes_max = publishes_max
        self._bytes_max = bytes_max
        self._resend_s = resend_s
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self._unsent: deque[bytes] = deque()
        # Runs of numbers in the order of sending: time, first number, and the number behind the last.
        self._in_flight: deque[tuple[float, int, int]] = deque()
        self._overdue: deque[tuple[int, bytes]] = deque()

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def has_room(self) -> bool:
        return len(self._frames) < self._publishes_max and self._bytes < self._bytes_max

    @property
    def sent(self) -> int:
        """Number of publishes, counted from the oldest, that were sent on this connection."""
        return len(self._frames) - len(self._unsent)

    @property
    def oldest(self) -> int:
        """Number of the oldest unacknowledged publish; without any, the next number."""
        return self.next_number - len(self._frames)

    @property
    def oldest_sent_at(self) -> float:
        """Time when the oldest was last sent on this connection; -inf if it was not."""
        return self._in_flight[0][0] if self._in_flight else -inf

    @property
    def overdue_at(self) -> float:
        """Time when the next publish becomes overdue; inf if none is in flight."""
        return self._in_flight[0][0] + self._resend_s if self._in_flight else inf

    def full(self) -> WindowFullError:
        return WindowFullError(
            f"{len(self._frames)} publishes ({self._bytes} bytes) are unacknowledged, "
            f"the window holds {self._publishes_max} ({self._bytes_max} bytes)"
        )

    def add(self, frame: bytes) -> None:
        """Add the publish with the number `next_number`."""
        self.next_number += 1
        self._frames.append(frame)
        self._bytes += len(frame)
        self._unsent.append(frame)

    def take(self, bytes_max: int, now: float) -> list[bytes]:
        """Return frames to send now, about `bytes_max` at most; empty if there are none."""
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
        """Remove the oldest `count` publishes: they are safe with the server."""
        frames = self._frames
        self._bytes -= sum(map(len, islice(frames, count)))
        if count == len(frames):
            frames.clear()
        else:
            for _ in range(count):
                frames.popleft()
        oldest = self.oldest
        while self._in_flight and self._in_flight[0][2] <= oldest:
            self._in_flight.popleft()
        while self._overdue and self._overdue[0][0] < oldest:
            self._overdue.popleft()

    def resend(self, now: float) -> None:
        """Let overdue publishes be sent again."""
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
        """Restart the time of all publishes in flight: acknowledgements cannot be heard now."""
        self._in_flight = deque((now, first, end) for _, first, end in self._in_flight)

    def start_over(self) -> None:
        """Make all publishes unsent: the connection is lost, with everything in flight."""
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
