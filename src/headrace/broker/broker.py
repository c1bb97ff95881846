"""The broker: joins publishers and subscriptions through the store. Decides nothing about bytes on a wire.

Batches cross it, records do not: a publish is everything one read brought, a delivery everything one commit
made visible on one topic, encoded once per protocol for all who are live.
"""

import logging
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate

from headrace.broker.subscription import Encode, Sink, Slice, State, Subscription
from headrace.log.records import split_records
from headrace.log.runner import Runner
from headrace.log.store import Appended, ColdError, Store, Topic
from headrace.model import CHANNEL_PREFIX, Durability, Position
from headrace.printing import quoted

logger = logging.getLogger(__name__)

SLICE_BYTES_MAX = 1 << 18
"""How much is encoded and handed on at once: more would keep other answers waiting behind it."""

SLICE_RECORDS_MAX = 2048
"""The same for records that are small beside the frames around them."""

_Live = dict[Encode, dict[Subscription, None]]


class Broker:
    """Implements the store's `Listener`."""

    def __init__(self, store: Store, runner: Runner, on_failure: Callable[[str], None]) -> None:
        self.store = store
        self._runner = runner
        self._on_failure = on_failure
        self._live: dict[Topic, _Live] = {}
        self._subscriptions: dict[Topic, dict[Subscription, None]] = {}
        self._prepared: dict[tuple[Topic, int, Encode], list[Slice]] = {}
        self.channels: Callable[[Appended], None] = lambda one: None
        """Who hears of what comes to the logs of channels."""
        store.listener = self

    # Publishing

    def publish(self, records: dict[str, list[bytes]], done: Callable[[], None]) -> None:
        """Append to every topic; `done` is called once, when all of it is durable."""
        topic = self.store.topic
        self.store.append({topic(name): batch for name, batch in records.items()}, done)

    # Subscribing

    def subscribe(
        self,
        sink: Sink,
        name: str,
        offset: int | None,
        encode: Encode,
        epoch: int | None = None,
    ) -> Subscription:
        """Follow a topic from an offset (of a life of it, where `epoch` says so), or from its end.

        Makes nothing on disk.
        """
        topic = self.store.topic(name)
        subscription = Subscription(topic, sink, encode)
        self._subscriptions.setdefault(topic, {})[subscription] = None
        foreign = offset is not None and epoch is not None and not _is_of(topic, epoch, offset)
        asked = 0 if foreign else offset

        def find() -> Position:
            return topic.end if asked is None else self.store.locate_offset(topic, asked)

        self._locate(
            subscription, find, lambda found: not foreign and asked in (None, found.offset)
        )
        return subscription

    def follow(self, sink: Sink, name: str, ordinal: int, encode: Encode) -> Subscription:
        """The same from behind so many records; one that was never reached means: all that is kept."""
        topic = self.store.topic(name)
        subscription = Subscription(topic, sink, encode)
        self._subscriptions.setdefault(topic, {})[subscription] = None

        def find() -> Position:
            if ordinal > topic.end_ordinal:
                return topic.start
            return self.store.locate_ordinal(topic, ordinal)

        self._locate(subscription, find, lambda found: found.ordinal == ordinal)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        if subscription.state is State.LIVE:
            self._leave_live(subscription)
        subscription.state = State.CLOSED
        subscription.reader = None
        topic = subscription.topic
        others = self._subscriptions[topic]
        del others[subscription]
        if not others:
            del self._subscriptions[topic]
            self.store.forget(topic)

    def subscriptions(self, topic: Topic) -> list[Subscription]:
        return list(self._subscriptions.get(topic, ()))

    def pull(self, subscription: Subscription) -> bytes:
        """The next records for a resuming subscription; empty when it has become live or must wait."""
        if subscription.state is not State.RESUMING:
            return b""
        topic = subscription.topic
        if subscription.reader is None:
            subscription.reader = self.store.reader(topic)
        while subscription.offset < topic.end_offset:
            try:
                chunk = subscription.reader.read(subscription.offset, SLICE_BYTES_MAX)
            except ColdError as cold:
                self._warm(subscription, cold)
                return b""
            frames: list[bytes] = []
            encoded_bytes = 0
            for run in chunk.runs:
                if run.offset > subscription.offset and encoded_bytes:
                    return b"".join(frames)  # what lies before a gap is delivered first
                if run.offset > subscription.offset and not _goes_on(subscription):
                    return b""
                records = split_records(run.data, run.record_count)
                at = Position(topic.epoch, run.offset, run.ordinal)
                try:
                    frames.append(subscription.encode(topic.name, at, records, run.ms))
                except Exception:
                    self._break([subscription])
                    return b""
                subscription.offset = run.end
                subscription.ordinal = run.ordinal + run.record_count
                encoded_bytes += len(frames[-1])
                if encoded_bytes > SLICE_BYTES_MAX:
                    break
            if encoded_bytes:
                return b"".join(frames)
            if frames:
                # None of them is for this peer: the next are looked at when others had their turn.
                subscription.sink.ready(subscription)
                return b""
            if chunk.next_offset > subscription.offset:
                if not _goes_on(subscription):
                    return b""
                subscription.offset = chunk.next_offset
        self._go_live(subscription)
        return b""

    def _locate(
        self,
        subscription: Subscription,
        find: Callable[[], Position],
        is_exact: Callable[[Position], bool],
    ) -> None:
        try:
            found = find()
        except ColdError as cold:
            self._runner.background(
                cold.warm,
                lambda _: (
                    self._locate(subscription, find, is_exact)
                    if subscription.state is State.LOCATING
                    else None
                ),
            )
            return
        subscription.offset, subscription.ordinal = found.offset, found.ordinal
        subscription.state = State.RESUMING
        subscription.sink.attached(subscription, found.offset, is_exact(found))
        if found.offset >= subscription.topic.end_offset:
            self._go_live(subscription)
        else:
            subscription.sink.ready(subscription)

    def _warm(self, subscription: Subscription, cold: ColdError) -> None:
        def warmed(_: object) -> None:
            if subscription.state is State.RESUMING:
                subscription.sink.ready(subscription)

        self._runner.background(cold.warm, warmed)

    def _go_live(self, subscription: Subscription) -> None:
        subscription.state = State.LIVE
        subscription.reader = None
        topic = subscription.topic
        subscription.offset = max(subscription.offset, topic.end_offset)
        subscription.ordinal = max(subscription.ordinal, topic.end_ordinal)
        live = self._live.setdefault(topic, {})
        live.setdefault(subscription.encode, {})[subscription] = None
        subscription.sink.live(subscription)

    def _leave_live(self, subscription: Subscription) -> None:
        live = self._live[subscription.topic]
        group = live[subscription.encode]
        del group[subscription]
        if not group:
            del live[subscription.encode]
            if not live:
                del self._live[subscription.topic]

    # What the store says

    def prepare(self, appended: Sequence[Appended]) -> None:
        """Encode while the disk is busy."""
        live = self._live
        for one in appended:
            if one.topic in live:
                for encode in live[one.topic]:
                    # What fails here fails once more when it is to be delivered, and is told then.
                    with suppress(Exception):
                        if _takes(encode, one):
                            made = list(_slices(one, encode))
                            self._prepared[one.topic, one.offset, encode] = made

    def committed(self, appended: Sequence[Appended]) -> None:
        prepared = self._prepared
        for one in appended:
            if one.topic.name.startswith(CHANNEL_PREFIX):
                self._tell_channel(one)
            live = self._live.get(one.topic)
            if live:
                for encode, group in list(live.items()):
                    try:
                        slices = prepared.pop((one.topic, one.offset, encode), None)
                        if slices is None and _takes(encode, one):
                            slices = list(_slices(one, encode))
                    except Exception:
                        self._break(list(group))
                        continue
                    if slices is None:
                        self._pass(one, group)
                    else:
                        self._deliver(one, list(group), slices)
        prepared.clear()

    def _tell_channel(self, one: Appended) -> None:
        try:
            self.channels(one)
        except Exception:
            logger.exception("internal error in topic %s", quoted(one.topic.name))

    def _break(self, group: list[Subscription]) -> None:
        """The others must not suffer from what cannot be encoded for these."""
        for subscription in group:
            peer = subscription.sink.peer
            logger.error("%s: internal error in a delivery", peer, exc_info=sys.exc_info())
            subscription.sink.broken(subscription)

    def _pass(self, one: Appended, group: Iterable[Subscription]) -> None:
        """None of it is for these."""
        end_ordinal = one.ordinal + len(one.records)
        for subscription in group:
            if subscription.offset == one.offset:
                subscription.offset, subscription.ordinal = one.end, end_ordinal

    def _deliver(self, one: Appended, group: list[Subscription], slices: list[Slice]) -> None:
        for subscription in group:
            # One that caught up inside this very step has these already.
            if subscription.state is not State.LIVE or subscription.offset != one.offset:
                continue
            try:
                taken = subscription.sink.deliver(subscription, slices)
            except Exception:
                # The others are live and must get these now; this one reads them from the log.
                logger.exception("%s: internal error in a delivery", subscription.sink.peer)
                taken = False
            if not taken:
                self._leave_live(subscription)
                subscription.state = State.RESUMING
                subscription.sink.ready(subscription)

    def failed(self, reason: str) -> None:
        self._on_failure(reason)


