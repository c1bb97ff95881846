"""Batches: staged files that are appended exactly once, in the order their producer named them.

Theory of operation. A batch is *decided* by a journal entry that names its producer, its number and its
staged files. A decided batch is always appended, whatever happens, one batch after another. A thread reads
pieces of the batch, and the pieces join the commit that gathers. At most two pieces are pending, so that
other requests need not wait. Each entry of a batch records the batch's progress including this entry, so that
the records and the progress are committed together or not at all.

    asked ──decision committed──▶ being appended ──last entry committed──▶ answered ──applied──▶ files deleted

Topics under some prefixes have an *owner*, which stores their records and recognises duplicates. The other
records of a piece wait until the owned records are durable, and only then the batch's progress is recorded.
After a crash the owner gets the records again, and stores none of them twice.

A batch that an owner would refuse must not be decided, so owners check it first. Before that, the caller may
refuse its topics (`Judge`). Later requests wait and are decided after it.

A number that was decided before is a duplicate; a number that was skipped is refused. Elsewhere: staged
files (`staging.py`), their blocks (`blocks.py`), entries (`log/commit/`), and applying them (`log/apply/`).
"""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from headrace.errors import BatchNumberError, StoreFailedError
from headrace.log.batch.blocks import Damaged, prefix_of, read_staged
from headrace.log.batch.staging import Staging
from headrace.log.catalogue.catalogue import BATCHES_NAME, Catalogue
from headrace.log.commit.closed import ClosedTopics
from headrace.log.commit.commit import Decision
from headrace.log.commit.journal import RECENT_MAX, Producer, Recent, StagedFile, StagedFiles
from headrace.log.layout import Layout
from headrace.log.recovery.frames import quarantine_file
from headrace.log.store import (
    BatchAnswer,
    BatchPart,
    BatchRefusedError,
    Block,
    Progress,
    Runner,
    TopicOwner,
)
from headrace.model import closed_reason
from headrace.printing import quoted

if TYPE_CHECKING:
    from headrace.log.embedded import EmbeddedStore

Answer = Callable[[BatchAnswer | BatchRefusedError | None], None]
"""Called with None if the store stops before the answer: the caller must repeat the request later."""

Judge = Callable[[Collection[str]], BatchRefusedError | None]
"""Function of a batch's topics that returns the reason why the batch is not decided; None if it is."""

logger = logging.getLogger(__name__)

TOPICS_MAX = 1_000_000
"""Topics of one batch. They are in memory together while the caller decides about them."""

_PIECES_MAX = 2
"""Largest number of uncommitted pieces of a batch: one is written while one gathers."""


class _Batch:
    def __init__(self, decision: Decision, progress: Progress) -> None:
        self.decision = decision
        self.producer, self.number, self.files = decision
        self.judge: Judge | None = None
        """Called once the topics are known; None afterwards."""
        self.over: Callable[[], None] = lambda: None
        self.prefixes: frozenset[str] | None = None
        """Prefixes of the owners of its topics; None until they are known."""
        self.checking = False
        self.checked = False
        """True if the batch may be decided."""
        self.given = False
        """True once a commit has the batch's decision."""
        self.decided = False
        self.progress = progress
        """End of the part that was read and given to commits."""
        self.pieces = 0
        """Number of pieces that are given to commits and not committed."""
        self.records = self.damaged = 0
        self.asked: Answer | None = None
        """Callback of the first request since the server's start."""
        self.waiters: list[Answer] = []
        """Callbacks of repeated requests."""

    @property
    def is_read(self) -> bool:
        return self.progress.file == len(self.files)

    def take_waiters(self) -> list[Answer]:
        """Return and clear the callbacks, so that each is called once."""
        waiters = [self.asked, *self.waiters] if self.asked is not None else self.waiters
        self.asked, self.waiters = None, []
        return waiters


