"""State of one channel, with its commits, its jobs and the calls that wait for them. Starts nothing itself.

Elsewhere: the actions of members, in `joining.py`, `sending.py` and `receiving.py`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from headrace.broker.channel import notes as notes
from headrace.broker.channel.member import Member, Standing
from headrace.broker.channel.notes import StoredSnapshot
from headrace.log.store import Note
from headrace.model import Position

if TYPE_CHECKING:
    from headrace.broker.channel.hub import Channels

Done = Callable[[], None]

_RENEWED_MS_MIN = 60_000
"""Minimum time between two notes that record the presence of a member with a short lease."""


class ChannelState:
    __slots__ = (
        *("_held", "_in_flight", "_is_releasing", "end_offset", "end_ordinal", "hub", "is_busy"),
        *("members", "name", "present", "rule", "schedule", "topic", "trouble"),
        *("waiters",),
    )

    def __init__(self, name: str, hub: "Channels") -> None:
        self.name = name
        self.hub = hub
        self.rule = hub.rule(name)
        self.topic = hub.store.topic(hub.topic_name(name))
        self.end_offset, self.end_ordinal = self.topic.end_offset, self.topic.end_ordinal
        """End of the log once all messages sent so far are committed."""
        self.members = {member.name: member for member in notes.read_members(hub.store, name)}
        self.present = 0
        """Number of members that are present."""
        self.schedule = notes.read_schedule(hub.store, name)
        """Note with the time when the log is destroyed; without a time, an operator keeps the log."""
        self.is_busy = False
        """True while a job is running."""
        self.trouble = ""
        """Reason why the last job failed."""
        self._held: list[Done] | None = None
        """Calls that wait until the job is done."""
        self._is_releasing = False
        self._in_flight = 0
        """Number of changes that are not committed."""
        self.waiters: list[Done] | None = None
        """Callbacks of requests that wait for a message."""

    @property
    def is_idle(self) -> bool:
        """True if everything about the channel is on disk, and no member is present and no call waits."""
        is_used = self.present or self.is_busy or self._in_flight or self._held or self.waiters
        return not (is_used or self.trouble)

    @property
    def has_unwritten(self) -> bool:
        return self._in_flight > 0

    def load_snapshot(
        self, done: Callable[[StoredSnapshot | None], None], failed: Callable[[str], None]
    ) -> None:
        """Load the snapshot of the log's present life; of any life if states outlive the log."""

        def loaded(found: StoredSnapshot | None) -> None:
            topic = self.topic
            is_over = not topic.exists or (found is not None and found.epoch < topic.epoch)
            done(None if is_over and not self.rule.persist else found)

        self.hub.snapshots.load(self.name, loaded, failed)

    # Jobs

    def hold(self, do: Done) -> bool:
        """Return True if a job is running, and call `do` after it."""
        if not self.is_busy:
            return False
        if self._held is None:
            self._held = []
        self._held.append(do)
        return True

    def job_done(self) -> None:
        self.is_busy = False
        if self._is_releasing:
            return  # a held call was itself a job: the loop below continues, so jobs do not nest
        self._is_releasing = True
        try:
            while self._held and not self.is_busy:
                self._held.pop(0)()
        finally:
            self._is_releasing = False
        if not self._held:
            self._held = None
        self.hub.rest(self)

    def plan_destruction(self, due_ms: int) -> None:
        self.schedule = notes.schedule_note(self.name, due_ms)
        self.write([self.schedule], nothing)

    def holds(self, member: Member, now_ms: int) -> bool:
        """Return True if the log is kept for this member."""
        is_leased = now_ms < self.lease_end_ms(member)
        return member.is_member and (member.is_present or is_leased)

    def lease_ms(self, member: Member) -> int:
        """Return a member's lease: the one that it chose, if that is shorter than the channel's."""
        lease_ms = self.rule.lease_ms
        return min(lease_ms, member.lease_ms) if member.lease_ms else lease_ms

    def lease_end_ms(self, member: Member) -> int:
        """Return the time when the lease of an absent member ends.

        The presence of members with short leases is not noted all the time. So after a start of the server,
        these leases count from the start.
        """
        seen_ms = max(member.seen_ms, self.hub.started_ms) if member.lease_ms else member.seen_ms
        return seen_ms + self.lease_ms(member)

    def renewed_after_ms(self, member: Member) -> int:
        """Return the time after which a member's presence is noted again."""
        whole_ms = self.rule.lease_ms // 8
        if member.lease_ms:
            whole_ms = min(whole_ms, max(self.lease_ms(member) // 8, _RENEWED_MS_MIN))
        return max(1, whole_ms)

    def forgotten_ms(self, member: Member) -> int:
        if member.is_member:
            return self.lease_end_ms(member) + self.hub.remember_ms
        return member.seen_ms + self.hub.remember_ms

    def left(self, member: Member) -> Note:
        """Mark a member as left, and return the note to write."""
        member.standing = Standing.LEFT
        member.offset = member.ordinal = member.lease_ms = 0
        if member.number:
            return self.note(member)
        del self.members[member.name]
        return notes.no_member(self.name, member.name)

    def note(self, member: Member) -> Note:
        if member.is_present:
            # The lease counts from the last note. Notes are frequent, so a lease is shortened only a little.
            due_ms = self.hub.now_ms + self.renewed_after_ms(member)
        elif member.is_member and self.hub.clock_ms() < self.lease_end_ms(member):
            due_ms = self.lease_end_ms(member)
        elif member.is_member and member.lease_ms:
            due_ms = self.hub.clock_ms()
        else:
            due_ms = self.forgotten_ms(member)
        return notes.member_note(self.name, member, due_ms)

    def after_changes(self, do: Done) -> None:
        """Call `do` when all changes so far are durable."""
        if self._in_flight:
            self.write([], do)
        else:
            do()

    def wake(self) -> None:
        """Let requests that wait for a message check again."""
        waiters, self.waiters = self.waiters or (), None
        for tell in waiters:
            tell()

    def write(self, changed: Sequence[Note], done: Done, *, records: Sequence[bytes] = ()) -> None:
        """Write notes and records in one commit; `done` is called when it is durable."""
        self._in_flight += 1
        self.hub.store.change(
            self.topic, records=records, notes=changed, done=partial(self._changed, done)
        )

    def change(
        self,
        done: Done,
        *,
        changed: Sequence[Note] = (),
        trim: Position | None = None,
        destroy: bool = False,
    ) -> None:
        """Write notes, and trim or destroy the log, in one commit; `done` is called when it is durable."""
        self._in_flight += 1
        self.hub.store.change(
            self.topic, notes=changed, trim=trim, destroy=destroy, done=partial(self._changed, done)
        )

    def _changed(self, done: Done) -> None:
        self._in_flight -= 1
        done()
        if not self.present:
            self.hub.rest(self)


def nothing() -> None:
    pass
