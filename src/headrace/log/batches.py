"""Batches: staged files that are appended exactly once, in the order their producer named them.

Theory of operation. A batch is *decided* by an entry of the journal that names its producer, its number and
its staged files. From then on it is appended, whatever happens, one batch after another: pieces of it are
read in a thread and given to the commit that gathers, two at a time at most, so that others need not wait.
Each entry made of a batch says how far the batch is appended with it, so both are true or neither.

    asked ──decision committed──▶ being appended ──last entry committed──▶ answered ──applied──▶ files deleted

Events of Logux are not appended here: whoever knows their ids stores those that are new. The rest of a piece
waits until they are durable, and only then is it said how far the batch has come. After a crash they are
given once more, which their ids make harmless.

A number that was decided before is a duplicate; one that was passed over is refused. What is not here: staged
files (`staging.py`), their blocks (`blocks.py`), entries (`commit.py`), what the applier does with them.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from headrace.errors import BatchNumberError
from headrace.log.blocks import Block, Damaged, read_staged
from headrace.log.catalogue import BATCHES_NAME, Catalogue
from headrace.log.entries import RECENT_MAX, Producer, Progress, Recent, StagedFile, StagedFiles
from headrace.log.layout import Layout
from headrace.log.quarantine import quarantine_file
from headrace.log.runner import Runner
from headrace.log.staging import Staging

logger = logging.getLogger(__name__)

BATCH_FILES_MAX = 100_000
"""Staged files that one batch may name."""

PRODUCER_BYTES_MAX = 255

_PIECES_MAX = 2
"""Pieces of a batch that are given to commits and not committed: one is written while one gathers."""


class BatchAnswer(NamedTuple):
    duplicate: bool
    records: int
    """That were appended: none for a duplicate."""
    damaged: int = 0
    """Blocks and files that could not be read: their records are lost."""


Answer = Callable[[BatchAnswer | None], None]
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


class _Batch:
    def __init__(self, decision: Decision, progress: Progress) -> None:
        self.producer, self.number, self.files = decision
        self.decided = False
        self.progress = progress
        """What was read and given to commits."""
        self.pieces = 0
        """What was given to commits and is not committed."""
        self.records = self.damaged = 0
        self.asked: Answer | None = None
        """Whoever asked first, in this life of the server."""
        self.waiters: list[Answer] = []
        """Whoever asked again."""

    @property
    def is_read(self) -> bool:
        return self.progress.file == len(self.files)

    def is_of(self, staged: Sequence[str]) -> bool:
        """Whether it was asked for with these files; empty ones are not remembered."""
        return {file.id.hex() for file in self.files} <= set(staged)

    def take_waiters(self) -> list[Answer]:
        """Everyone who is to be answered, once."""
        waiters = [self.asked, *self.waiters] if self.asked is not None else self.waiters
        self.asked, self.waiters = None, []
        return waiters


class _Piece(NamedTuple):
    """What was read of a batch at once."""

    batch: _Batch
    events: list[Block]
    parts: list[Part]
    """The others: they wait for the events."""


class _Found(NamedTuple):
    what: Block | Damaged
    file: StagedFile
    progress: Progress


class Batches:
    """Called from the loop only."""

    def __init__(
        self,
        catalogue: Catalogue,
        layout: Layout,
        runner: Runner,
        staging: Staging,
        appender: Appender,
        piece_bytes: int,
    ) -> None:
        self._catalogue = catalogue
        self._layout = layout
        self._runner = runner
        self._staging = staging
        self._appender = appender
        self._piece_bytes = piece_bytes
        self._batches: deque[_Batch] = deque()
        """In the order in which they were asked for, which is that of their decisions."""
        self._unapplied: dict[str, list[tuple[int, int]]] = {}
        """Numbers of producers, each with its commit, until the catalogue knows it."""
        self._appended: deque[tuple[int, list[StagedFile]]] = deque()
        """Files of batches that are done, until the commit that says so is applied."""
        self._reading = False
        self._events: Events | None = None
        self._held: _Piece | None = None
        """The piece whose events are not durable yet."""
        self._stopped = False
        self._troubled = False
        """Whether reading failed for a reason that may pass: it is tried again with the next tick."""
        self.damage_count = 0
        """Blocks and files that could not be read when their batch was appended."""
        for row in sorted(catalogue.batches(), key=lambda row: (row.ms, row.number)):
            files = msgspec.msgpack.decode(row.staged, type=StagedFiles)
            batch = _Batch(
                Decision(row.producer.decode(), row.number, files),
                Progress(row.file, row.position),
            )
            batch.decided = True
            staging.restore_claims(files)
            self._batches.append(batch)
        if self._batches:
            logger.info("going on with %d batches", len(self._batches))
            runner.soon(self._go_on)

    @property
    def is_busy(self) -> bool:
        """Whether anything will be given to commits without being asked for."""
        is_adding = self._held is not None and self._events is not None
        return is_adding or (bool(self._batches) and not self._stopped)

    @property
    def pending(self) -> int:
        return len(self._batches)

    def take_events(self, events: Events) -> None:
        """From now on there is someone to store events; batches that have any have waited for it."""
        self._events = events
        if self._held is not None:
            self._add(self._held)

    def decide(self, producer: str, number: int, staged: Sequence[str], answer: Answer) -> None:
        """Append the staged files' records, unless this number was decided before.

        Raises UnknownStagedError, StagedClaimedError and BatchNumberError, and then nothing is decided.
        """
        if self._stopped:
            self._runner.soon(lambda: answer(None))
            return
        for batch in self._batches:
            if (batch.producer, batch.number) == (producer, number):
                # The first request is on its way: this one is answered when that one is.
                if batch.asked is None and batch.is_of(staged):
                    batch.asked = answer
                else:
                    self._staging.discard(staged)
                    batch.waiters.append(answer)
                return
        if self._was_decided(producer, number):
            self._staging.discard(staged)
            self._runner.soon(lambda: answer(BatchAnswer(duplicate=True, records=0)))
            return
        decision = Decision(producer, number, self._staging.claim(staged))
        batch = _Batch(decision, Progress())
        batch.asked = answer
        self._batches.append(batch)
        self._appender.decide(decision, lambda: self._decided(batch))

    def withdraw(self, answer: Answer) -> None:
        """Whoever asked has been told to ask again."""
        for batch in self._batches:
            if batch.asked is answer:
                batch.asked = None
            elif answer in batch.waiters:
                batch.waiters.remove(answer)

    def tick(self) -> None:
        """Called a few times a second."""
        if self._troubled:
            self._troubled = False
            if self._held is not None:
                self._add(self._held)
            else:
                self._go_on()

    def applied(self, sequence: int) -> None:
        """The catalogue holds everything up to this commit, and what it no longer names is deleted."""
        rest = {
            producer: [one for one in known if one[1] > sequence]
            for producer, known in self._unapplied.items()
        }
        self._unapplied = {producer: known for producer, known in rest.items() if known}
        while self._appended and self._appended[0][0] <= sequence:
            self._staging.forget(self._appended.popleft()[1])

    def stop(self) -> None:
        """Begin nothing more: what is decided goes on at the next start."""
        self._stopped = True
        if self._troubled:
            self._held = None
        for batch in self._batches:
            for answer in batch.take_waiters():
                self._runner.soon(partial(answer, None))

    def _was_decided(self, producer: str, number: int) -> bool:
        """Raises BatchNumberError for one that was passed over."""
        row = self._catalogue.producer(BATCHES_NAME, producer.encode())
        known = msgspec.msgpack.decode(row.recent, type=Recent) if row is not None else []
        knows_all = len(known) < RECENT_MAX
        numbers = {one for one, _ in known}
        numbers |= {one for one, _ in self._unapplied.get(producer, ())}
        numbers |= {batch.number for batch in self._batches if batch.producer == producer}
        last = max(numbers, default=-1)
        if number > last:
            return False
        if number not in numbers and (knows_all or number > min(numbers)):
            raise BatchNumberError(
                f"batch {number} of producer {producer!r} was never written, and batch {last} was: the "
                "numbers of a producer must grow; give this one a producer of its own"
            )
        return True

    def _decided(self, batch: _Batch) -> None:
        batch.decided = True
        known = self._unapplied.setdefault(batch.producer, [])
        known.append((batch.number, self._appender.last_sequence))
        if batch.is_read:
            self._finish_if_done(batch)  # it has no records
        self._go_on()

    def _go_on(self) -> None:
        """Read the next piece of the batch whose turn it is, unless enough of it is on its way."""
        if self._reading or self._held or self._stopped or self._troubled or not self._batches:
            return
        batch = self._batches[0]
        if not batch.decided or batch.is_read or batch.pieces >= _PIECES_MAX:
            return
        self._reading = True
        self._runner.background(
            partial(_read, self._layout, batch.files, batch.progress, self._piece_bytes),
            partial(self._have_read, batch),
        )

    def _have_read(self, batch: _Batch, found: list[_Found] | BaseException) -> None:
        self._reading = False
        if self._stopped:
            return
        if isinstance(found, BaseException):
            self._have_trouble(batch, found)
            return
        piece = _Piece(batch, [], [])
        for what, file, progress in found:
            if isinstance(what, Damaged):
                self.damage_count += 1
                batch.damaged += 1
                logger.error(
                    "batch %d of producer %r: damage: staged file %s: %s: its records are lost",
                    *(batch.number, batch.producer, file.id.hex(), what.reason),
                )
                continue
            batch.records += what.record_count
            if what.has_events:
                piece.events.append(what)
            else:
                piece.parts.append(Part(what, batch.producer, batch.number, progress))
        batch.progress = found[-1].progress
        if piece.events or piece.parts or batch.is_read:
            batch.pieces += 1
            if piece.events:
                self._held = piece
                self._add(piece)
            else:
                self._append(piece)
        self._go_on()

    def _have_trouble(self, batch: _Batch, trouble: BaseException) -> None:
        known = (batch.number, batch.producer, trouble)
        logger.error("batch %d of producer %r cannot be read for now: %s", *known)
        self._troubled = True

    def _add(self, piece: _Piece) -> None:
        if self._events is not None:
            self._events.add(piece.events, partial(self._added, piece))

    def _added(self, piece: _Piece, trouble: BaseException | None) -> None:
        if trouble is not None:
            self._have_trouble(piece.batch, trouble)
            if self._stopped:
                self._held = None  # the next start gives them again
            return
        self._held = None
        # Also when the store is about to stop: it waits for what is under way.
        self._append(piece)
        self._go_on()

    def _append(self, piece: _Piece) -> None:
        batch = piece.batch
        end = None
        if batch.is_read or piece.events:
            # No entry of the events says it.
            end = Producer(batch.producer.encode(), batch.number, 0, batch.progress)
        self._appender.append_parts(piece.parts, end, lambda: self._committed(batch))

    def _committed(self, batch: _Batch) -> None:
        batch.pieces -= 1
        self._finish_if_done(batch)
        self._go_on()

    def _finish_if_done(self, batch: _Batch) -> None:
        if not batch.is_read or batch.pieces:
            return
        self._batches.remove(batch)
        self._appended.append((self._appender.last_sequence, batch.files))
        asked = batch.asked
        for answer in batch.take_waiters():
            if answer is asked:
                answer(BatchAnswer(False, batch.records, batch.damaged))
            else:
                answer(BatchAnswer(duplicate=True, records=0))


def _read(
    layout: Layout, files: list[StagedFile], progress: Progress, bytes_max: int
) -> list[_Found]:
    """Blocks from `progress` on, over the ends of files, until they are many enough. For a thread."""
    found: list[_Found] = []
    number, position = progress.file, progress.position
    taken = 0
    while taken < bytes_max and number < len(files):
        file = files[number]
        path = layout.staged_file(file.id.hex())
        blocks = read_staged(path, position, file.size, bytes_max - taken)
        if any(isinstance(what, Damaged) for what, _ in blocks):
            quarantine_file(layout, path)
        for what, end in blocks:
            at = Progress(number, end) if end < file.size else Progress(number + 1)
            found.append(_Found(what, file, at))
        taken += blocks[-1].next - position
        position = blocks[-1].next
        if position >= file.size:
            number, position = number + 1, 0
    return found