class _Piece(NamedTuple):
    """The part of a batch that one read returned."""

    batch: _Batch
    owned: dict[str, list[BatchPart]]
    """Parts that owners store, by the owner's prefix."""
    parts: list[BatchPart]
    """The other parts: they wait until the owners have stored theirs."""


class _Found(NamedTuple):
    what: Block | Damaged
    file: StagedFile
    progress: Progress


class Batches:
    """All batches that are not completely appended. Called from the loop only."""

    def __init__(
        self,
        catalogue: Catalogue,
        layout: Layout,
        runner: Runner,
        staging: Staging,
        store: "EmbeddedStore",
        closed: ClosedTopics,
        *,
        prefixes: Sequence[str],
        piece_bytes: int,
    ) -> None:
        self._catalogue = catalogue
        self._layout = layout
        self._runner = runner
        self._staging = staging
        self._store = store
        self._closed = closed
        self._piece_bytes = piece_bytes
        self._batches: deque[_Batch] = deque()
        """Batches in the order of their requests, which is the order of their decisions."""
        self._unapplied: deque[tuple[int, str, int]] = deque()
        """Commit, producer and number of each decided batch that the catalogue does not have yet."""
        self._appended: deque[tuple[int, StagedFiles]] = deque()
        """Files of completely appended batches, until the last commit of the batch is applied."""
        self._reading = False
        self._prefixes = prefixes
        self._owners: dict[str, TopicOwner] = {}
        self._held: _Piece | None = None
        """The piece whose owned records are not durable yet."""
        self._stopped = False
        self._retrying = False
        """True if a batch waits for a reason that may pass: the next tick retries."""
        self.damage_count = 0
        """Number of blocks and files that could not be read when their batch was appended."""
        for row in sorted(catalogue.batches(), key=lambda row: (row.ms, row.number)):
            files = msgspec.msgpack.decode(row.staged, type=StagedFiles)
            decision = Decision(row.producer.decode(), row.number, files)
            batch = _Batch(decision, Progress(row.file, row.position))
            batch.checked = batch.given = batch.decided = True
            staging.restore_claims(files)
            self._batches.append(batch)
        if self._batches:
            logger.info("resuming %d batches", len(self._batches))
            runner.soon(self._read_next)

    @property
    def is_busy(self) -> bool:
        """True if batches will add to commits without a new request."""
        is_adding = self._held is not None and self._can_add(self._held)
        return is_adding or (bool(self._batches) and not self._stopped)

    @property
    def pending(self) -> int:
        return len(self._batches)

    def take_over(self, prefix: str, owner: TopicOwner) -> None:
        """Register the owner of a prefix, and resume batches with records of its topics."""
        self._owners[prefix] = owner
        if self._held is not None and prefix in self._held.owned:
            self._add(self._held)
        self._check_all()

    def decide(
        self,
        producer: str,
        number: int,
        staged: Sequence[str],
        answer: Answer,
        judge: Judge = lambda topics: None,
        over: Callable[[], None] = lambda: None,
    ) -> None:
        """Append the staged files' records, unless this number was decided before.

        Raises UnknownStagedError, StagedClaimedError, BatchNumberError, or what `judge` returns; then nothing
        is decided. The same holds for a batch with records for a closed topic. If the topics must be read
        from the files, `answer` gets the refusal later. `over` is called when a batch that `judge`
        has let pass is appended, or refused after all.
        """
        if self._stopped:
            self._runner.soon(lambda: answer(None))
            return
        for batch in self._batches:
            if (batch.producer, batch.number) == (producer, number):
                # The first request is pending: both are answered at the same time. The batch does not list
                # its empty files.
                files = {file.id.hex() for file in batch.files}
                if batch.asked is None and files <= set(staged):
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
        batch.asked, batch.judge, batch.over = answer, judge, over
        topics = self._staging.topics(decision.files)
        if topics is not None and (refused := self._judge(batch, topics)):
            self._staging.release(decision.files)
            raise refused
        batch.checked = batch.prefixes == frozenset()
        self._batches.append(batch)
        if batch.checked:
            self._decide_checked()
        else:
            self._check(batch)

    def withdraw(self, answer: Answer) -> None:
        """Remove the callback of a caller that was told to retry."""
        for batch in self._batches:
            if batch.asked is answer:
                batch.asked = None
            elif answer in batch.waiters:
                batch.waiters.remove(answer)

    def tick(self) -> None:
        """Retry after an error. Called several times a second."""
        if self._retrying:
            self._retrying = False
            self._check_all()
            if self._held is not None:
                self._add(self._held)
            else:
                self._read_next()

    def applied(self, sequence: int) -> None:
        """Forget numbers and files of commits up to `sequence`.

        The catalogue holds these commits now, and the files that it no longer names are deleted.
        """
        while self._unapplied and self._unapplied[0][0] <= sequence:
            self._unapplied.popleft()
        while self._appended and self._appended[0][0] <= sequence:
            self._staging.forget(self._appended.popleft()[1])

    def stop(self) -> None:
        """Start no more work: the next start of the server continues with decided batches."""
        self._stopped = True
        if self._retrying:
            self._held = None
        for batch in self._batches:
            for answer in batch.take_waiters():
                self._runner.soon(partial(answer, None))

    def _was_decided(self, producer: str, number: int) -> bool:
        """True if the number was decided before; raise BatchNumberError for a number that was skipped."""
        row = self._catalogue.producer(BATCHES_NAME, producer.encode())
        known = msgspec.msgpack.decode(row.recent, type=Recent) if row is not None else []
        knows_all = len(known) < RECENT_MAX
        numbers = {one for one, _ in known}
        numbers |= {one for _, name, one in self._unapplied if name == producer}
        numbers |= {batch.number for batch in self._batches if batch.producer == producer}
        last = max(numbers, default=-1)
        if number > last:
            return False
        if number not in numbers and (knows_all or number > min(numbers)):
            raise BatchNumberError(
                f"batch {number} of producer {producer!r} was never written, but batch {last} was: the "
                "numbers of a producer must grow; use another producer for this batch"
            )
        return True

    def _check(self, batch: _Batch) -> None:
        batch.checking = True
        if batch.prefixes is not None:
            self._ask_owners(batch, iter(sorted(batch.prefixes)))
            return
        blocks = self._blocks(batch, ("",))
        self._runner.background(partial(_topics_of, blocks), partial(self._found_topics, batch))

    def _found_topics(self, batch: _Batch, found: frozenset[str] | BaseException) -> None:
        if isinstance(found, BaseException):
            self._was_checked(batch, found)
        elif refused := self._judge(batch, found):
            self._was_checked(batch, refused)
        else:
            assert batch.prefixes is not None
            self._ask_owners(batch, iter(sorted(batch.prefixes)))

    def _judge(self, batch: _Batch, topics: frozenset[str]) -> BatchRefusedError | None:
        """Note the owners of a batch's topics. Return the reason why the batch is not decided, if any."""
        judge, batch.judge = batch.judge, None
        found = {prefix_of(topic, self._prefixes) for topic in topics}
        batch.prefixes = frozenset(prefix for prefix in found if prefix is not None)
        refused = judge(topics) if judge is not None else None
        if refused is None and (name := self._closed.first(topics, self._store.look)):
            refused = BatchRefusedError(closed_reason(name))
            over, batch.over = batch.over, lambda: None
            over()
        return refused

    def _ask_owners(
        self, batch: _Batch, prefixes: Iterator[str], error: BaseException | None = None
    ) -> None:
        """Ask one owner after another whether it would store its part of a batch."""
        prefix = next(prefixes, None) if error is None else None
        if prefix is None:
            self._was_checked(batch, error)
        elif prefix not in self._owners:
            batch.checking = False  # until this owner is registered
        else:
            blocks = self._blocks(batch, (prefix,))
            self._owners[prefix].check(blocks, partial(self._ask_owners, batch, prefixes))

    def _blocks(self, batch: _Batch, prefixes: Sequence[str]) -> Callable[[], Iterator[Block]]:
        """Return a function that reads the blocks of topics under some prefixes, for a thread."""
        return partial(_blocks_under, prefixes, self._layout, batch.files, self._piece_bytes)

    def _check_all(self) -> None:
        """Check batches that could not be checked before."""
        for batch in self._batches:
            if not (batch.checked or batch.checking):
                self._check(batch)

    def _was_checked(self, batch: _Batch, error: BaseException | None) -> None:
        batch.checking = False
        if self._stopped:
            return
        with contextlib.suppress(StoreFailedError):  # then no caller is answered
            if isinstance(error, BatchRefusedError):
                self._refuse(batch, error)
            elif error is not None:
                self._retry_later(batch, error)
            else:
                batch.checked = True
                self._decide_checked()

    def _refuse(self, batch: _Batch, reason: BatchRefusedError) -> None:
        self._batches.remove(batch)
        self._staging.release(batch.files)
        batch.over()
        for answer in batch.take_waiters():
            answer(reason)
        self._decide_checked()
        self._read_next()

    def _decide_checked(self) -> None:
        """Commit the decisions of checked batches, in the order of their requests."""
        for batch in self._batches:
            if not batch.checked:
                return
            if not batch.given:
                batch.given = True
                self._store.decide(batch.decision, partial(self._decided, batch))

    def _decided(self, batch: _Batch) -> None:
        batch.decided = True
        self._unapplied.append((self._store.last_sequence, batch.producer, batch.number))
        self._finish_if_done(batch)  # it is done if it has no records
        self._read_next()

    def _read_next(self) -> None:
        """Read the next piece of the first batch, unless enough of its pieces are pending."""
        if self._reading or self._held or self._stopped or self._retrying or not self._batches:
            return
        batch = self._batches[0]
        if not batch.decided or batch.is_read or batch.pieces >= _PIECES_MAX:
            return
        self._reading = True
        self._runner.background(
            partial(_read, self._layout, batch.files, batch.progress, self._piece_bytes),
            partial(self._was_read, batch),
        )

    def _was_read(self, batch: _Batch, found: list[_Found] | BaseException) -> None:
        self._reading = False
        if self._stopped:
            return
        if isinstance(found, BaseException):
            self._retry_later(batch, found)
            return
        piece = _Piece(batch, {}, [])
        for what, file, progress in found:
            if isinstance(what, Damaged):
                self.damage_count += 1
                batch.damaged += 1
                logger.error(
                    "batch %d of producer %s: damage: staged file %s: %s: its records are lost",
                    batch.number,
                    quoted(batch.producer),
                    file.id.hex(),
                    what.reason,
                )
                continue
            batch.records += what.record_count
            part = BatchPart(what, batch.producer, batch.number, progress)
            prefix = prefix_of(what.topic, self._prefixes)
            if prefix is None:
                piece.parts.append(part)
            else:
                piece.owned.setdefault(prefix, []).append(part)
        batch.progress = found[-1].progress
        if piece.parts or piece.owned or batch.is_read:
            batch.pieces += 1
            if piece.owned:
                self._held = piece
                self._add(piece)
            else:
                self._append(piece)
        self._read_next()

    def _retry_later(self, batch: _Batch, error: BaseException) -> None:
        name = quoted(batch.producer)
        logger.error("batch %d of producer %s waits and is retried: %s", batch.number, name, error)
        self._retrying = True

    def _can_add(self, piece: _Piece) -> bool:
        """True once all owners of the piece's records are registered."""
        return piece.owned.keys() <= self._owners.keys()

    def _add(self, piece: _Piece) -> None:
        if self._can_add(piece):
            self._add_next(piece, iter(piece.owned.items()))

    def _add_next(
        self,
        piece: _Piece,
        owned: Iterator[tuple[str, list[BatchPart]]],
        error: BaseException | None = None,
    ) -> None:
        """Give each owner its records, one owner after another, then continue with the batch."""
        if error is not None:
            self._retry_later(piece.batch, error)
            if self._stopped:
                self._held = None  # the owners get the records again after the next start
            return
        prefix, parts = next(owned, ("", []))
        if prefix:
            first = piece.batch.files[0].id
            self._owners[prefix].add(first, parts, partial(self._add_next, piece, owned))
            return
        self._held = None
        # The piece is appended even if the store is stopping: the store waits for pending work.
        self._append(piece)
        self._read_next()

    def _append(self, piece: _Piece) -> None:
        batch = piece.batch
        end = None
        if batch.is_read or piece.owned:
            # The owned records have no entry that records the batch's progress.
            end = Producer(batch.producer.encode(), batch.number, progress=batch.progress)
        parts = piece.parts
        if self._closed.may_exist:
            parts = [part for part in parts if self._is_open(batch, part.block)]
        self._store.append_parts(parts, end, lambda: self._committed(batch))

    def _is_open(self, batch: _Batch, block: Block) -> bool:
        """Return True unless the block's topic was closed after the batch had been decided."""
        name = self._closed.first((block.topic,), self._store.look)
        if name:
            batch.records -= block.record_count
            batch.damaged += 1
            logger.error(
                "batch %d of producer %s: %d records are not appended: %s",
                batch.number,
                quoted(batch.producer),
                block.record_count,
                closed_reason(name),
            )
        return not name

    def _committed(self, batch: _Batch) -> None:
        batch.pieces -= 1
        self._finish_if_done(batch)
        self._read_next()

    def _finish_if_done(self, batch: _Batch) -> None:
        if not batch.is_read or batch.pieces:
            return
        self._batches.remove(batch)
        self._appended.append((self._store.last_sequence, batch.files))
        batch.over()
        asked = batch.asked
        for answer in batch.take_waiters():
            if answer is asked:
                answer(BatchAnswer(False, batch.records, batch.damaged))
            else:
                answer(BatchAnswer(duplicate=True, records=0))


