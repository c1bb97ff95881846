"""All channels of a server: the channels in memory, and the work on channels that is due by the clock.

A channel is in memory while a member is present or work is in progress. Otherwise it is read from its notes
when it is needed. There is no periodic work for each channel: notes have a time when they are due.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from headrace.broker.channel import notes as notes
from headrace.broker.channel import trimming as jobs
from headrace.broker.channel.channel import Channel
from headrace.broker.channel.core import ChannelState
from headrace.broker.channel.joining import Joining
from headrace.broker.channel.member import Member, MemberConnection
from headrace.broker.channel.notes import StoredSnapshot
from headrace.broker.channel.snapshots import Older, Snapshots
from headrace.broker.channel.state import NOTHING, RecentStates, load_state
from headrace.errors import BadTopicNameError, ChannelError
from headrace.log.runner import Runner
from headrace.log.store import Appended, ColdError, Note, Store
from headrace.model import CHANNEL_PREFIX, RESERVED_TOPIC_BYTES_MAX, check_topic_name
from headrace.payload.reducers import Reducer

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


class ChannelRule(NamedTuple):
    """Configuration of one channel."""

    reducer: Reducer
    lease_ms: int
    grace_ms: int
    presence_ms: int
    wait_for: Sequence[str] = ()
    persist: bool = True
    """True if the last state outlives the log."""


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
        """Times on disk come from `clock_ms`, which may be set; durations in memory come from `elapsed_ms`.

        `count` is called with the name of a counter to increment it.
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
        """Age at which the last state of a channel without a log is forgotten; 0: never."""
        self._expiry = _Expiry(self, elapsed_ms) if snapshot_age_ms else None
        self.count = count
        self.recent_states = RecentStates()
        self._known: dict[str, Channel] = {}
        self._changed: dict[ChannelState, None] = {}
        """Channels whose logs may have become less needed, and may be trimmed."""
        self._looking = False
        self._looked_ms = elapsed_ms() - look_ms
        self._troubled: dict[ChannelState, None] = {}
        """Channels that could not be trimmed. All of them are retried at the same time, at `_again_ms`."""
        self._again_ms = 0
        self._pollers: OrderedDict[tuple[Joining, str], int] = OrderedDict()
        """Members that are present because of requests, with the time by `elapsed_ms` when that ends."""
        self._swept: str | None = ""
        """Last topic that the sweep after a start has handled; None when the sweep is complete."""
        self._sweep_ms = self.now_ms = clock_ms()
        """Time of the last tick. It is exact enough for `seen_ms`, and many members share the int object."""
        self.started_ms = self.now_ms
        """Time when this server started, or when its clock was last set back."""

    def reload(self) -> None:
        """Update the rules of the channels in memory after the settings have changed."""
        for name, channel in self._known.items():
            channel.rule = self.rule(name)

    def get(self, name: str) -> Channel:
        """Return the channel with this name. Raises ChannelError if the name is invalid."""
        channel = self._known.get(name)
        if channel is None:
            check_channel_name(name)
            channel = self._known[name] = Channel(name, self)
        return channel

    @staticmethod
    def topic_name(name: str) -> str:
        return CHANNEL_PREFIX + name

    def committed(self, one: Appended) -> None:
        """Pass new records to their channel if it is in memory."""
        channel = self._known.get(one.topic.name.removeprefix(CHANNEL_PREFIX))
        if channel is not None:
            channel.committed(one)

    def load_snapshot(
        self,
        name: str,
        done: Callable[[StoredSnapshot | None], None],
        failed: Callable[[str], None],
    ) -> None:
        """Load the present state for a caller outside the channel; `done` gets it when it is durable."""
        channel = self.get(name)
        if channel.hold(lambda: self.load_snapshot(name, done, failed)):
            return

        def made(state: StoredSnapshot) -> None:
            channel.after_changes(lambda: done(None if state.content is NOTHING else state))
            channel.job_done()

        def not_made(reason: str) -> None:
            failed(reason)
            channel.job_done()

        channel.is_busy = True
        load_state(channel, made, not_made)

    def lost(
        self, subscriber: MemberConnection, processor: str, joined: Mapping[str, Channel]
    ) -> None:
        """Handle the end of a connection that joined channels.

        Each step handles a few channels, so that other work does not wait for thousands.
        """
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
        """Do the work that is due; called a few times a second."""
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
        """Trim or destroy changed channels, each once between two ticks.

        Each step handles a few channels, so that other work does not wait for thousands.
        """
        some = list(islice(changed, _LOOKED_AT_ONCE))
        for channel in some:
            del self._changed[channel]
            jobs.look(channel, self.now_ms)
            self.rest(channel)
        self._looking = bool(some)
        if some:
            self.runner.soon(lambda: self._look(changed))

    # Requests from channels

    def look_later(self, channel: ChannelState) -> None:
        """Look at a channel soon, because its log may be less needed than before."""
        self._changed[channel] = None

    def readers_moved(self, topics: Iterable[str]) -> None:
        """Look at channels soon whose trimming may have waited for the cursors that moved in these topics."""
        for topic in topics:
            name = topic.removeprefix(CHANNEL_PREFIX)
            if name and name != topic and self.rule(name).wait_for:
                self.look_later(self.get(name))

    def look_again(self, channel: ChannelState, wait_ms: int) -> None:
        """Retry a failed trim later: with all other failed ones, `wait_ms` after the first of them."""
        if not self._troubled:
            self._again_ms = self._elapsed_ms() + wait_ms
        self._troubled[channel] = None

    def polled(self, channel: Joining, member: Member) -> None:
        """Count a member as present for a while because of its request."""
        member.is_polling = True
        key = channel, member.name
        self._pollers.pop(key, None)
        self._pollers[key] = self._elapsed_ms() + channel.rule.presence_ms

    def rest(self, channel: ChannelState) -> None:
        """Drop a channel from memory if everything about it is on disk."""
        is_over = channel.is_idle and channel not in self._changed
        # Another object for the same channel may have taken its place.
        if is_over and self._known.get(channel.name) is channel:
            del self._known[channel.name]
            self.recent_states.drop(channel)
            self.store.forget(channel.topic)

    def warm(self, cold: ColdError, then: Callable[[], None]) -> None:
        self.runner.background(cold.warm, lambda _: then())

    # Work that is due by the clock

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
        """Correct times that lie in the future, channel by channel, after the clock was set back."""
        self._swept = ""
        self._sweep_ms = self.now_ms = self.started_ms = self.clock_ms()

    def _sweep(self) -> None:
        """Plan the destruction of channels that had members present when the last server ended.

        No member is present now until one comes back. Times that the last server noted with a clock that was
        ahead are corrected, because they would hold the logs for too long.
        """
        if self._swept is None:
            return
        found = self.store.topics(CHANNEL_PREFIX, self._swept, _LOOKED_AT_ONCE)
        for topic in found:
            name = topic.name.removeprefix(CHANNEL_PREFIX)
            channel = self.get(name)
            # A channel that is being destroyed has no schedule any more.
            if not (channel.present or channel.schedule or channel.is_busy):
                channel.plan_destruction(self._sweep_ms + channel.rule.grace_ms)
            channel.forget_future(self._sweep_ms)
            self.rest(channel)
            self._swept = topic.name
        if not found:
            self._swept = None


class _Expiry:
    """Checks all snapshots in rounds, a few of them per tick, and has old ones deleted."""

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
