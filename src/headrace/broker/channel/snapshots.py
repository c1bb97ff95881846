"""Snapshots and states of channels: where they are stored, how they are computed, and uploads of processors.

The present state of a channel is its snapshot with later messages folded in. A computed state is kept while
its channel is in memory, so that the next one only needs the messages since then. If the reducer is
`uploaded`, processors compute states themselves, and the last upload is the state.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from headrace.broker.channel import notes
from headrace.broker.channel.channel import Channel, Done, Failed, Loaded, Part, Refuse, TakeOffset
from headrace.broker.channel.notes import StoredSnapshot
from headrace.errors import ChannelError
from headrace.log.records import split_records
from headrace.log.store import Chunk, ColdError, Note, Store
from headrace.model import RECORD_HEADER_BYTES, Position
from headrace.payload.channel import BadMessageError, Content, StoredMessage, decode_message
from headrace.payload.reducers import STATE_BYTES_MAX, CannotFoldError
from headrace.printing import quoted

logger = logging.getLogger(__name__)

STATES_BYTES_MAX = 64 << 20
"""Bytes of all states that are kept in memory."""

_READ_BYTES = 1 << 18
_FOLDED_HERE_BYTES = 1 << 14
"""Size of state and messages up to which they are folded without a thread. Most channels have less."""

NOTHING = Content(b"null", True)
"""Content of a state without any message. Code compares it by identity."""

OLDER_MAX = 20
"""Snapshots that are read in one step: each may have a megabyte."""


class Older(NamedTuple):
    channels: list[str]
    after: str | None
    """Name after which the next step starts; None at the end."""


TakeOlder = Callable[[Older], None]
Computed = Callable[[StoredSnapshot], None]


class Snapshots(Protocol):
    are_notes: bool
    """True if snapshots are stored with a change of the store, and not by `save`."""

    def load(self, channel: str, done: Loaded, failed: Failed) -> None:
        """Load a snapshot. May call back at once, and with a snapshot that is still being stored."""

    def save(self, channel: str, snapshot: StoredSnapshot, done: Done, failed: Failed) -> None:
        """Store a snapshot unless there is one of a later offset; `done` is called when it is durable."""

    def remove(self, channel: str, done: Done, failed: Failed) -> None:
        """Delete a snapshot; `done` is called when that is durable. A note is deleted by the next change."""

    def older(self, before_ms: int, after: str, done: TakeOlder, failed: Failed) -> None:
        """Find some channels whose snapshots were stored before `before_ms`, in the order of their names."""


class NotedSnapshots:
    """Snapshots as notes of the store, beside the logs."""

    are_notes = True

    def __init__(self, store: Store) -> None:
        self._store = store

    def load(self, channel: str, done: Loaded, failed: Failed) -> None:
        done(notes.read_snapshot(self._store, channel))

    def save(self, channel: str, snapshot: StoredSnapshot, done: Done, failed: Failed) -> None:
        raise NotImplementedError

    def remove(self, channel: str, done: Done, failed: Failed) -> None:
        done()

    def older(self, before_ms: int, after: str, done: TakeOlder, failed: Failed) -> None:
        first = notes.begin(notes.SNAPSHOT, "")
        begin = notes.past(notes.SNAPSHOT, after) if after else first
        noted = self._store.notes(first, begin, OLDER_MAX)
        found = [(notes.channel_of(note.key)[0], notes.snapshot_of(note).ms) for note in noted]
        old = [name for name, ms in found if ms < before_ms]
        done(Older(old, found[-1][0] if len(found) == OLDER_MAX else None))


class States(Part):
    """States of all channels. A job that folds a channel loads its state, so that its log is not trimmed
    meanwhile; requests only show what is stored."""

    def load(self, channel: Channel, done: Loaded, failed: Failed) -> None:
        """Load the snapshot of the log's present life; of any life if states outlive the log."""

        def loaded(found: StoredSnapshot | None) -> None:
            topic = channel.topic
            is_over = not topic.exists or (found is not None and found.epoch < topic.epoch)
            done(None if is_over and not channel.rule.persist else found)

        self._hub.snapshots.load(channel.name, loaded, failed)

    def compute(self, channel: Channel, done: Computed, failed: Failed) -> None:
        """Compute the state after all messages; with the reducer `uploaded`, load the last upload."""
        assert channel.is_busy

        def loaded(snapshot: StoredSnapshot | None) -> None:
            topic = channel.topic
            if channel.rule.reducer.is_uploaded:
                if snapshot is None or snapshot.offset < topic.start_offset:
                    snapshot = StoredSnapshot(*topic.start, self._hub.clock_ms(), NOTHING)
                done(snapshot)
                return
            known = self._hub.recent.get(channel)
            if known is not None and (snapshot is None or known.offset > snapshot.offset):
                snapshot = known
            end = topic.end
            if snapshot is not None and snapshot.offset >= end.offset:
                done(snapshot)
            else:
                self.fold(channel, snapshot, end, folded, failed)

        def folded(state: StoredSnapshot) -> None:
            self._hub.recent.put(channel, state)
            done(state)

        self.load(channel, loaded, failed)

    def show(self, channel: Channel, done: Loaded, failed: Failed) -> None:
        """Compute the state for a caller outside the channel; `done` gets it when it is durable."""
        if channel.postpone_if_busy(lambda: self.show(channel, done, failed)):
            return

        def made(state: StoredSnapshot) -> None:
            channel.after_changes(lambda: done(None if state.content is NOTHING else state))
            channel.job_done()

        def not_made(reason: str) -> None:
            failed(reason)
            channel.job_done()

        channel.is_busy = True
        self.compute(channel, made, not_made)

    def fold(
        self,
        channel: Channel,
        snapshot: StoredSnapshot | None,
        until: Position,
        done: Computed,
        failed: Failed,
    ) -> None:
        """Fold the messages after a snapshot, up to a position. The log must not be trimmed meanwhile."""
        reader, reducer = self._store.reader(channel.topic), channel.rule.reducer

        def go_on(state: Content | None, offset: int) -> None:
            try:
                chunk = reader.read(offset, _READ_BYTES)
            except ColdError as cold:
                self._warm(cold, partial(go_on, state, offset))
                return
            messages, size = _messages(channel, chunk, until.offset)
            following = max(chunk.next_offset, offset + 1) if chunk.runs else until.offset

            def work() -> Content | CannotFoldError | None:
                try:
                    return reducer.fold(state, messages)
                except CannotFoldError as error:
                    return error

            # A large state is decoded and encoded again, even for a few messages.
            if size + len(state.data if state else b"") <= _FOLDED_HERE_BYTES:
                folded(following, work())
            else:
                self._runner.background(work, partial(folded, following))

        def folded(offset: int, state: Content | BaseException | None) -> None:
            if isinstance(state, BaseException):
                failed(f"the reducer {quoted(reducer.name)} fails: {state}")
            elif offset < until.offset:
                self._runner.soon(partial(go_on, state, offset))
            else:
                content = state if state is not None else NOTHING
                done(StoredSnapshot(*until, self._hub.clock_ms(), content))

        start = channel.topic.start_offset
        if snapshot is None:
            go_on(None, start)
        else:
            go_on(snapshot.content, max(snapshot.offset, start))

    def save(
        self,
        channel: Channel,
        snapshot: StoredSnapshot,
        done: Callable[[list[Note]], None],
        failed: Failed,
    ) -> None:
        """Store a snapshot before its messages are forgotten.

        `done` gets the notes that the caller's next commit must contain: if snapshots are notes, this commit
        stores them.
        """
        if not self._hub.snapshots.are_notes:
            self._hub.snapshots.save(channel.name, snapshot, lambda: done([]), failed)
            return
        note, limit = notes.snapshot_note(channel.name, snapshot), self._store.note_bytes_max
        size = len(note.key) + len(note.value or b"")
        if size > limit:
            failed(f"the state takes {size} bytes as a note, and a note may take {limit}")
        else:
            done([note])

    def upload(
        self, channel: Channel, offset: int, content: Content, answer: TakeOffset, refuse: Refuse
    ) -> None:
        """Store the state after all messages up to `offset`; `answer` gets the offset of the stored state.

        A state of an earlier offset never replaces a state of a later one. Raises ChannelError.
        """
        reducer = channel.rule.reducer
        if not reducer.is_uploaded:
            text = f"channel {channel.name!r} has the reducer {reducer.name!r}: the server folds it"
            raise ChannelError("not-uploaded", text)
        limit = min(STATE_BYTES_MAX, self._store.note_bytes_max - 512)
        if len(content.data) > limit:
            text = f"a state may have {limit} bytes, this one has {len(content.data)}"
            raise ChannelError("too-large", text)
        if channel.postpone_if_busy(lambda: self.upload(channel, offset, content, answer, refuse)):
            return
        channel.is_busy = True

        def failed(reason: str) -> None:
            refuse(ChannelError("unavailable", f"the snapshots cannot be read: {reason}"))
            channel.job_done()

        def loaded(known: StoredSnapshot | None) -> None:
            if known is not None and known.offset >= offset:
                answer(known.offset)
                channel.job_done()
                return
            try:
                at = self._store.locate_offset(channel.topic, offset)
            except ColdError as cold:
                self._warm(cold, lambda: loaded(known))
                return
            if at.offset != offset:
                text = f"no message of channel {channel.name!r} ends at offset {offset}"
                refuse(ChannelError("bad-offset", text))
                channel.job_done()
                return
            snapshot = StoredSnapshot(*at, self._hub.clock_ms(), content)
            if self._hub.snapshots.are_notes:
                channel.write([notes.snapshot_note(channel.name, snapshot)], done)
            else:
                self._hub.snapshots.save(channel.name, snapshot, done, failed)

        def done() -> None:
            answer(offset)
            self._hub.trim_soon(channel)
            channel.job_done()

        self.load(channel, loaded, failed)


