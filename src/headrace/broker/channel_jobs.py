"""What makes the log of a channel shorter: folding into the snapshot, trimming, destroying.

    look ──▶ snapshot loaded ──▶ folded, a block at a time ──▶ stored ──▶ trimmed or destroyed

Until the last step nothing has changed. What is folded is stored before the log forgets it, in the same
commit where the snapshots are notes of the store.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from headrace.broker import channel_notes as notes
from headrace.broker.channel_notes import End, Snapshot
from headrace.broker.channel_state import ChannelState
from headrace.channel_envelope import BadMessageError, Content, Message, decode_message
from headrace.log.holds import Hold, waited_for
from headrace.log.records import split_records
from headrace.log.store import ColdError, Note
from headrace.model import RECORD_HEADER_BYTES, Position
from headrace.printing import quoted
from headrace.reducers import CannotFoldError

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 18
_FOLDED_HERE_BYTES = 1 << 14
"""So much is folded at once and without a thread: most channels have less."""

RETRY_MS = 60_000
"""After so long, or the grace where that is less, it is tried again what was not possible."""


class _Goal(NamedTuple):
    position: Position
    """Up to where messages are forgotten."""
    is_end: bool
    """Whether the log ends there."""


def look(channel: ChannelState, now_ms: int) -> None:
    """Trim or destroy the log, as far as nobody needs it."""
    if channel.hold(lambda: look(channel, channel.hub.clock_ms())):
        return
    goal = _goal(channel, now_ms)
    if goal is None:
        channel.trouble = ""
        return
    channel.is_busy = True
    channel.hub.snapshots.load(
        channel.name, partial(_loaded, channel, goal), partial(_failed, channel)
    )


def is_due(channel: ChannelState, now_ms: int) -> bool:
    schedule = channel.schedule
    return schedule is not None and 0 < schedule.due_ms <= now_ms and not channel.present


def _goal(channel: ChannelState, now_ms: int) -> _Goal | None:
    topic = channel.topic
    if not topic.exists:
        if is_due(channel, now_ms) and not channel.has_unwritten:
            channel.schedule = None
            channel.change(lambda: None, changed=[notes.no_schedule(channel.name)])
        return None
    if is_due(channel, now_ms):
        if not channel.has_unwritten:
            if all(hold.position.offset >= topic.end_offset for hold in _readers(channel)):
                return _Goal(topic.end, True)
            _postpone(channel)
        return None
    position = needed(channel, now_ms)
    return _Goal(position, False) if position.offset > topic.start_offset else None


def needed(channel: ChannelState, now_ms: int) -> Position:
    """From where on someone needs the log; its end when nobody does."""
    topic = channel.topic
    offset, ordinal = topic.end_offset, topic.end_ordinal
    for member in channel.members.values():
        if member.offset < offset and channel.holds(member, now_ms):
            offset, ordinal = member.offset, member.ordinal
    for hold in _readers(channel):
        if hold.position.offset < offset:
            offset, ordinal = hold.position.offset, hold.position.ordinal
    return Position(topic.epoch, offset, ordinal)


def _readers(channel: ChannelState) -> list[Hold]:
    readers = channel.rule.wait_for
    return waited_for(channel.hub.store, channel.topic, readers) if readers else []


def _loaded(channel: ChannelState, goal: _Goal, snapshot: Snapshot | None) -> None:
    start = channel.topic.start
    if channel.rule.reducer.is_uploaded:
        covered = Position(start.epoch, snapshot.offset, snapshot.ordinal) if snapshot else start
        if covered.offset < goal.position.offset:
            goal = _Goal(covered, False)
        _shorten(channel, goal)
        return
    if snapshot is not None and snapshot.offset >= goal.position.offset:
        _shorten(channel, goal)
        return
    fold = _Fold(channel, snapshot, goal.position, partial(_folded, channel, goal))
    fold.go_on()


def _folded(channel: ChannelState, goal: _Goal, snapshot: Snapshot) -> None:
    snapshots = channel.hub.snapshots
    if snapshots.are_notes:
        note, limit = notes.snapshot_note(channel.name, snapshot), channel.hub.store.note_bytes_max
        size = len(note.key) + len(note.value or b"")
        if size > limit:
            _failed(channel, f"the state takes {size} bytes with its place, and may take {limit}")
        else:
            _shorten(channel, goal, note)
    else:
        snapshots.save(
            channel.name,
            snapshot,
            partial(_shorten, channel, goal),
            partial(_failed, channel),
        )


def _shorten(channel: ChannelState, goal: _Goal, snapshot: Note | None = None) -> None:
    """In one commit, with the snapshot where that is a note."""
    hub, topic = channel.hub, channel.topic
    channel.trouble = ""
    changed = [snapshot] if snapshot is not None else []
    if goal.is_end:
        is_alive = channel.has_unwritten or topic.end_offset != goal.position.offset
        if is_alive or not is_due(channel, hub.clock_ms()):
            channel.job_done()  # someone has come meanwhile, or wants to keep it
            return
        channel.schedule = None
        end = End(goal.position.offset, goal.position.ordinal)
        due_ms = hub.clock_ms() + channel.rule.lease_ms + hub.remember_ms
        changed += (notes.no_schedule(channel.name), notes.end_note(channel.name, end, due_ms))
        logger.info("channel %s: destroyed at offset %d", quoted(channel.name), end.offset)
        channel.change(partial(_is_done, channel, "destroyed"), changed=changed, destroy=True)
        return
    now_ms = hub.clock_ms()
    if is_due(channel, now_ms):
        _postpone(channel)
    # Who was away for too long may have come back meanwhile, and holds it again.
    position, still_needed = goal.position, needed(channel, now_ms)
    if still_needed.offset < position.offset:
        position = still_needed
    if position.offset > topic.start_offset:
        channel.change(partial(_is_done, channel, "trimmed"), changed=changed, trim=position)
    elif changed:
        channel.change(channel.job_done, changed=changed)
    else:
        channel.job_done()


def _is_done(channel: ChannelState, what: str) -> None:
    channel.hub.count(f"channels_{what}_total")
    channel.job_done()


def _failed(channel: ChannelState, reason: str) -> None:
    if channel.trouble != reason:
        channel.trouble = reason
        logger.error("channel %s: nothing is forgotten for now: %s", quoted(channel.name), reason)
    if is_due(channel, channel.hub.clock_ms()):
        _postpone(channel)
    else:
        channel.hub.look_again(channel, _wait_ms(channel))
    channel.job_done()


def _postpone(channel: ChannelState) -> None:
    channel.plan_destruction(channel.hub.clock_ms() + _wait_ms(channel))


def _wait_ms(channel: ChannelState) -> int:
    return min(RETRY_MS, max(1, channel.rule.grace_ms))


class _Fold:
    """Folds the messages behind a snapshot up to a place."""

    __slots__ = ("_channel", "_done", "_offset", "_reader", "_state", "_until")

    def __init__(
        self,
        channel: ChannelState,
        snapshot: Snapshot | None,
        until: Position,
        done: Callable[[Snapshot], None],
    ) -> None:
        self._channel = channel
        self._state = snapshot.content if snapshot is not None else None
        self._until = until
        self._done = done
        start = channel.topic.start_offset
        self._offset = max(snapshot.offset, start) if snapshot is not None else start
        self._reader = channel.hub.store.reader(channel.topic)

    def go_on(self) -> None:
        hub = self._channel.hub
        reducer = self._channel.rule.reducer
        try:
            messages, size = self._read()
        except ColdError as cold:
            hub.warm(cold, self.go_on)
            return
        work = partial(reducer.fold, self._state, messages)
        if size <= _FOLDED_HERE_BYTES:
            self._folded(_attempt(work))
        else:
            hub.runner.background(partial(_attempt, work), self._folded)

    def _folded(self, state: Content | BaseException | None) -> None:
        channel = self._channel
        if isinstance(state, BaseException):
            _failed(channel, f"the reducer {quoted(channel.rule.reducer.name)} fails: {state}")
            return
        self._state = state
        if self._offset < self._until.offset:
            channel.hub.runner.soon(self.go_on)
            return
        at = self._until
        content = state if state is not None else Content(b"null", True)
        self._done(Snapshot(at.epoch, at.offset, at.ordinal, channel.hub.clock_ms(), content))

    def _read(self) -> tuple[list[Message], int]:
        """The next messages; what is damaged or no message is passed over, and was told by who reads it."""
        messages: list[Message] = []
        chunk = self._reader.read(self._offset, _READ_BYTES)
        size = 0
        for run in chunk.runs:
            at = run.offset
            for record in split_records(run.data, run.record_count):
                at += len(record)
                if at > self._until.offset:
                    break
                size += len(record)
                try:
                    messages.append(decode_message(record[RECORD_HEADER_BYTES:]))
                except BadMessageError as error:
                    logger.error(
                        "channel %s: a record is passed over: %s",
                        quoted(self._channel.name),
                        error,
                    )
        self._offset = (
            max(chunk.next_offset, self._offset + 1) if chunk.runs else self._until.offset
        )
        return messages, size


def _attempt(work: Callable[[], Content | None]) -> Content | BaseException | None:
    try:
        return work()
    except CannotFoldError as error:
        return error