def _blocks_under(
    prefixes: Sequence[str], layout: Layout, files: list[StagedFile], bytes_max: int
) -> Iterator[Block]:
    """Yield the blocks of topics under some prefixes, in order. Damage is reported later, on appending."""
    for file in files:
        path, position = layout.staged_file(file.id.hex()), 0
        while position < file.size:
            blocks = read_staged(path, position, file.size, bytes_max)
            for what, _ in blocks:
                if isinstance(what, Block) and prefix_of(what.topic, prefixes) is not None:
                    yield what
            position = blocks[-1].next


def _topics_of(blocks: Callable[[], Iterator[Block]]) -> frozenset[str] | BatchRefusedError:
    """Return the topics of a batch, which has any number of blocks, unless they are too many."""
    found: set[str] = set()
    for one in blocks():
        found.add(one.topic)
        if len(found) > TOPICS_MAX:
            text = (
                f"a batch may have {TOPICS_MAX} topics: use several batches; its uploads are kept"
            )
            return BatchRefusedError(text)
    return frozenset(found)


def _read(
    layout: Layout, files: list[StagedFile], progress: Progress, bytes_max: int
) -> list[_Found]:
    """Return blocks from `progress` on, across files, until they reach `bytes_max`. Runs in a thread."""
    found: list[_Found] = []
    taken = 0
    while taken < bytes_max and progress.file < len(files):
        number, begin = progress.file, progress.position
        file = files[number]
        path = layout.staged_file(file.id.hex())
        blocks = read_staged(path, begin, file.size, bytes_max - taken)
        if any(isinstance(what, Damaged) for what, _ in blocks):
            quarantine_file(layout, path)
        for what, end in blocks:
            progress = Progress(number, end) if end < file.size else Progress(number + 1)
            found.append(_Found(what, file, progress))
        taken += blocks[-1].next - begin
    return found
