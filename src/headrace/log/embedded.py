"""The embedded store: topics in one data directory of this machine, through a journal.

Theory of operation. `append` gathers records in a commit. The runner's thread writes one commit at a time, as
one frame of the journal; meanwhile the next commit gathers. When the write returns, the records become
visible: topics' ends move, entries join their topics' tails, and the listener and the waiters are called.
A journal file that is full or old goes to the applier. When the file is applied, tails drop the entries that
segments now hold. Reads take records from the tail if they are there, and from segments otherwise.

    gathering ──begin──▶ encoded ──file has room──▶ being written ──▶ committed ──▶ applied
                            │                             └─ disk full: held back, the same bytes again
                            └─ no free file, or it cannot be opened: held back until one can be

Elsewhere: waiting commits, their entries, and tables of topics, cursors, notes and producers (`log/commit/`),
reads (`log/read/`), batches (`log/batch/`), applying (`log/apply/`), and the start of a store
(`log/recovery/`).
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from headrace.config.settings import Config
from headrace.errors import StoreFailedError
from headrace.log.batch.batches import Batches
from headrace.log.batch.blocks import Checks
from headrace.log.batch.staging import Staging
from headrace.log.catalogue.catalogue import Catalogue
from headrace.log.commit.closed import ClosedTopics
from headrace.log.commit.commit import (
    Change,
    CursorChange,
    Decision,
    Encoded,
    Encoder,
    NumberedAppend,
    Write,
)
from headrace.log.commit.journal import ClosedFile, Producer, Ring
from headrace.log.commit.queue import Gathering, note_bytes_max
from headrace.log.commit.tables import Cursors, Handles, Notes, Producers
from headrace.log.disk import DISK_FULL, Disk, explained, is_full
from headrace.log.layout import Layout
from headrace.log.quota import Quotas, TopicCounts
from headrace.log.read.reader import ReadSide, drop_tail, empty, read_tail, tail_start
from headrace.log.read.segment import Segments
from headrace.log.store import (
    CURSORS_SET_MAX,
    BatchPart,
    Clocks,
    CommitFacts,
    Listener,
    Note,
    Runner,
    StoredAppend,
    Topic,
)
from headrace.model import Durability, Position

logger = logging.getLogger(__name__)

_TAILS_DROPPED_AT_ONCE = 500
_NOTES_DROPPED_AT_ONCE = 5000
_NOTE_BYTES_MAX = (1 << 20) + (1 << 12)
"""Size limit of a note: 1 MiB plus its key and a few fields. A note is always read and written whole."""
_PIECE_COMMITS = 4
"""Length of a piece of a batch, in full commits. Longer pieces cost less but delay other commits."""


class EmbeddedStore(ReadSide):
    """Implementation of `store.Store`. Recovery has run before. The applier writes the segments read here."""

    listener: Listener

    def __init__(
        self,
        config: Config,
        layout: Layout,
        disk: Disk,
        runner: Runner,
        apply: Callable[[ClosedFile], None],
        *,
        next_sequence: int,
        generation: int,
        boot_id: bytes,
        clocks: Clocks,
        upload_checks: Checks,
        wait_for_disk: bool = True,
    ) -> None:
        self._config = config
        self._runner = runner
        self._apply = apply
        self._clocks = clocks
        files = Segments(layout, config.segment.open_files_max, wait_for_disk=wait_for_disk)
        super().__init__(Catalogue.open_for_reading(layout.root), files)
        self._ring = Ring(disk, config.journal.file_bytes, generation, boot_id, clocks.elapsed_s)
        self._producers = Producers(self._catalogue)
        self._cursors = Cursors(self._catalogue)
        # Several commits must fit into a file, whatever the settings say.
        size_max = config.journal.file_bytes // 4
        commit_bytes_max = min(config.journal.commit_bytes_max, size_max)
        self._encoder = Encoder(self._catalogue.meta().next_topic_id, generation, commit_bytes_max)
        # A commit with one long note may exceed the usual limit of a commit.
        self.note_bytes_max = min(_NOTE_BYTES_MAX, note_bytes_max(size_max))
        notes = self._notes = Notes(self._catalogue, self.note_bytes_max)
        closed = self._closed = ClosedTopics(notes)
        handles = self._handles = Handles(self._catalogue, config.rule, closed.has)
        # The tables answer these requests themselves.
        self.topic, self.look, self.topics = handles.get, handles.look, handles.list
        self.forget, self.closed = handles.drop, partial(closed.first, look=handles.look)
        self.note, self.notes, self.due_notes = notes.get, notes.listed, notes.due
        self.cursors = self._cursors.list
        self.quotas = Quotas()
        self._set_quotas()
        counts = self._topic_counts = TopicCounts(self._catalogue.count)
        self.count_topics = counts.of
        self.last_sequence = self._synced = self._applied = next_sequence - 1
        self._gathering = Gathering(commit_bytes_max, clocks.elapsed_s)
        self.on_commit: Callable[[CommitFacts], None] = lambda facts: None
        """Called once per commit, after its waiters and the listener."""
        self.on_flush: Callable[[float], None] = lambda seconds: None
        """Called with the duration of a flush that belongs to no commit."""
        self._encoded: Encoded | None = None
        self._writing: Write | None = None
        self._unwritten = False
        """True if the disk had no room for `_writing`."""
        self.is_full = False
        """True after a commit found no room on the disk, until a commit is written."""
        self._begin_soon = False
        self._applying: dict[Path, int] = {}
        self._trouble = ""
        self._unopened = ""
        """The reason why the next journal file cannot be opened; empty unless that was tried."""
        self._failure = ""
        self._idle_waiters: list[Callable[[], None]] = []
        # This is far above any number that an earlier process can have reached.
        self.version = clocks.now_ms() * 1_000_000
        self._watchers: list[Callable[[], None]] = []
        self.staging = Staging(layout, disk, runner, config.limits, upload_checks, clocks)
        self.batches = Batches(
            self._catalogue,
            layout,
            runner,
            self.staging,
            self,
            closed,
            prefixes=tuple(upload_checks),
            piece_bytes=min(_PIECE_COMMITS * commit_bytes_max, size_max),
        )

    def watch(self, changed: Callable[[], None]) -> None:
        self._watchers.append(changed)

    def _is_pending(self, topic: Topic) -> bool:
        writing = self._writing.encoded if self._writing is not None else None
        commits = [one.commit for one in (self._encoded, writing) if one is not None]
        return self._gathering.mentions(topic) or any(one.mentions(topic) for one in commits)

    # Appending

    @property
    def pending_bytes(self) -> int:
        return self._gathering.pending_bytes

    @property
    def journal_files_waiting(self) -> int:
        """Number of closed journal files that the applier has not moved to segments yet."""
        return len(self._applying)

    @property
    def held_back(self) -> str:
        if self._failure:
            return self._failure
        if self.is_full:
            return DISK_FULL
        if self._encoded is not None:
            if self._unopened:
                return self._unopened
            return self._trouble or "the journal is full until the applier has caught up"
        return ""

    def exists(self, name: str) -> bool:
        topic = self.look(name)
        return topic.exists or self._is_pending(topic)

    def append(self, batches: dict[Topic, list[bytes]], done: Callable[[], None]) -> None:
        self._closed.refuse(batches)
        gathering = self._next_commit()
        if self.quotas.meters:
            for topic, records in batches.items():
                self.quotas.appending(topic.name, records)
        gathering.append(batches, done)

    def append_once(
        self,
        topic: Topic,
        records: list[bytes],
        producer: str,
        number: int,
        done: Callable[[StoredAppend], None],
    ) -> None:
        self._closed.refuse((topic,))
        once = NumberedAppend(topic, records, producer, number)
        # If a first attempt is pending, both are answered at the same time.
        if not self._producers.is_waiting(once):
            known = self._producers.known(once)
            if known is not None:
                self._runner.soon(partial(done, known))
                return
            self._next_commit().append_once(once)
            self.quotas.appending(topic.name, records)
        self._producers.wait(once, done)

    # Requests of batches

    def decide(self, decision: Decision, done: Callable[[], None]) -> None:
        self._next_commit().decide(decision, done)

    def append_parts(
        self, parts: list[BatchPart], end: Producer | None, done: Callable[[], None]
    ) -> None:
        """Append blocks in order; record `end` after them unless an entry of theirs already does."""
        if not self._failure:
            topics = [(self._handles.get(part.block.topic), part) for part in parts]
            self._next_commit().append_parts(topics, end, done)
            for topic, part in topics:
                self.quotas.appending(topic.name, (part.block.data,))

    def trim(self, topic: Topic, position: Position, done: Callable[[], None]) -> None:
        assert topic.exists and position.offset <= topic.end_offset
        self._next_commit().trim(topic, position, done)

    def destroy(self, topic: Topic, done: Callable[[], None]) -> None:
        assert topic.exists
        if topic.is_closed:
            self.change(topic, destroy=True, done=done)  # the next life is open
        else:
            self._next_commit().destroy(topic, done)

    # Notes

    def change(
        self,
        topic: Topic,
        *,
        records: Sequence[bytes] = (),
        notes: Sequence[Note] = (),
        trim: Position | None = None,
        create_above: int | None = None,
        close: bool = False,
        destroy: bool = False,
        done: Callable[[], None],
        ends_at: Callable[[Position], None] | None = None,
    ) -> None:
        if records:
            self._closed.refuse((topic,))
        assert topic.durability is not Durability.MEMORY
        # The first records of a topic may still wait for their commit when the topic is destroyed.
        assert topic.exists or not destroy or self._is_pending(topic)
        assert trim is None or (topic.exists and trim.offset <= topic.end_offset)
        is_made = topic.exists or create_above is not None or bool(records)
        assert is_made or not close or self._is_pending(topic)
        gathering = self._next_commit()
        if close or destroy:
            notes = self._closed.changed(topic, notes, close=close, destroy=destroy)
        self._notes.put(notes)
        self.quotas.appending(topic.name, records)
        change = Change(topic, list(records), notes, trim, create_above, close, destroy, ends_at)
        gathering.change(change, done)

    # Cursors

    def set_cursors(
        self, reader: str, positions: Mapping[str, Position], done: Callable[[], None]
    ) -> None:
        self._cursors.check(reader, positions, self._handles.look)
        self._change_cursors(reader, positions, done)

    def drop_cursors(self, reader: str, topics: Collection[str], done: Callable[[], None]) -> None:
        self._change_cursors(reader, dict.fromkeys(topics), done)

    def _change_cursors(
        self, reader: str, positions: Mapping[str, Position | None], done: Callable[[], None]
    ) -> None:
        assert len(positions) <= CURSORS_SET_MAX
        changes = [CursorChange(name, reader, at) for name, at in positions.items()]
        self._next_commit().change_cursors(changes, done)

    # Committing

    def _next_commit(self) -> Gathering:
        """Return the place for one more request, and see to it that it is committed soon."""
        if self._failure:
            raise StoreFailedError(self._failure)
        self._begin_later()
        return self._gathering

    def _begin_later(self) -> None:
        if not self._begin_soon:
            self._begin_soon = True
            self._runner.soon(self._begin)

    def _begin(self) -> None:
        """Start the next commit if there is one, the last one is done, and the journal has room."""
        self._begin_soon = False
        self._commit_memory()
        if self._writing or self._failure:
            return
        encoded = self._encoded
        if encoded is None:
            commit = self._gathering.take()
            if commit is None:
                self._tell_idle()
                return
            encoded = self._encoder.encode(commit, self._clocks.now_ms(), self.last_sequence + 1)
        ring = self._ring
        if ring.used and ring.current is not None and not ring.current.fits(encoded.entries):
            self._close_file()
            self._encoder.repeat_names_in(encoded)
        self._encoded = encoded
        if ring.current or self._open_next():
            self._encoded = None
            self._write(encoded)

    def _open_next(self) -> bool:
        """Open the next journal file. Return False if none is free, or if opening it fails."""
        try:
            is_open = self._ring.open_next(self.last_sequence + 1, self._applied)
        except OSError as error:
            # Nothing is written yet, so a later attempt loses nothing. The usual reason is that connections
            # have all the descriptors of the process.
            reason = (
                f"the journal cannot be opened: {error}; publishes are held back until it can be"
            )
            if reason != self._unopened:
                logger.warning("%s", reason)
            self._unopened = reason
            return False
        if self._unopened and is_open:
            self._unopened = ""
            logger.warning("the journal is open again: publishes are accepted")
        return is_open

    def _close_file(self) -> None:
        self._encoder.begin_file()
        closed = self._ring.close_current()
        self._applying[closed.path] = closed.last
        self._apply(closed)

    def _write(self, encoded: Encoded) -> None:
        self.last_sequence += 1
        file = self._ring.current
        assert file is not None
        # If earlier commits are written and not synced, only a sync of their files makes them durable too.
        older = self._ring.unsynced() if encoded.sync else []
        begun_s = self._clocks.elapsed_s()
        self._writing = Write(encoded, file, self.last_sequence, self._synced, older, begun_s)
        self._attempt(self._writing)
        if encoded.appended:
            self.listener.prepare(encoded.appended)

    def _attempt(self, write: Write) -> None:
        encoded, file, sequence, synced, older, begun_s = write
        is_written = False
        flush_s: float | None = None
        elapsed_s = self._clocks.elapsed_s

        def work() -> None:
            nonlocal is_written, flush_s
            started_s = elapsed_s()
            file.write(sequence, synced, encoded.entries, sync=encoded.sync and not older)
            is_written = True
            if older:
                self._ring.sync([*older, file.path])
            if encoded.sync:
                flush_s = elapsed_s() - started_s

        def done(error: BaseException | None) -> None:
            if is_full(error) and not is_written and not self._failure:
                # A copy-on-write file system needs room to overwrite. This commit was not acknowledged, and
                # writing all its bytes again replaces whatever the attempt has left. This holds for writes
                # only: after a failed fsync, earlier commits may be lost that would not be written again.
                if not self.is_full:
                    logger.warning("%s", DISK_FULL)
                self.is_full = self._unwritten = True
                return
            if error is not None:
                self._fail(f"writing the journal failed: {explained(error)}")
            if self._failure:
                return
            if encoded.sync:
                self._synced = sequence
                self._ring.synced(sequence)
            self._committed(encoded, begun_s, flush_s)

        # Neither function refers to itself: a cycle would keep the commit in memory until it is collected.
        self._runner.write(work, done)

    def write_again(self) -> None:
        """Retry the write of the commit that the disk had no room for, if there is one."""
        if self._unwritten and self._writing is not None and not self._failure:
            self._unwritten = False
            self._attempt(self._writing)

    def _committed(self, encoded: Encoded, begun_s: float, flush_s: float | None) -> None:
        self._writing = None
        if self.is_full:
            self.is_full = False
            logger.warning("the disk has room again: publishes are accepted")
        self._gathering.pending_bytes -= encoded.commit.size
        self._ring.wrote(self.last_sequence, encoded.appended, encoded.created, synced=encoded.sync)
        self._begin_later()
        write_s = self._clocks.elapsed_s() - begun_s
        self._show(encoded, self.last_sequence, encoded.commit.size, write_s, flush_s)

    def _commit_memory(self) -> None:
        """Commit to `memory` topics, without the journal: records show at once, old ones may be dropped."""
        for commit in self._gathering.take_memory():
            encoded = self._encoder.encode(commit, self._clocks.now_ms(), 0)
            self.listener.prepare(encoded.appended)
            size = sum(one.end - one.offset for one in encoded.appended)
            self._show(encoded, 0, size)

    def _show(
        self,
        encoded: Encoded,
        sequence: int,
        size: int,
        write_s: float | None = None,
        flush_s: float | None = None,
    ) -> None:
        """Make a commit visible: move the topics' ends, then call watchers, waiters and the listener."""
        commit = encoded.commit
        total, has_quotas = 0, bool(self.quotas.meters)
        for topic, offset, end, ordinal, ms, records, entries in encoded.appended:
            if has_quotas:
                self.quotas.appended(topic.name, end - offset)
            topic.tail += entries
            topic.end_offset = end
            count = len(records)
            total += count
            topic.end_ordinal = ordinal + count
            topic.last_ms = ms
            if topic.durability is Durability.MEMORY:
                self._bound_memory(topic)
        for topic in encoded.created:
            self._topic_counts.add(topic.name, 1)
            self._handles.created(topic)
        for trim in commit.trims:
            self._trimmed(trim.topic, trim.position)
        for topic in commit.destroyed:
            self._topic_counts.add(topic.name, -topic.exists)
            self.quotas.deleted(topic.name, topic.start, topic.end)
            empty(topic)
            self._handles.destroyed(topic)
        self._cursors.committed(commit.cursors, encoded.ms)
        if commit.notes:
            self._notes.committed([note for _, note in commit.notes], sequence)
        if encoded.appended or encoded.created or commit.trims or commit.destroyed:
            self.version += 1
            for changed in self._watchers:
                changed()
        for report, own_end in zip(commit.reports, encoded.ends, strict=True):
            report.ends_at(own_end)
        answers = commit.waiters
        last = encoded.appended[len(encoded.appended) - len(commit.numbered) :]
        answers += self._producers.committed(commit.numbered, last, sequence)
        for answer in answers:
            try:
                answer()
            except Exception:
                # The commit is durable: an error in one callback must not keep the others from being called.
                logger.exception("internal error while the answer to a request was sent")
        delivered = bool(encoded.appended) and self.listener.committed(encoded.appended)
        now_s = self._clocks.elapsed_s()
        self.on_commit((commit.asked_s, now_s, write_s, flush_s, total, size, delivered))

    def _bound_memory(self, topic: Topic) -> None:
        limit = self._config.limits.memory_topic_bytes_max
        while topic.end_offset - tail_start(topic) > limit and len(topic.tail) > 1:
            del topic.tail[0]
            run = read_tail(topic, 0, 1)[0]
            self._trimmed(topic, Position(topic.epoch, run.offset, run.ordinal))

    def _trimmed(self, topic: Topic, position: Position) -> None:
        if position.offset > topic.start_offset:
            self.quotas.deleted(topic.name, topic.start, position)
            topic.start_offset, topic.start_ordinal = position.offset, position.ordinal
            topic.segments = None  # some are deleted, and many topics are never read again
            if topic.durability is Durability.MEMORY:
                drop_tail(topic, position.offset)

    def _fail(self, reason: str) -> None:
        """Accept no more requests: recovery must find out what a failed write left on disk."""
        self._failure = reason
        logger.critical("%s", reason)
        self.listener.failed(reason)

    # Ticks, the applier and closing

    def reload(self, config: Config) -> None:
        """Use new limits; no other settings change while the store is open."""
        self._config = config
        self.staging.limits = config.limits
        self._set_quotas()

    def _set_quotas(self) -> None:
        rules = self._config.topics
        quotas = {one.prefix: one.quota_bytes for one in rules if one.quota_bytes}
        self.quotas.set(quotas, self._handles.kept)

    def tick(self, now_s: float) -> None:
        """Hand an old file to the applier, and retry a commit that waits. Called several times a second."""
        ring = self._ring
        self.staging.tick(now_s)
        self.batches.tick()
        self.write_again()
        if self._writing or self._failure:
            return
        if self._unopened:
            self._begin_later()
        # While the applier is busy, the file keeps filling: the more records per file, the less each costs.
        old = ring.used and now_s - ring.opened_s >= self._config.journal.rotate_s
        if old and ring.free and not self._applying and self._encoded is None:
            self._close_file()

    def sync_written(self) -> None:
        """Sync the commits of `written` topics in the journal."""
        paths = self._ring.unsynced()
        sequence = self.last_sequence if not self._writing else self.last_sequence - 1

        def sync() -> float:
            started_s = self._clocks.elapsed_s()
            self._ring.sync(paths)
            return self._clocks.elapsed_s() - started_s

        def synced(result: float | BaseException) -> None:
            if isinstance(result, BaseException):
                self._fail(f"syncing the journal failed: {explained(result)}")
                return
            self._synced = max(self._synced, sequence)
            self._ring.synced(sequence)
            self.on_flush(result)

        if paths:
            self._runner.background(sync, synced)

    def file_is_free(self, path: Path) -> None:
        """Take a journal file that the applier has prepared."""
        self._ring.recycle(path)
        self._begin_later()

    def applied(self, path: Path) -> None:
        """Drop the tails' entries of a journal file that was applied: segments hold them now."""
        self._trouble = ""
        self._drop_tails(path, iter(self._ring.touched[path].items()))

    def _drop_tails(self, path: Path, ends: Iterator[tuple[Topic, int]]) -> None:
        """Drop a few tails and notes per step, so that ten thousand of them do not block the loop."""
        some = list(islice(ends, _TAILS_DROPPED_AT_ONCE))
        for topic, end in some:
            topic.segments = None
            drop_tail(topic, end)
            self._handles.applied(topic)
        sequence, is_last = self._applying[path], len(some) < _TAILS_DROPPED_AT_ONCE
        if not is_last or self._notes.applied(sequence, _NOTES_DROPPED_AT_ONCE):
            self._runner.soon(partial(self._drop_tails, path, ends))
            return
        del self._applying[path]
        self._applied = sequence
        self._producers.applied(sequence)
        self.batches.applied(sequence)
        self.files.close_deleted()
        self._ring.recycle(path)
        self._begin_later()

    def applier_waits(self, reason: str) -> None:
        """Record why the applier must wait, for instance because the disk is full."""
        self._trouble = reason

    def settle(self, done: Callable[[], None]) -> None:
        """Call `done` when everything gathered is committed and everything committed is applied."""
        self._idle_waiters.append(done)
        self._begin_later()

    def _tell_idle(self) -> None:
        if self._idle_waiters and not self.batches.is_busy:
            if self._ring.used:
                self._close_file()
            elif not self._applying:
                waiters, self._idle_waiters = self._idle_waiters, []
                for done in waiters:
                    done()

    def close(self) -> None:
        self._ring.close()
        self.files.close()
        self._catalogue.close()
