"""Jobs that shorten the log of a channel: folding into the snapshot, trimming, destroying.

    look ──▶ snapshot loaded ──▶ folded, a block at a time ──▶ stored ──▶ trimmed or destroyed

The log does not change before the last step. Folded messages are stored in the snapshot before the log
forgets them; if snapshots are notes of the store, in the same commit.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from headrace.broker.channel import notes as notes
from headrace.broker.channel.core import ChannelState
from headrace.broker.channel.notes import End, StoredSnapshot
from headrace.broker.channel.state import Fold
from headrace.log.store import Hold, Note, waited_for
from headrace.model import Position
from headrace.printing import quoted

logger = logging.getLogger(__name__)

DESTROYED = "destroyed"
"""Reason that members get when their channel is destroyed by hand."""

RETRY_MS = 60_000
"""Retry delay after a failed trim or destruction; the channel's grace if that is shorter."""


class _Goal(NamedTuple):
    position: Position
    """Position up to which messages are forgotten."""
    is_end: bool
    """True if the log is destroyed there."""


def look(channel: ChannelState, now_ms: int) -> None:
    """Trim or destroy the log, as far as no member or reader needs it."""
    if channel.hold(lambda: look(channel, channel.hub.clock_ms())):
        return
    goal = _goal(channel, now_ms)
    if goal is None:
        channel.trouble = ""
        return
    channel.is_busy = True
    channel.load_snapshot(partial(_loaded, channel, goal), partial(_failed, channel))


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
    """Return the position from which a member or reader needs the log; its end if none does."""
    topic = channel.topic
    offset, ordinal = topic.end_offset, topic.end_ordinal
    for member in channel.members.values():
        if not channel.holds(member, now_ms):
            continue
        if member.offset < offset:
            offset, ordinal = member.offset, member.ordinal
        # The connection may be ahead of the cursor, where the member continues the next time.
        if member.acked is not None and topic.start_offset <= member.acked[0] < offset:
            offset, ordinal = member.acked
    for hold in _readers(channel):
        if hold.position.offset < offset:
            offset, ordinal = hold.position.offset, hold.position.ordinal
    return Position(topic.epoch, offset, ordinal)


def _readers(channel: ChannelState) -> list[Hold]:
    readers = channel.rule.wait_for
    return waited_for(channel.hub.store, channel.topic, readers) if readers else []


def _loaded(channel: ChannelState, goal: _Goal, snapshot: StoredSnapshot | None) -> None:
    start = channel.topic.start
    if goal.is_end and not channel.rule.persist:
        _shorten(channel, goal, notes.no_snapshot(channel.name))
        return
    if channel.rule.reducer.is_uploaded:
        covered = Position(start.epoch, snapshot.offset, snapshot.ordinal) if snapshot else start
        if covered.offset < goal.position.offset:
            goal = _Goal(covered, False)
    elif snapshot is None or snapshot.offset < goal.position.offset:
        folded, failed = partial(_folded, channel, goal), partial(_failed, channel)
        Fold(channel, snapshot, goal.position, folded, failed).go_on()
        return
    if goal.is_end and snapshot is not None and channel.hub.snapshot_age_ms:
        # The age of the snapshot counts from the end of the log.
        _folded(channel, goal, snapshot._replace(ms=channel.hub.clock_ms()))
    else:
        _shorten(channel, goal)


