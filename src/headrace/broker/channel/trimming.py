"""Jobs that shorten the log of a channel: trimming, destruction, and expiry of the last state.

    look ──▶ snapshot loaded ──▶ folded, a block at a time ──▶ stored ──▶ trimmed or destroyed

The log does not change before the last step. Folded messages are stored in the snapshot before the log
forgets them; if snapshots are notes of the store, in the same commit.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from headrace.broker.channel import notes
from headrace.broker.channel.channel import Channel, Done, Failed, Part
from headrace.broker.channel.notes import StoredSnapshot
from headrace.log.store import Note, waited_for
from headrace.model import Position
from headrace.printing import quoted

logger = logging.getLogger(__name__)

RETRY_MS = 60_000
"""Retry delay after a failed trim or destruction; the channel's grace if that is shorter."""


class _Goal(NamedTuple):
    position: Position
    """Position up to which messages are forgotten."""
    is_end: bool
    """True if the log is destroyed there."""


class LogTrimming(Part):
    def look(self, channel: Channel, now_ms: int) -> None:
        """Trim or destroy the log, as far as no member or reader needs it."""
        if channel.postpone_if_busy(lambda: self.look(channel, self._hub.clock_ms())):
            return
        goal = self._goal(channel, now_ms)
        if goal is None:
            channel.trouble = ""
            return
        channel.is_busy = True
        loaded, failed = partial(self._loaded, channel, goal), partial(self._failed, channel)
        self._hub.states.load(channel, loaded, failed)

    def needed(self, channel: Channel, now_ms: int) -> Position:
        """Return the position from which a member or reader needs the log; its end if none does."""
        topic = channel.topic
        offset, ordinal = topic.end_offset, topic.end_ordinal
        for member in channel.members.values():
            if not self._hub.leases.holds(channel, member, now_ms):
                continue
            if member.offset < offset:
                offset, ordinal = member.offset, member.ordinal
            # The connection may be ahead of the cursor, where the member's next connection continues.
            if member.acked is not None and topic.start_offset <= member.acked[0] < offset:
                offset, ordinal = member.acked
        for _, position in waited_for(self._store, topic, channel.rule.wait_for):
            if position.offset < offset:
                _, offset, ordinal = position
        return Position(topic.epoch, offset, ordinal)

    # The steps of a trim

    def _goal(self, channel: Channel, now_ms: int) -> _Goal | None:
        topic = channel.topic
        if not topic.exists:
            if channel.is_due(now_ms) and not channel.in_flight:
                channel.schedule = None
                channel.write([notes.no_schedule(channel.name)])
            return None
        if channel.is_due(now_ms):
            if not channel.in_flight:
                holds = waited_for(self._store, topic, channel.rule.wait_for)
                if all(hold.position.offset >= topic.end_offset for hold in holds):
                    return _Goal(topic.end, True)
                self._postpone(channel)
            return None
        position = self.needed(channel, now_ms)
        return _Goal(position, False) if position.offset > topic.start_offset else None

    def _loaded(self, channel: Channel, goal: _Goal, snapshot: StoredSnapshot | None) -> None:
        if goal.is_end and not channel.rule.persist:
            self._shorten(channel, goal, [notes.no_snapshot(channel.name)])
            return
        if channel.rule.reducer.is_uploaded:
            covered = channel.topic.start
            if snapshot is not None:
                covered = covered._replace(offset=snapshot.offset, ordinal=snapshot.ordinal)
            if covered.offset < goal.position.offset:
                goal = _Goal(covered, False)
        elif snapshot is None or snapshot.offset < goal.position.offset:
            folded, failed = partial(self._folded, channel, goal), partial(self._failed, channel)
            self._hub.states.fold(channel, snapshot, goal.position, folded, failed)
            return
        if goal.is_end and snapshot is not None and self._hub.snapshot_age_ms:
            # The age of the snapshot counts from the end of the log.
            self._folded(channel, goal, snapshot._replace(ms=self._hub.clock_ms()))
        else:
            self._shorten(channel, goal, [])

    def _folded(self, channel: Channel, goal: _Goal, snapshot: StoredSnapshot) -> None:
        stored, failed = partial(self._shorten, channel, goal), partial(self._failed, channel)
        self._hub.states.save(channel, snapshot, stored, failed)

    def _shorten(self, channel: Channel, goal: _Goal, changed: Sequence[Note]) -> None:
        """Trim or destroy the log in one commit with the changed notes of the snapshot."""
        channel.trouble = ""
        if goal.is_end:
            self._end(channel, goal.position, changed)
            return
        now_ms = self._hub.clock_ms()
        if channel.is_due(now_ms):
            self._postpone(channel)
        # A member whose lease had ended may have come back meanwhile, and holds the log again.
        still_needed = self.needed(channel, now_ms)
        position = min(goal.position, still_needed, key=lambda at: at.offset)
        if position.offset > channel.topic.start_offset:
            channel.write(changed, partial(self._done, channel, "trimmed"), trim=position)
        elif changed:
            channel.write(changed, channel.job_done)
        else:
            channel.job_done()

    def _end(self, channel: Channel, at: Position, changed: Sequence[Note]) -> None:
        """Destroy a log that no member has used during the grace."""
        is_alive = channel.in_flight or channel.topic.end_offset != at.offset
        if is_alive or not channel.is_due(self._hub.clock_ms()):
            channel.job_done()  # a member or message has come meanwhile, or an operator keeps the log
            return
        channel.schedule = None
        end_note = self._end_note(channel, at.offset, at.ordinal)
        logger.info("channel %s: destroyed at offset %d", quoted(channel.name), at.offset)
        self._hub.recent.drop(channel)
        done = partial(self._done, channel, "destroyed")

        def destroyed() -> None:
            # The next life of the log ignores this state, even if the database cannot delete it now.
            self._hub.snapshots.remove(channel.name, done, lambda _: done())

        channel.write(
            [*changed, notes.no_schedule(channel.name), end_note],
            done if channel.rule.persist else destroyed,
            destroy=True,
        )

    def _end_note(self, channel: Channel, offset: int, ordinal: int) -> Note:
        due_ms = self._hub.clock_ms() + channel.rule.lease_ms + self._hub.remember_ms
        return notes.end_note(channel.name, offset, ordinal, due_ms)

    def _done(self, channel: Channel, what: str) -> None:
        self._hub.count(f"channels_{what}_total")
        channel.job_done()

    def _failed(self, channel: Channel, reason: str) -> None:
        if channel.trouble != reason:
            channel.trouble = reason
            text = "channel %s: the log cannot be trimmed now, and is trimmed later: %s"
            logger.error(text, quoted(channel.name), reason)
        if channel.is_due(self._hub.clock_ms()):
            self._postpone(channel)
        else:
            self._hub.retry_trim(channel, _wait_ms(channel))
        channel.job_done()

    def _postpone(self, channel: Channel) -> None:
        channel.plan_destruction(self._hub.clock_ms() + _wait_ms(channel))

    # Other jobs

    def destroy(self, channel: Channel, answer: Done, refuse: Failed) -> None:
        """Destroy a channel by hand: its log, its snapshot and every membership."""
        if channel.postpone_if_busy(lambda: self.destroy(channel, answer, refuse)):
            return
        channel.is_busy = True

        def failed(reason: str) -> None:
            refuse(reason)
            channel.job_done()

        def done() -> None:
            channel.wake()
            answer()
            self._done(channel, "destroyed")

        self._hub.snapshots.remove(channel.name, partial(self._destroy_now, channel, done), failed)

    def _destroy_now(self, channel: Channel, done: Done) -> None:
        topic, name = channel.topic, channel.name
        changed = [notes.no_snapshot(name), notes.no_schedule(name)]
        for member in [one for one in channel.members.values() if one.is_member]:
            subscriber = member.subscriber
            member.depart()
            member.seen_ms = self._hub.now_ms
            changed.append(self._hub.leases.end(channel, member))
            if subscriber is not None:
                subscriber.ended(name, "destroyed")
        channel.present, channel.schedule, channel.trouble = 0, None, ""
        self._hub.recent.drop(channel)
        # Messages that are being written are destroyed too.
        has_log = topic.exists or channel.end_offset > topic.end_offset
        if has_log:
            changed.append(self._end_note(channel, channel.end_offset, channel.end_ordinal))
        logger.info("channel %s: destroyed by hand at offset %d", quoted(name), channel.end_offset)
        channel.write(changed, done, destroy=has_log)

    def expire(self, channel: Channel, before_ms: int) -> None:
        """Delete the snapshot of a channel without a log, if it was stored before `before_ms`."""
        if channel.postpone_if_busy(lambda: self.expire(channel, before_ms)):
            return
        if channel.topic.exists or channel.present or channel.in_flight:
            return
        channel.is_busy = True

        def loaded(snapshot: StoredSnapshot | None) -> None:
            if snapshot is None or snapshot.ms >= before_ms:
                channel.job_done()
            else:
                self._hub.snapshots.remove(channel.name, removed, failed)

        def removed() -> None:
            self._hub.recent.drop(channel)
            logger.info("channel %s: its last state has expired", quoted(channel.name))
            done = partial(self._done, channel, "states_expired")
            channel.write([notes.no_snapshot(channel.name)], done)

        def failed(_: str) -> None:
            channel.job_done()  # the next round tries again

        self._hub.snapshots.load(channel.name, loaded, failed)


def _wait_ms(channel: Channel) -> int:
    return min(RETRY_MS, max(1, channel.rule.grace_ms))
