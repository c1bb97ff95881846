"""What the source asks of a log, wherever it lies: which topics, where positions are, and their bytes.

Two modules implement it: `log_files.py` reads a data directory, `log_server.py` asks a running server. Both
give the same rows. Nothing here knows Spark.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from headrace.errors import HeadraceError
from headrace.model import Position, Span
from headrace.spark.index_rows import Rows


class SourceError(HeadraceError):
    """The source cannot give what was asked for: the message says why and what to change."""


class DataLossError(SourceError):
    """Records that were asked for are no longer kept."""

    def __init__(self, message: str, rest: "Range | None" = None) -> None:
        super().__init__(message)
        self.rest = rest
        """What can still be read of them."""


class TopicState(NamedTuple):
    """A topic and how far it reaches."""

    name: str
    start: Position
    end: Position
    is_kept: bool = True
    """Whether it goes on after a restart of its server: not one of durability `memory`, which begins anew."""


class Range(NamedTuple):
    """Records of a topic from one position to another: what a task reads."""

    topic: str
    start: Position
    end: Position
    files: tuple[int, ...] = ()
    """Where they lie, in numbers that only the log they come from understands."""

    @property
    def bytes(self) -> int:
        return Span.between(self.start, self.end).bytes


class Block(NamedTuple):
    """Whole runs that follow each other without a gap, and their rows. Not checked yet."""

    rows: Rows
    data: bytes | memoryview
    """Until the next block is asked for: its memory may be used again then."""
    place: str
    """Where they were read, in words for an error."""


class Damage(NamedTuple):
    """Offsets whose rows are damaged: what lies there cannot be read."""

    offset: int
    end: int
    place: str


class LogView(Protocol):
    def topics(self, names: Iterable[str] | None) -> dict[str, TopicState]:
        """The topics there are: those of these names, or all."""

    def ended(self, names: Iterable[str]) -> dict[str, Position]:
        """Where topics ended that are no more; those are left out of which nothing is known."""

    def wait(self, timeout_s: float) -> None:
        """Return when topics may have changed since they were last asked for, or after this time."""

    def at_offset(self, topic: TopicState, offset: int) -> Position:
        """The nearest record boundary at or after `offset` that is kept."""

    def at_ordinal(self, topic: TopicState, ordinal: int) -> Position:
        """Where the record with so many before it begins."""

    def at_time(self, topic: TopicState, ms: int) -> Position:
        """Where the first record at or after this time begins."""

    def split(self, whole: Range, bytes_max: int) -> Sequence[Range]:
        """The same records in parts that several tasks can read."""

    def expect(self, parts: Iterable[Range]) -> None:
        """What is read next, in this order: where each takes a request, small ones are fetched together."""

    def read(self, part: Range) -> Iterator[Block | Damage]:
        """The runs that hold a part's records; the first and last may hold others beside them."""

    def rows(self, part: Range) -> Iterator[Rows | Damage]:
        """The rows of the runs that hold a part's records, without their bytes."""

    def close(self) -> None:
        """Let go of what is open; it opens again when something is asked."""