def _folded(channel: ChannelState, goal: _Goal, snapshot: StoredSnapshot) -> None:
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
    """Trim or destroy the log in one commit, which includes the snapshot if that is a note."""
    hub, topic = channel.hub, channel.topic
    channel.trouble = ""
    changed = [snapshot] if snapshot is not None else []
    if goal.is_end:
        is_alive = channel.has_unwritten or topic.end_offset != goal.position.offset
        if is_alive or not is_due(channel, hub.clock_ms()):
            channel.job_done()  # a member or message has come meanwhile, or an operator keeps the log
            return
        channel.schedule = None
        end = End(goal.position.offset, goal.position.ordinal)
        due_ms = hub.clock_ms() + channel.rule.lease_ms + hub.remember_ms
        changed += (notes.no_schedule(channel.name), notes.end_note(channel.name, end, due_ms))
        logger.info("channel %s: destroyed at offset %d", quoted(channel.name), end.offset)
        hub.recent_states.drop(channel)
        done = partial(_is_done, channel, "destroyed")

        def destroyed() -> None:
            # The next life of the log ignores this state, even if the database cannot delete it now.
            _remove_snapshot(channel, done, lambda _: done())

        is_kept = channel.rule.persist
        channel.change(done if is_kept else destroyed, changed=changed, destroy=True)
        return
    now_ms = hub.clock_ms()
    if is_due(channel, now_ms):
        _postpone(channel)
    # A member whose lease had ended may have come back meanwhile, and holds the log again.
    position, still_needed = goal.position, needed(channel, now_ms)
    if still_needed.offset < position.offset:
        position = still_needed
    if position.offset > topic.start_offset:
        channel.change(partial(_is_done, channel, "trimmed"), changed=changed, trim=position)
    elif changed:
        channel.change(channel.job_done, changed=changed)
    else:
        channel.job_done()


def destroy(
    channel: ChannelState, answer: Callable[[], None], refuse: Callable[[str], None]
) -> None:
    """Destroy a channel by hand: its log, its snapshot and every membership. Senders' numbers are kept."""
    if channel.hold(lambda: destroy(channel, answer, refuse)):
        return
    channel.is_busy = True

    def failed(reason: str) -> None:
        refuse(reason)
        channel.job_done()

    def done() -> None:
        channel.wake()
        answer()
        _is_done(channel, "destroyed")

    _remove_snapshot(channel, partial(_destroy_now, channel, done), failed)


def _destroy_now(channel: ChannelState, done: Callable[[], None]) -> None:
    hub, topic, name = channel.hub, channel.topic, channel.name
    changed = [notes.no_snapshot(name), notes.no_schedule(name)]
    for member in [one for one in channel.members.values() if one.is_member]:
        subscriber = member.subscriber
        member.depart()
        member.seen_ms = hub.now_ms
        changed.append(channel.left(member))
        if subscriber is not None:
            subscriber.ended(name, DESTROYED)
    channel.present, channel.schedule, channel.trouble = 0, None, ""
    hub.recent_states.drop(channel)
    # Messages that are being written are destroyed too.
    has_log = topic.exists or channel.end_offset > topic.end_offset
    if has_log:
        end = End(channel.end_offset, channel.end_ordinal)
        due_ms = hub.clock_ms() + channel.rule.lease_ms + hub.remember_ms
        changed.append(notes.end_note(name, end, due_ms))
    logger.info("channel %s: destroyed by hand at offset %d", quoted(name), channel.end_offset)
    channel.change(done, changed=changed, destroy=has_log)


def expire(channel: ChannelState, before_ms: int) -> None:
    """Delete the snapshot of a channel without a log, if it was stored before `before_ms`."""
    if channel.hold(lambda: expire(channel, before_ms)):
        return
    if channel.topic.exists or channel.present or channel.has_unwritten:
        return
    channel.is_busy = True

    def loaded(snapshot: StoredSnapshot | None) -> None:
        if snapshot is None or snapshot.ms >= before_ms:
            channel.job_done()
            return
        _remove_snapshot(channel, removed, failed)

    def removed() -> None:
        channel.hub.recent_states.drop(channel)
        logger.info("channel %s: its last state has expired", quoted(channel.name))
        done = partial(_is_done, channel, "states_expired")
        channel.change(done, changed=[notes.no_snapshot(channel.name)])

    def failed(reason: str) -> None:
        channel.job_done()  # the next round tries again

    channel.hub.snapshots.load(channel.name, loaded, failed)


def _remove_snapshot(
    channel: ChannelState, done: Callable[[], None], failed: Callable[[str], None]
) -> None:
    """Delete the snapshot from the database, if it is in one. The change that follows deletes its note."""
    snapshots = channel.hub.snapshots
    if snapshots.are_notes:
        done()
    else:
        snapshots.remove(channel.name, done, failed)


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
