"""All channels of a server: those that are in memory, and what happens to any of them by the clock.

A channel is in memory while someone is there or something of it is under way; everything else is read from
its notes when it is asked for. Nothing is done per channel and second: notes have a time when they are due.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from headrace.broker import channel_jobs as jobs
from headrace.broker import channel_notes as notes
from headrace.broker.channel import Channel
from headrace.broker.channel_errors import ChannelError
from headrace.broker.channel_joining import Joining
from headrace.broker.channel_member import Member, Subscriber
from headrace.broker.channel_notes import Snapshot
from headrace.broker.channel_state import ChannelState
from headrace.broker.snapshots import Older, Snapshots
from headrace.broker.state import NOTHING, RecentStates, load_state
from headrace.errors import BadTopicNameError
from headrace.log.runner import Runner
from headrace.log.store import Appended, ColdError, Note, Store
from headrace.model import CHANNEL_PREFIX, RESERVED_TOPIC_BYTES_MAX, check_topic_name
from headrace.reducers import Reducer

_NAME_BYTES_MAX = RESERVED_TOPIC_BYTES_MAX - len(CHANNEL_PREFIX)

_LOOKED_AT_ONCE = 100
"""Channels, and notes that are due, that are looked at in one step."""


LOOK_MS = 500
"""How often the log of a channel may be trimmed: many messages at once cost less for each, and soon enough
that most are trimmed before they leave the journal."""


_EXPIRY_MS_MAX = 3_600_000
"""Time between two rounds in which snapshots are looked at."""


class ChannelRule(NamedTuple):
    """What the configuration says of a channel."""

    reducer: Reducer
    lease_ms: int
    grace_ms: int
    presence_ms: int
    wait_for: Sequence[str] = ()
    persist: bool = True
    """Whether the last state outlives the log."""


class Channels:
    def __init__(
        self,
        store: Store,
        runner: Runner,
        snapshots: Snapshots,
        rule: Callable[[str], ChannelRule],
        clock_ms: Callable[[], int],
        *,
        elapsed_ms: Callable[[], int],
        members_max: int,
        remember_ms: int,
        look_ms: int = LOOK_MS,
        snapshot_age_ms: int = 0,
        count: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Times on disk are of `clock_ms`, which may be set; durations in memory are of `elapsed_ms`.

        `count` is told the names of counters, as something happens that operators count.
        """
        self.store = store
        self.runner = runner
        self.snapshots = snapshots
        self.rule = rule
        self.clock_ms = clock_ms
        self._elapsed_ms = elapsed_ms
        self.members_max = members_max
        self.remember_ms = remember_ms
        self._look_ms = look_ms
        self.snapshot_age_ms = snapshot_age_ms
        """The age at which the last state of a channel without a log is forgotten; 0: never."""
        self._expiry = _Expiry(self, elapsed_ms) if snapshot_age_ms else None
        self.count = count
        self.recent_states = RecentStates()
        self._known: dict[str, Channel] = {}
        self._changed: dict[ChannelState, None] = {}
        """Channels of whose logs someone may need less than before."""
        self._looking = False
        self._looked_ms = elapsed_ms() - look_ms
        self._troubled: dict[ChannelState, None] = {}
        """Channels that could not be trimmed, until they are looked at again, all at once."""
        self._again_ms = 0
        self._pollers: OrderedDict[tuple[Joining, str], int] = OrderedDict()
        """Members that are there by their requests, and until when, by `elapsed_ms`."""
        self._swept: str | None = ""
        """The last topic that was looked at after the start."""
        self._sweep_ms = self.now_ms = clock_ms()
        """The time of the last tick: near enough for when a member was seen, and one number for many."""
        self.started_ms = self.now_ms
        """When this server started, or had its clock set back."""

    def reload(self) -> None:
        """Give the channels in memory their rules anew, after the settings have changed."""
        for name, channel in self._known.items():
            channel.rule = self.rule(name)

    def get(self, name: str) -> Channel:
        """Raises ChannelError for what cannot be a channel's name."""
        channel = self._known.get(name)
        if channel is None:
            check_channel_name(name)
            channel = self._known[name] = Channel(name, self)
        return channel

    @staticmethod
    def topic_name(name: str) -> str:
        return CHANNEL_PREFIX + name

    def committed(self, one: Appended) -> None:
        """The log of a channel is longer."""
        channel = self._known.get(one.topic.name.removeprefix(CHANNEL_PREFIX))
        if channel is not None:
            channel.committed(one)

    def load_snapshot(
        self,
        name: str,
        done: Callable[[Snapshot | None], None],
        failed: Callable[[str], None],
    ) -> None:
        """Load the state of a channel as of now, for someone else: it is given when it is durable."""
        channel = self.get(name)
        if channel.hold(lambda: self.load_snapshot(name, done, failed)):
            return

        def made(state: Snapshot) -> None:
            channel.after_changes(lambda: done(None if state.content is NOTHING else state))
            channel.job_done()

        def not_made(reason: str) -> None:
            failed(reason)
            channel.job_done()

        channel.is_busy = True
        load_state(channel, made, not_made)

    def lost(self, subscriber: Subscriber, processor: str, joined: Mapping[str, Channel]) -> None:
        """A connection has ended; a few channels a step, so that nobody waits for thousands of them."""
        rest = iter(list(joined.values()))

        def some() -> None:
            for channel in islice(rest, _LOOKED_AT_ONCE):
                channel.gone(processor, subscriber)
                self.rest(channel)
            following = next(rest, None)
            if following is not None:
                following.gone(processor, subscriber)
                self.rest(following)
                self.runner.soon(some)

        some()

    def tick(self) -> None:
        """Called a few times a second."""
        now_ms = self.now_ms = self.clock_ms()
        elapsed_ms = self._elapsed_ms()
        while self._pollers and next(iter(self._pollers.values())) <= elapsed_ms:
            (channel, processor), _ = self._pollers.popitem(last=False)
            channel.stopped_polling(processor)
            self.rest(channel)
        for note in self.store.due_notes(now_ms, _LOOKED_AT_ONCE):
            self._due(note, now_ms)
        if self._troubled and elapsed_ms >= self._again_ms:
            self._changed |= self._troubled
            self._troubled = {}
        if self._changed and not self._looking and elapsed_ms - self._looked_ms >= self._look_ms:
            self._looking, self._looked_ms = True, elapsed_ms
            self._look(iter(list(self._changed)))
        self._sweep()
        if self._expiry is not None:
            self._expiry.tick()

    def _look(self, changed: Iterator[ChannelState]) -> None:
        """A few a step, so that nobody waits for thousands of them; each once between two ticks."""
        some = list(islice(changed, _LOOKED_AT_ONCE))
        for channel in some:
            del self._changed[channel]
            jobs.look(channel, self.now_ms)
            self.rest(channel)
        self._looking = bool(some)
        if some:
            self.runner.soon(lambda: self._look(changed))

    # What channels ask for

    def look_later(self, channel: ChannelState) -> None:
        """Someone may need less of its log than before."""
        self._changed[channel] = None

    def readers_moved(self, topics: Iterable[str]) -> None:
        """Cursors have moved there that may be waited for."""
        for topic in topics:
            name = topic.removeprefix(CHANNEL_PREFIX)
            if name and name != topic and self.rule(name).wait_for:
                self.look_later(self.get(name))

    def look_again(self, channel: ChannelState, wait_ms: int) -> None:
        """What was not possible may be so later."""
        if not self._troubled:
            self._again_ms = self._elapsed_ms() + wait_ms
        self._troubled[channel] = None

    def polled(self, channel: Joining, member: Member) -> None:
        """A member is there by a request, for a while."""
        member.is_polling = True
        key = channel, member.name
        self._pollers.pop(key, None)
        self._pollers[key] = self._elapsed_ms() + channel.rule.presence_ms

    def rest(self, channel: ChannelState) -> None:
        """Let go of a channel that is only on disk."""
        is_over = channel.is_idle and channel not in self._changed
        # Another of the same name may have taken its place.
        if is_over and self._known.get(channel.name) is channel:
            del self._known[channel.name]
            self.recent_states.drop(channel)
            self.store.forget(channel.topic)

    def warm(self, cold: ColdError, then: Callable[[], None]) -> None:
        self.runner.background(cold.warm, lambda _: then())

    # By the clock

    def _due(self, note: Note, now_ms: int) -> None:
        name, processor = notes.channel_of(note.key)
        kind = note.key[:2]
        channel = self.get(name)
        if kind == notes.MEMBER:
            member = channel.members.get(processor)
            if member is not None:
                channel.renew(member, now_ms)
        elif kind == notes.SCHEDULE:
            if not channel.is_busy:
                jobs.look(channel, now_ms)
        elif kind == notes.END:
            channel.change(lambda: None, changed=[Note(note.key, None)])
        self.rest(channel)

    def went_back(self) -> None:
        """The clock was set back: times that lie in the future now are put right, channel by channel."""
        self._swept = ""
        self._sweep_ms = self.now_ms = self.started_ms = self.clock_ms()

    def _sweep(self) -> None:
        """Channels that were not empty when the last server ended are so now, until someone comes back.

        What the last one has noted with a clock that was ahead must not hold their logs for as long.
        """
        if self._swept is None:
            return
        found = self.store.topics(CHANNEL_PREFIX, self._swept, _LOOKED_AT_ONCE)
        for topic in found:
            name = topic.name.removeprefix(CHANNEL_PREFIX)
            channel = self.get(name)
            # One that is being destroyed has no date any more.
            if not (channel.present or channel.schedule or channel.is_busy):
                channel.plan_destruction(self._sweep_ms + channel.rule.grace_ms)
            channel.forget_future(self._sweep_ms)
            self.rest(channel)
            self._swept = topic.name
        if not found:
            self._swept = None


class _Expiry:
    """Looks at all snapshots in rounds, a few of them a tick, and has old ones forgotten."""

    def __init__(self, hub: Channels, elapsed_ms: Callable[[], int]) -> None:
        self._hub = hub
        self._elapsed_ms = elapsed_ms
        self._next_ms = elapsed_ms()
        self._after = ""
        self._is_asking = False

    def tick(self) -> None:
        if self._is_asking or self._elapsed_ms() < self._next_ms:
            return
        self._is_asking = True
        hub = self._hub
        before_ms = hub.clock_ms() - hub.snapshot_age_ms

        def found(older: Older) -> None:
            self._is_asking = False
            for name in older.channels:
                channel = hub.get(name)
                jobs.expire(channel, before_ms)
                hub.rest(channel)
            self._after = older.after or ""
            if older.after is None:
                self._pause()

        def failed(_: str) -> None:
            self._is_asking = False
            self._pause()

        hub.snapshots.older(before_ms, self._after, found, failed)

    def _pause(self) -> None:
        self._next_ms = self._elapsed_ms() + min(_EXPIRY_MS_MAX, self._hub.snapshot_age_ms)


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
