"""Batches: staged files that are appended exactly once, in the order their producer named them.

Theory of operation. A batch is *decided* by an entry of the journal that names its producer, its number and
its staged files. From then on it is appended, whatever happens, one batch after another: pieces of it are
read in a thread and given to the commit that gathers, two at a time at most, so that others need not wait.
Each entry made of a batch says how far the batch is appended with it, so both are true or neither.

    asked ──decision committed──▶ being appended ──last entry committed──▶ answered ──applied──▶ files deleted

Events of Logux are not appended here: whoever knows their ids stores those that are new. The rest of a piece
waits until they are durable, and only then is it said how far the batch has come. After a crash they are
given once more, which their ids make harmless. It is the same with messages for channels, which whoever
stores them knows again by their place in the batch.

What a channel would refuse must not be decided: a batch with messages is looked through before, and those who
ask meanwhile are decided behind it.

A number that was decided before is a duplicate; one that was passed over is refused. What is not here: staged
files (`staging.py`), their blocks (`blocks.py`), entries (`commit.py`), what the applier does with them.
"""

import contextlib
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from headrace.errors import BatchNumberError, StoreFailedError
from headrace.log.batch_parts import (
    Answer,
    Appender,
    BatchAnswer,
    BatchRefusedError,
    Decision,
    Events,
    Messages,
    Part,
)
from headrace.log.blocks import Block, Damaged, read_staged
from headrace.log.catalogue import BATCHES_NAME, Catalogue
from headrace.log.entries import RECENT_MAX, Producer, Progress, Recent, StagedFile, StagedFiles
from headrace.log.layout import Layout
from headrace.log.quarantine import quarantine_file
from headrace.log.runner import Runner
from headrace.log.staging import Staging
from headrace.printing import quoted

logger = logging.getLogger(__name__)

BATCH_FILES_MAX = 100_000
"""Staged files that one batch may name."""

PRODUCER_BYTES_MAX = 255

_PIECES_MAX = 2
"""Pieces of a batch that are given to commits and not committed: one is written while one gathers."""


