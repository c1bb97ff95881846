"""All channels of a server: those in memory, their parts, the work due by the clock, and their report.

A channel is in memory while a member is present or work is in progress. Otherwise it is read from its notes
when it is needed. Idle channels cost no time: the store finds the notes that are due.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from heapq import merge
from itertools import groupby, islice
from typing import Any

from headrace.broker.channel import notes
from headrace.broker.channel.channel import Channel, ChannelRule, Failed, Loaded, Part
from headrace.broker.channel.member import Member, MemberConnection, Standing
from headrace.broker.channel.membership import Leases, Membership
from headrace.broker.channel.notes import StoredSnapshot
from headrace.broker.channel.receiving import Receiving
from headrace.broker.channel.sending import Sending
from headrace.broker.channel.snapshots import Older, RecentStates, Snapshots, States
from headrace.broker.channel.trimming import LogTrimming
from headrace.errors import BadTopicNameError, ChannelError
from headrace.log.store import Appended, Note, Runner, Store, waited_for
from headrace.model import (
    CHANNEL_PREFIX,
    RESERVED_TOPIC_BYTES_MAX,
    Position,
    Span,
    check_topic_name,
)

_NAME_BYTES_MAX = RESERVED_TOPIC_BYTES_MAX - len(CHANNEL_PREFIX)

_LOOKED_AT_ONCE = 100
"""Channels, or notes that are due, that are handled in one step."""

LOOK_MS = 500
"""Minimum time between two trims of a channel's log.