class RecentStates:
    """Recently computed states of channels in memory. New states replace the oldest ones."""

    def __init__(self) -> None:
        self._bytes = 0
        # A dict searches for its first key over all keys that were removed before it.
        self._states: OrderedDict[Channel, StoredSnapshot] = OrderedDict()

    def get(self, channel: Channel) -> StoredSnapshot | None:
        return self._states.get(channel)

    def put(self, channel: Channel, state: StoredSnapshot) -> None:
        self.drop(channel)
        self._states[channel] = state
        self._bytes += len(state.content.data)
        while self._bytes > STATES_BYTES_MAX:
            self.drop(next(iter(self._states)))

    def drop(self, channel: Channel) -> None:
        known = self._states.pop(channel, None)
        if known is not None:
            self._bytes -= len(known.content.data)


def _messages(channel: Channel, chunk: Chunk, until: int) -> tuple[list[StoredMessage], int]:
    """Return the messages of a chunk up to an offset, and their size in bytes.

    Damaged records, which the store reports, and records that are not messages are skipped.
    """
    messages: list[StoredMessage] = []
    size = 0
    for run in chunk.runs:
        at = run.offset
        for record in split_records(run.data, run.record_count):
            at += len(record)
            if at > until:
                break
            size += len(record)
            try:
                messages.append(decode_message(record[RECORD_HEADER_BYTES:]))
            except BadMessageError as error:
                name = quoted(channel.name)
                logger.error("channel %s: a record is no message and is skipped: %s", name, error)
    return messages, size