class _Batch:
    def __init__(self, decision: Decision, progress: Progress) -> None:
        self.producer, self.number, self.files = decision
        self.checking = False
        self.checked = False
        """Whether it may be decided."""
        self.given = False
        """Whether its decision was given to a commit."""
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
    messages: list[Part]
    parts: list[Part]
    """The others: they wait for the events and messages."""

    @property
    def is_plain(self) -> bool:
        return not (self.events or self.messages)


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
        self._messages: Messages | None = None
        self._held: _Piece | None = None
        """The piece whose events and messages are not durable yet."""
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
            batch.checked = batch.given = batch.decided = True
            staging.restore_claims(files)
            self._batches.append(batch)
        if self._batches:
            logger.info("going on with %d batches", len(self._batches))
            runner.soon(self._go_on)

    @property
    def is_busy(self) -> bool:
        """Whether anything will be given to commits without being asked for."""
        is_adding = self._held is not None and self._can_add(self._held)
        return is_adding or (bool(self._batches) and not self._stopped)

    @property
    def pending(self) -> int:
        return len(self._batches)

    def take_events(self, events: Events) -> None:
        """From now on there is someone to store events; batches that have any have waited for it."""
        self._events = events
        if self._held is not None and self._held.events:
            self._add(self._held)

    def take_messages(self, messages: Messages) -> None:
        """The same for messages of channels."""
        self._messages = messages
        if self._held is not None and self._held.messages:
            self._add(self._held)
        self._check_all()

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
        batch.checked = not self._staging.may_have_messages(decision.files)
        self._batches.append(batch)
        if batch.checked:
            self._decide_checked()
        else:
            self._look(batch)

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
            self._check_all()
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

    def _look(self, batch: _Batch) -> None:
        """Whether it has messages: of uploads from before the start nobody knows."""
        batch.checking = True
        blocks = partial(_messages, self._layout, batch.files, self._piece_bytes)
        self._runner.background(
            lambda: next(blocks(), None) is not None, partial(self._looked, batch)
        )

    def _looked(self, batch: _Batch, has_messages: bool | BaseException) -> None:
        if isinstance(has_messages, BaseException) or not has_messages:
            self._have_checked(batch, has_messages or None)
            return
        if self._messages is None:
            batch.checking = False
            return
        blocks = partial(_messages, self._layout, batch.files, self._piece_bytes)
        self._messages.check(blocks, partial(self._have_checked, batch))

    def _check_all(self) -> None:
        """Those that could not be checked before."""
        for batch in self._batches:
            if not (batch.checked or batch.checking):
                self._look(batch)

    def _have_checked(self, batch: _Batch, trouble: BaseException | None) -> None:
        batch.checking = False
        if self._stopped:
            return
        with contextlib.suppress(StoreFailedError):  # then nobody is answered
            if isinstance(trouble, BatchRefusedError):
                self._refuse(batch, trouble)
            elif trouble is not None:
                self._have_trouble(batch, trouble)
            else:
                batch.checked = True
                self._decide_checked()

    def _refuse(self, batch: _Batch, reason: BatchRefusedError) -> None:
        self._batches.remove(batch)
        self._staging.release(batch.files)
        for answer in batch.take_waiters():
            answer(reason)
        self._decide_checked()
        self._go_on()

    def _decide_checked(self) -> None:
        """In the order in which they were asked for."""
        for batch in self._batches:
            if not batch.checked:
                return
            if not batch.given:
                batch.given = True
                decision = Decision(batch.producer, batch.number, batch.files)
                self._appender.decide(decision, partial(self._decided, batch))

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
        piece = _Piece(batch, [], [], [])
        for what, file, progress in found:
            if isinstance(what, Damaged):
                self.damage_count += 1
                batch.damaged += 1
                logger.error(
                    "batch %d of producer %s: damage: staged file %s: %s: its records are lost",
                    *(batch.number, quoted(batch.producer), file.id.hex(), what.reason),
                )
                continue
            batch.records += what.record_count
            part = Part(what, batch.producer, batch.number, progress)
            if what.has_events:
                piece.events.append(what)
            elif what.has_messages:
                piece.messages.append(part)
            else:
                piece.parts.append(part)
        batch.progress = found[-1].progress
        if piece.parts or not piece.is_plain or batch.is_read:
            batch.pieces += 1
            if piece.is_plain:
                self._append(piece)
            else:
                self._held = piece
                self._add(piece)
        self._go_on()

    def _have_trouble(self, batch: _Batch, trouble: BaseException) -> None:
        known = (batch.number, quoted(batch.producer), trouble)
        logger.error("batch %d of producer %s cannot be read for now: %s", *known)
        self._troubled = True

    def _can_add(self, piece: _Piece) -> bool:
        """Whether those are there who store what it has."""
        has_events = not piece.events or self._events is not None
        return has_events and (not piece.messages or self._messages is not None)

    def _add(self, piece: _Piece) -> None:
        if not self._can_add(piece):
            return
        if piece.events and self._events is not None:
            self._events.add(piece.events, partial(self._added_events, piece))
        else:
            self._added_events(piece, None)

    def _added_events(self, piece: _Piece, trouble: BaseException | None) -> None:
        if trouble is None and piece.messages and self._messages is not None:
            first = piece.batch.files[0].id
            self._messages.add(first, piece.messages, partial(self._added, piece))
        else:
            self._added(piece, trouble)

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
        if batch.is_read or not piece.is_plain:
            # No entry of the events and messages says it.
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


def _messages(layout: Layout, files: list[StagedFile], bytes_max: int) -> Iterator[Block]:
    """The blocks for channels, in their order; what is damaged is told when it is appended. For a thread."""
    for file in files:
        path, position = layout.staged_file(file.id.hex()), 0
        while position < file.size:
            blocks = read_staged(path, position, file.size, bytes_max)
            yield from (what for what, _ in blocks if isinstance(what, Block) and what.has_messages)
            position = blocks[-1].next


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