def _goes_on(subscription: Subscription) -> bool:
    """Whether the sink wants what lies behind records that are gone."""
    subscription.sink.overtaken(subscription)
    return subscription.state is State.RESUMING


def _is_of(topic: Topic, epoch: int, offset: int) -> bool:
    """Whether an offset of that life of the topic means the same place in its present one."""
    if epoch == topic.epoch:
        return True
    # Offsets of a topic on disk go on from life to life: who was at the end of an earlier one, or came
    # before the first, is at the beginning of this one and has missed nothing.
    began_here = epoch < topic.epoch and offset == topic.start_offset
    return began_here and topic.durability is not Durability.MEMORY


def _takes(encode: Encode, one: Appended) -> bool:
    """Whether a commit has anything for those with this encoding."""
    takes = getattr(encode, "takes", None)
    if takes is None:
        return True
    at = Position(one.topic.epoch, one.offset, one.ordinal)
    return bool(takes(one.topic.name, at, one.records))


def _slices(one: Appended, encode: Encode) -> Iterator[Slice]:
    """A commit's records of one topic, encoded in portions."""
    name, records = one.topic.name, one.records
    if type(records) is not list:
        records = list(records)  # those of a batch: split once
    if one.end - one.offset <= SLICE_BYTES_MAX and len(records) <= SLICE_RECORDS_MAX:
        at = Position(one.topic.epoch, one.offset, one.ordinal)
        data = encode(name, at, records, one.ms)
        yield Slice(one.end, one.ordinal + len(records), data)
        return
    starts = list(accumulate(map(len, records), initial=one.offset))
    first = 0
    while first < len(records):
        last = max(first + 1, bisect_right(starts, starts[first] + SLICE_BYTES_MAX) - 1)
        last = min(last, first + SLICE_RECORDS_MAX, len(records))
        at = Position(one.topic.epoch, starts[first], one.ordinal + first)
        data = encode(name, at, records[first:last], one.ms)
        yield Slice(starts[last], one.ordinal + last, data)
        first = last