Trimming many messages at once costs less per message. The time is short enough that most messages are trimmed
before they leave the journal.
"""

_EXPIRY_MS_MAX = 3_600_000
"""Maximum time between two rounds that look for old snapshots."""


@dataclass(eq=False, repr=False)
class Channels:
    store: Store
    runner: Runner
    snapshots: Snapshots
    rule: Callable[[str], ChannelRule]
    clock_ms: Callable[[], int]
    """Clock for times on disk, which may be set."""
    _: KW_ONLY
    elapsed_ms: Callable[[], int]
    """Clock for durations in memory, which is never set."""
    members_max: int
    remember_ms: int
    look_ms: int = LOOK_MS
    snapshot_age_ms: int = 0
    """Age at which the last state of a channel without a log is forgotten; 0: never."""
    count: Callable[[str], None] = lambda _: None
    """Called with the name of a counter to increment it."""

    def __post_init__(self) -> None:
        self.now_ms = self.clock_ms()
        """Time of the last tick. It is exact enough for `seen_ms`, and many members share the int object."""
        self.started_ms = self.now_ms
        """Time when this server started, or when its clock was last set back."""
        self.changed: dict[Channel, None] = {}
        """Channels whose logs may be less needed than before, and may be trimmed."""
        self.leases = Leases(self)
        self.recent = RecentStates()
        self.sending = Sending(self)
        self.receiving = Receiving(self)
        self.membership = Membership(self)
        self.states = States(self)
        self.trimming = LogTrimming(self)
        self.report = ChannelReport(self)
        self.other_due: Callable[[Note], None] = lambda note: None
        """Called with notes that are due and not about channels. It has to put or drop them."""
        self._known: dict[str, Channel] = {}
        self._failed: dict[Channel, None] = {}
        """Channels that could not be trimmed. All of them are retried at the same time, at `_retry_ms`."""
        self._retry_ms = 0
        self._pollers: OrderedDict[tuple[Channel, str], int] = OrderedDict()
        """Members that are present because of requests, with the time by `elapsed_ms` when that ends."""
        self._is_trimming = False
        self._trimmed_ms = self.elapsed_ms() - self.look_ms
        self._swept: str | None = ""
        """Last topic that the sweep after a start has handled; None when the sweep is complete."""
        self._sweep_ms = self.now_ms
        self._is_expiring = False
        self._expired = ""
        """Last channel whose snapshot this round has checked."""
        self._expiry_ms = self.elapsed_ms()
        """Time by `elapsed_ms` when the next round begins."""

    def reload(self) -> None:
        """Update the rules of the channels in memory after the settings have changed."""
        for name, channel in self._known.items():
            channel.rule = self.rule(name)

    def get(self, name: str) -> Channel:
        """Return the channel with this name. Raises ChannelError if the name is invalid."""
        channel = self._known.get(name)
        if channel is None:
            check_channel_name(name)
            channel = self._known[name] = Channel(name, self.rule(name), self)
        return channel

    def rest(self, channel: Channel) -> None:
        """Drop a channel from memory if everything about it is on disk."""
        is_over = channel.is_idle and channel not in self.changed
        # Another object for the same channel may have taken its place.
        if is_over and self._known.get(channel.name) is channel:
            del self._known[channel.name]
            self.recent.drop(channel)
            self.store.forget(channel.topic)

    # Calls from the broker and the server

    def committed(self, one: Appended) -> None:
        """Pass new records to their channel if it is in memory."""
        channel = self._known.get(one.topic.name.removeprefix(CHANNEL_PREFIX))
        if channel is not None:
            self.receiving.committed(channel, one)

    def load_snapshot(self, name: str, done: Loaded, failed: Failed) -> None:
        """Load the present state for a caller outside the channel; `done` gets it when it is durable."""
        self.states.show(self.get(name), done, failed)

    def lost(
        self, subscriber: MemberConnection, processor: str, joined: Mapping[str, Channel]
    ) -> None:
        """Handle the end of a connection that joined channels.

        Each step handles a few channels, so that other work does not wait for thousands.
        """

        def some(channels: Sequence[Channel]) -> None:
            for channel in channels[:_LOOKED_AT_ONCE]:
                self.membership.gone(channel, processor, subscriber)
                self.rest(channel)
            if rest := channels[_LOOKED_AT_ONCE:]:
                self.runner.soon(partial(some, rest))

        some(list(joined.values()))

    def readers_moved(self, topics: Iterable[str]) -> None:
        """Look at channels soon whose trimming may have waited for the cursors that moved in these topics."""
        for topic in topics:
            name = topic.removeprefix(CHANNEL_PREFIX)
            if name and name != topic and self.rule(name).wait_for:
                self.trim_soon(self.get(name))

    def went_back(self) -> None:
        """Correct times that lie in the future, channel by channel, after the clock was set back."""
        self._swept = ""
        self._sweep_ms = self.now_ms = self.started_ms = self.clock_ms()

    # Work that channels leave for the next ticks

    def trim_soon(self, channel: Channel) -> None:
        """Look at a channel soon, because its log may be less needed than before."""
        self.changed[channel] = None

    def retry_trim(self, channel: Channel, wait_ms: int) -> None:
        """Retry a failed trim later: with all other failed ones, `wait_ms` after the first of them."""
        if not self._failed:
            self._retry_ms = self.elapsed_ms() + wait_ms
        self._failed[channel] = None

    def polled(self, channel: Channel, member: Member) -> None:
        """Count a member as present for a while because of its request."""
        member.is_polling = True
        key = channel, member.name
        self._pollers.pop(key, None)
        self._pollers[key] = self.elapsed_ms() + channel.rule.presence_ms

    # Work that is due by the clock

    def tick(self) -> None:
        """Do the work that is due; called a few times a second."""
        now_ms = self.now_ms = self.clock_ms()
        elapsed_ms = self.elapsed_ms()
        while self._pollers and next(iter(self._pollers.values())) <= elapsed_ms:
            (channel, processor), _ = self._pollers.popitem(last=False)
            self.membership.stopped_polling(channel, processor)
            self.rest(channel)
        for note in self.store.due_notes(now_ms, _LOOKED_AT_ONCE):
            if note.key[:2] in notes.KINDS:
                self._due(note, now_ms)
            else:
                self.other_due(note)
        if self._failed and elapsed_ms >= self._retry_ms:
            self.changed |= self._failed
            self._failed = {}
        is_time = elapsed_ms - self._trimmed_ms >= self.look_ms
        if self.changed and not self._is_trimming and is_time:
            self._is_trimming, self._trimmed_ms = True, elapsed_ms
            self._trim(iter(list(self.changed)))
        self._sweep()
        if self.snapshot_age_ms and not self._is_expiring and elapsed_ms >= self._expiry_ms:
            self._expire()

    def _trim(self, changed: Iterator[Channel]) -> None:
        """Trim or destroy changed channels, each once between two ticks.

        Each step handles a few channels, so that other work does not wait for thousands.
        """
        some = list(islice(changed, _LOOKED_AT_ONCE))
        for channel in some:
            del self.changed[channel]
            self.trimming.look(channel, self.now_ms)
            self.rest(channel)
        self._is_trimming = bool(some)
        if some:
            self.runner.soon(lambda: self._trim(changed))

    def _due(self, note: Note, now_ms: int) -> None:
        name, processor = notes.channel_of(note.key)
        kind = note.key[:2]
        channel = self.get(name)
        if kind == notes.MEMBER:
            member = channel.members.get(processor)
            if member is not None:
                self.membership.renew(channel, member, now_ms)
        elif kind == notes.SCHEDULE:
            if not channel.is_busy:
                self.trimming.look(channel, now_ms)
        elif kind == notes.END:
            channel.write([Note(note.key, None)])
        self.rest(channel)

    def _sweep(self) -> None:
        """Plan the destruction of channels that had members present when the last server ended.

        No member is present now until one comes back. Times that the last server noted with a clock that was
        ahead are corrected, because they would hold the logs for too long.
        """
        if self._swept is None:
            return
        found = self.store.topics(CHANNEL_PREFIX, self._swept, _LOOKED_AT_ONCE)
        for topic in found:
            channel = self.get(topic.name.removeprefix(CHANNEL_PREFIX))
            # A channel that is being destroyed has no schedule any more.
            if not (channel.present or channel.schedule or channel.is_busy):
                channel.plan_destruction(self._sweep_ms + channel.rule.grace_ms)
            self.membership.forget_future(channel, self._sweep_ms)
            self.rest(channel)
            self._swept = topic.name
        if not found:
            self._swept = None

    def _expire(self) -> None:
        """Check a few snapshots, and delete old ones of channels without a log. All of them are a round."""
        self._is_expiring = True
        before_ms = self.clock_ms() - self.snapshot_age_ms

        def found(older: Older) -> None:
            self._is_expiring = False
            for name in older.channels:
                channel = self.get(name)
                self.trimming.expire(channel, before_ms)
                self.rest(channel)
            self._expired = older.after or ""
            if older.after is None:
                pause()

        def failed(_: str) -> None:
            self._is_expiring = False
            pause()

        def pause() -> None:
            self._expiry_ms = self.elapsed_ms() + min(_EXPIRY_MS_MAX, self.snapshot_age_ms)

        self.snapshots.older(before_ms, self._expired, found, failed)


def check_channel_name(name: str) -> None:
    try:
        if not name:
            raise BadTopicNameError("a channel's name must not be empty")
        size = len(name.encode(errors="surrogatepass"))
        if size > _NAME_BYTES_MAX:
            raise BadTopicNameError(
                f"a channel's name may have {_NAME_BYTES_MAX} bytes of UTF-8, this one has {size}"
            )
        check_topic_name(CHANNEL_PREFIX + name)
    except BadTopicNameError as error:
        raise ChannelError("bad-channel", str(error)) from None


_PAGE = 200


class ChannelReport(Part):
    """Reports about channels for operators: names, members, what holds the log, and planned destruction."""

    def names(self, prefix: str, after: str, limit: int) -> list[str]:
        """Return the channels that have a log, a member or a snapshot, in the order of their names."""
        found = merge(
            _topics(self._store, prefix, after),
            _with_members(self._store, prefix, after),
            _noted(self._store, notes.SNAPSHOT, prefix, after),
            key=str.encode,
        )
        return list(islice((name for name, _ in groupby(found)), limit))

    def describe(
        self, channel: Channel, snapshot: StoredSnapshot | None, now_ms: int
    ) -> dict[str, Any]:
        topic, schedule = channel.topic, channel.schedule
        first = self._hub.trimming.needed(channel, now_ms)
        store = self._store
        kept = store.kept(topic)
        return {
            "name": channel.name,
            "exists": topic.exists,
            "epoch": topic.epoch,
            "start": topic.start_offset,
            "end": topic.end_offset,
            "messages": kept.records,
            "bytes": kept.bytes,
            "reducer": channel.rule.reducer.name,
            "members": [
                self._member(channel, member, first.offset, now_ms)
                for _, member in sorted(channel.members.items())
                if member.is_member
            ],
            "readers": [
                {
                    "reader": hold.reader,
                    "cursor": hold.position.offset,
                    "holds": hold.position.offset <= first.offset < topic.end_offset,
                }
                for hold in waited_for(store, topic, channel.rule.wait_for)
            ],
            "needed_from": first.offset,
            "snapshot": (
                {
                    "offset": snapshot.offset,
                    "epoch": snapshot.epoch,
                    "ms": snapshot.ms,
                    "bytes": len(snapshot.content.data),
                    "messages_behind": store.kept(
                        topic, Position(snapshot.epoch, snapshot.offset, snapshot.ordinal)
                    ).records,
                }
                if snapshot is not None
                else None
            ),
            "destroyed_ms": schedule.due_ms if schedule is not None and schedule.due_ms else None,
            "kept": schedule is not None and not schedule.due_ms,
            "trouble": channel.trouble,
            "lease_ms": channel.rule.lease_ms,
            "grace_ms": channel.rule.grace_ms,
            "now_ms": now_ms,
        }

    def _member(
        self, channel: Channel, member: Member, needed_from: int, now_ms: int
    ) -> dict[str, Any]:
        topic = channel.topic
        holds = self._hub.leases.holds(channel, member, now_ms)
        at = Position(topic.epoch, *member.confirmed)
        behind = self._store.kept(topic, at)
        return {
            "processor": member.name,
            "present": member.is_present,
            "receive": member.receive.value if member.subscriber is not None else None,
            "new": member.standing is Standing.NEW,
            "cursor": at.offset,
            "number": member.number,
            "lag_messages": behind.records,
            "lag_bytes": behind.bytes,
            "missed_messages": Span.between(at, topic.start).records,
            "leased_until_ms": self._hub.leases.end_ms(channel, member),
            "holds": holds and member.offset <= needed_from < topic.end_offset,
        }


def _topics(store: Store, prefix: str, after: str) -> Iterator[str]:
    last = CHANNEL_PREFIX + after
    while found := store.topics(CHANNEL_PREFIX + prefix, last, _PAGE):
        for topic in found:
            yield topic.name.removeprefix(CHANNEL_PREFIX)
        last = found[-1].name


def _with_members(store: Store, prefix: str, after: str) -> Iterator[str]:
    """Yield the channels with members. A channel that only remembers senders that have left has none."""
    for name in _noted(store, notes.MEMBER, prefix, after):
        if any(member.is_member for member in notes.read_members(store, name)):
            yield name


def _noted(store: Store, kind: bytes, prefix: str, after: str) -> Iterator[str]:
    """Yield each channel with notes of a kind once, and skip its other notes of the kind."""
    start = notes.begin(kind, prefix)
    last = notes.past(kind, after) if after else start
    while found := store.notes(start, last, 1):
        name, _ = notes.channel_of(found[0].key)
        yield name
        last = notes.past(kind, name)
