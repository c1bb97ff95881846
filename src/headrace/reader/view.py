"""The interface that the source uses to read a log: list topics, find positions, read bytes.

Two modules implement it: `files.py` reads a data directory, `server.py` asks a running server. Both
give the same rows. Nothing here knows Spark.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from headrace.errors import HeadraceError
from headrace.model import Position, Span
from headrace.reader.index_rows import Rows


class SourceError(HeadraceError):
    """The source cannot deliver the requested data. The message says why and what to change."""


class DataLossError(SourceError):
    """Requested records are no longer kept."""

    def __init__(self, message: str, rest: "LogRange | None" = None) -> None:
        super().__init__(message)
        self.rest = rest
        """The part of the requested range that can still be read."""


class TopicState(NamedTuple):
    """A topic with its start and end."""

    name: str
    start: Position
    end: Position
    is_kept: bool = True
    """True if the topic continues after a restart of its server.

    False for a topic of durability `memory`, which begins anew.
    """


class LogRange(NamedTuple):
    """Records of a topic from one position to another: the unit that a task reads."""

    topic: str
    start: Position
    end: Position
    files: tuple[int, ...] = ()
    """Numbers of the files that hold the records. Only the log that made this range understands them."""

    @property
    def bytes(self) -> int:
        return Span.between(self.start, self.end).bytes


class LogBlock(NamedTuple):
    """Consecutive whole runs without a gap, and their index rows. Checksums are not verified yet."""

    rows: Rows
    data: bytes | memoryview
    """Valid until the next block is requested: its memory may then be reused."""
    place: str
    """Origin of the data, for error messages."""


class DamagedRange(NamedTuple):
    """Range of offsets whose index rows are damaged, so its records cannot be read."""

    offset: int
    end: int
    place: str


class LogView(Protocol):
    def topics(self, names: Iterable[str] | None) -> dict[str, TopicState]:
        """Return the topics that exist: those with these names, or all."""

    def ended(self, names: Iterable[str]) -> dict[str, Position]:
        """Return the end positions of topics that no longer exist, where the end is known."""

    def wait(self, timeout_s: float) -> None:
        """Wait until topics may have changed since the last call of `topics`, or until the timeout."""

    def at_offset(self, topic: TopicState, offset: int) -> Position:
        """Return the nearest record boundary at or after `offset` that is kept."""

    def at_ordinal(self, topic: TopicState, ordinal: int) -> Position:
        """Return where the record with this ordinal begins."""

    def at_time(self, topic: TopicState, ms: int) -> Position:
        """Return where the first record at or after this time begins."""

    def split(self, whole: LogRange, bytes_max: int) -> Sequence[LogRange]:
        """Divide a range into parts that several tasks can read."""

    def expect(self, parts: Iterable[LogRange]) -> None:
        """Announce the parts that are read next, in this order.

        If each part costs a request, small parts are fetched together.
        """

    def read(self, part: LogRange) -> Iterator[LogBlock | DamagedRange]:
        """Yield the runs that hold a part's records; the first and last may contain other records too."""

    def rows(self, part: LogRange) -> Iterator[Rows | DamagedRange]:
        """Yield the index rows of the runs that hold a part's records, without their bytes."""

    def close(self) -> None:
        """Close what is open; the next call opens it again."""
