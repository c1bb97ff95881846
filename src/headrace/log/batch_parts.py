"""What a batch is made of, what is answered, and who takes what is in it."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from headrace.errors import HeadraceError
from headrace.log.blocks import Block
from headrace.log.entries import Producer, Progress, StagedFile


class BatchAnswer(NamedTuple):
    duplicate: bool
    records: int
    """That were appended: none for a duplicate."""
    damaged: int = 0
    """Blocks and files that could not be read: their records are lost."""


class BatchRefusedError(HeadraceError):
    """A channel would not take a message of the batch: nothing was decided, and its uploads are kept."""


Answer = Callable[[BatchAnswer | BatchRefusedError | None], None]
"""Called with None when the store stops first: ask the next one again."""


class Decision(NamedTuple):
    producer: str
    number: int
    files: list[StagedFile]


class Part(NamedTuple):
    """A block of a batch, and how far the batch is appended with it."""

    block: Block
    producer: str
    number: int
    progress: Progress

    def extra(self) -> Producer:
        return Producer(self.producer.encode(), self.number, 0, self.progress)


class Appender(Protocol):
    """The part of the store that puts things into commits."""

    @property
    def last_sequence(self) -> int:
        """The number of the last commit."""

    def decide(self, decision: Decision, done: Callable[[], None]) -> None: ...

    def append_parts(
        self, parts: list[Part], end: Producer | None, done: Callable[[], None]
    ) -> None:
        """Append blocks in their order; `end` is noted behind them where no entry says it."""


class Events(Protocol):
    """Who stores events of Logux."""

    def add(self, blocks: Sequence[Block], done: Callable[[BaseException | None], None]) -> None:
        """Store those that are new, in the order of each topic; `done` when all are as durable as it asks.

        With what went wrong when they should be given again later. Never calls it when the store fails.
        """


class Messages(Protocol):
    """Who stores messages for channels."""

    def check(
        self,
        blocks: Callable[[], Iterator[Block]],
        done: Callable[[BaseException | None], None],
    ) -> None:
        """Whether all would be taken; `blocks` is for a thread.

        With a BatchRefusedError when they would not, with anything else when it is to be tried again later.
        """

    def add(
        self, batch: bytes, parts: Sequence[Part], done: Callable[[BaseException | None], None]
    ) -> None:
        """As with events; those that were stored before are known by their place in the batch.

        `batch` is the id of its first staged file, which no other has: a producer and its numbers may come
        again when they are forgotten.
        """
