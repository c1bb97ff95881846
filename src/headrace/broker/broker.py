"""The broker connects publishers and subscriptions through the store. Elsewhere: the bytes on the wire.

It handles batches, not single records. A publish has all records of one read from a connection. A delivery
has all records of one topic that one commit made visible. They are encoded once per protocol for all live
subscriptions.

The broker changes the state of subscriptions:

    locating ──position known──▶ resuming ⇄ live        any ──▶ closed

A *resuming* subscription is behind the end and reads from the log as fast as its sink accepts records. A
*live* subscription is at the end and gets each commit as soon as it is visible. The change from one to the
other happens in one step of the loop, so no record is missed. A live subscription whose sink is full goes
back to resuming: it is late, but it is bounded in memory and loses nothing.
"""

import logging
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import NamedTuple, Protocol

from headrace.log.records import split_records
from headrace.log.store import Appended, ColdError, Reader, Runner, Store, Topic
from headrace.model import CHANNEL_PREFIX, Durability, Position
from headrace.printing import quoted

Encode = Callable[[str, Position, Sequence[bytes], int], bytes]
"""Function that returns a protocol's frames for records.

The arguments are the topic, the position of the first record, the records, and the time when they were
stored, in milliseconds.

An encoding may have a method `takes` with the first three arguments. The broker calls it first, and skips the
encoding if it returns False. Protocols need this if they have many subscriptions and most commits concern few
of them.
"""


class SubscriptionState(Enum):
    LOCATING = "locating"
    RESUMING = "resuming"
    LIVE = "live"
    CLOSED = "closed"


class Slice(NamedTuple):
    """Encoded records, shared by every live subscription of a protocol."""

    end: int
    """Offset just past the records."""
    end_ordinal: int
    data: bytes


class Sink(Protocol):
    """The connection that a subscription's records are sent on."""

    peer: str
    protocol: str

    def attached(self, subscription: "BrokerSubscription", offset: int, exact: bool) -> None:
        """Called when the subscription starts at `offset`. `exact`: the peer asked for this position."""

    def live(self, subscription: "BrokerSubscription") -> None:
        """Called when the subscription has reached the end of the topic."""

    def deliver(self, subscription: "BrokerSubscription", slices: Sequence[Slice]) -> bool:
        """Take live records. Return False if the sink is full: then the subscription resumes where it is."""

    def overtaken(self, subscription: "BrokerSubscription") -> None:
        """Called when the next records are gone. Reading skips them, unless the sink unsubscribes now."""

    def broken(self, subscription: "BrokerSubscription") -> None:
        """Called when an internal error makes further deliveries to the subscription impossible."""

    def ready(self, subscription: "BrokerSubscription") -> None:
        """Called when there are records to pull."""


@dataclass(slots=True, eq=False, repr=False)
class BrokerSubscription:
    topic: Topic
    sink: Sink
    encode: Encode
    offset: int = 0
    """Offset of the next record for the sink."""
    ordinal: int = 0
    """Number of records before `offset`."""
    state: SubscriptionState = SubscriptionState.LOCATING
    reader: Reader | None = None

    @property
    def position(self) -> Position:
        return Position(self.topic.epoch, self.offset, self.ordinal)


logger = logging.getLogger(__name__)

SLICE_BYTES_MAX = 1 << 18
"""Bytes that are encoded and passed on at once: with more, other answers would wait longer behind them."""

SLICE_RECORDS_MAX = 2048
"""Records that are encoded at once: a second limit, for records that are small compared with their frames."""

_Find = Callable[[], tuple[Position, bool]]
"""Function that returns where a subscription starts, and True if the peer asked for this position."""


class Broker:
    """Publishing and subscriptions of all topics. Implements the store's `Listener`."""

    def __init__(self, store: Store, runner: Runner, on_failure: Callable[[str], None]) -> None:
        self.store = store
        self._runner = runner
        self._on_failure = on_failure
        self._live: dict[Topic, dict[Encode, dict[BrokerSubscription, None]]] = {}
        self._subscriptions: dict[Topic, dict[BrokerSubscription, None]] = {}
        self._prepared: dict[tuple[Topic, int, Encode], list[Slice]] = {}
        self.states: Counter[tuple[str, SubscriptionState]] = Counter()
        """Number of open subscriptions, by protocol and state."""
        self.channels: Callable[[Appended], None] = lambda one: None
        """Called with each commit of a channel's log."""
        store.listener = self

    # Publishing

    def publish(self, records: dict[str, list[bytes]], done: Callable[[], None]) -> None:
        """Append records to each topic; `done` is called once, when all of them are durable."""
        topic = self.store.topic
        self.store.append({topic(name): batch for name, batch in records.items()}, done)

    # Subscribing

    def subscribe(
        self, sink: Sink, name: str, offset: int | None, encode: Encode, epoch: int | None = None
    ) -> BrokerSubscription:
        """Follow a topic from an offset, or from its end if `offset` is None.

        With an `epoch`, the offset is of that life of the topic. Creates nothing on disk.
        """
        topic = self.store.topic(name)
        foreign = offset is not None and epoch is not None and not is_of(topic, epoch, offset)
        asked = 0 if foreign else offset

        def find() -> tuple[Position, bool]:
            found = topic.end if asked is None else self.store.locate_offset(topic, asked)
            return found, not foreign and asked in (None, found.offset)

        return self._begin(BrokerSubscription(topic, sink, encode), find)

    def follow(self, sink: Sink, name: str, ordinal: int, encode: Encode) -> BrokerSubscription:
        """Follow a topic from an ordinal; from its start if the topic never reached that ordinal."""
        topic = self.store.topic(name)

        def find() -> tuple[Position, bool]:
            if ordinal > topic.end_ordinal:
                return topic.start, False
            found = self.store.locate_ordinal(topic, ordinal)
            return found, found.ordinal == ordinal

        return self._begin(BrokerSubscription(topic, sink, encode), find)

    def unsubscribe(self, subscription: BrokerSubscription) -> None:
        if subscription.state is SubscriptionState.LIVE:
            self._leave_live(subscription)
        self._change(subscription, SubscriptionState.CLOSED)
        subscription.reader = None
        topic = subscription.topic
        others = self._subscriptions[topic]
        del others[subscription]
        if not others:
            del self._subscriptions[topic]
            self.store.forget(topic)

    def subscriptions(self, topic: Topic) -> list[BrokerSubscription]:
        return list(self._subscriptions.get(topic, ()))

    def pull(self, subscription: BrokerSubscription) -> bytes:
        """Return the next records for a resuming subscription; empty if it is live now or must wait."""
        if subscription.state is not SubscriptionState.RESUMING:
            return b""
        topic = subscription.topic
        if subscription.reader is None:
            subscription.reader = self.store.reader(topic)
        while subscription.offset < topic.end_offset:
            try:
                chunk = subscription.reader.read(subscription.offset, SLICE_BYTES_MAX)
            except ColdError as cold:
                self._warm(cold, subscription, lambda: subscription.sink.ready(subscription))
                return b""
            frames: list[bytes] = []
            encoded_bytes = 0
            for run in chunk.runs:
                if run.offset > subscription.offset:
                    if encoded_bytes:
                        return b"".join(frames)  # records before a gap are delivered first
                    if not _goes_on(subscription):
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
                # None of these records is for this peer. Other peers get their turn before the next read.
                subscription.sink.ready(subscription)
                return b""
            if chunk.next_offset > subscription.offset:
                if not _goes_on(subscription):
                    return b""
                subscription.offset = chunk.next_offset
        self._go_live(subscription)
        return b""

    def _begin(self, subscription: BrokerSubscription, find: _Find) -> BrokerSubscription:
        self._subscriptions.setdefault(subscription.topic, {})[subscription] = None
        self.states[subscription.sink.protocol, SubscriptionState.LOCATING] += 1
        self._locate(subscription, find)
        return subscription

    def _change(self, subscription: BrokerSubscription, state: SubscriptionState) -> None:
        protocol = subscription.sink.protocol
        self.states[protocol, subscription.state] -= 1
        if state is not SubscriptionState.CLOSED:
            self.states[protocol, state] += 1
        subscription.state = state

    def _locate(self, subscription: BrokerSubscription, find: _Find) -> None:
        try:
            found, is_exact = find()
        except ColdError as cold:
            self._warm(cold, subscription, lambda: self._locate(subscription, find))
            return
        subscription.offset, subscription.ordinal = found.offset, found.ordinal
        self._change(subscription, SubscriptionState.RESUMING)
        subscription.sink.attached(subscription, found.offset, is_exact)
        if found.offset >= subscription.topic.end_offset:
            self._go_live(subscription)
        else:
            subscription.sink.ready(subscription)

    def _warm(
        self, cold: ColdError, subscription: BrokerSubscription, then: Callable[[], None]
    ) -> None:
        """Read from the disk in a thread, then continue, unless the subscription's state has changed."""
        state = subscription.state

        def warmed(_: object) -> None:
            if subscription.state is state:
                then()

        self._runner.background(cold.warm, warmed)

    def _go_live(self, subscription: BrokerSubscription) -> None:
        self._change(subscription, SubscriptionState.LIVE)
        subscription.reader = None
        topic = subscription.topic
        subscription.offset = max(subscription.offset, topic.end_offset)
        subscription.ordinal = max(subscription.ordinal, topic.end_ordinal)
        live = self._live.setdefault(topic, {})
        live.setdefault(subscription.encode, {})[subscription] = None
        subscription.sink.live(subscription)

    def _leave_live(self, subscription: BrokerSubscription) -> None:
        live = self._live[subscription.topic]
        group = live[subscription.encode]
        del group[subscription]
        if not group:
            del live[subscription.encode]
            if not live:
                del self._live[subscription.topic]

    # Calls from the store

    def prepare(self, appended: Sequence[Appended]) -> None:
        """Encode deliveries while the commit is being written."""
        live = self._live
        for one in appended:
            if one.topic in live:
                for encode in live[one.topic]:
                    # An encoding that fails here fails again in `committed`, which reports the error.
                    with suppress(Exception):
                        if _takes(encode, one):
                            self._prepared[one.topic, one.offset, encode] = _slices(one, encode)

    def committed(self, appended: Sequence[Appended]) -> bool:
        prepared = self._prepared
        delivered = False
        for one in appended:
            if one.topic.name.startswith(CHANNEL_PREFIX):
                try:
                    self.channels(one)
                except Exception:
                    logger.exception("internal error in topic %s", quoted(one.topic.name))
            live = self._live.get(one.topic)
            if not live:
                continue
            for encode, group in list(live.items()):
                try:
                    slices = prepared.pop((one.topic, one.offset, encode), None)
                    if slices is None and _takes(encode, one):
                        slices = _slices(one, encode)
                except Exception:
                    self._break(list(group))
                    continue
                if slices is None:
                    self._pass(one, group)
                else:
                    self._deliver(one, list(group), slices)
                    delivered = True
        prepared.clear()
        return delivered

    def _break(self, group: list[BrokerSubscription]) -> None:
        """Report to these sinks that encoding failed. Other subscriptions must not suffer from this."""
        for subscription in group:
            peer = subscription.sink.peer
            logger.error("%s: internal error in a delivery", peer, exc_info=sys.exc_info())
            subscription.sink.broken(subscription)

    def _pass(self, one: Appended, group: Iterable[BrokerSubscription]) -> None:
        """Advance subscriptions for which a commit has no records."""
        end_ordinal = one.ordinal + len(one.records)
        for subscription in group:
            if subscription.offset == one.offset:
                subscription.offset, subscription.ordinal = one.end, end_ordinal

    def _deliver(self, one: Appended, group: list[BrokerSubscription], slices: list[Slice]) -> None:
        for subscription in group:
            # A subscription that became live during this step has these records already.
            if (
                subscription.state is not SubscriptionState.LIVE
                or subscription.offset != one.offset
            ):
                continue
            try:
                taken = subscription.sink.deliver(subscription, slices)
            except Exception:
                # Other live subscriptions must get these records now. This one reads them from the log.
                logger.exception("%s: internal error in a delivery", subscription.sink.peer)
                taken = False
            if not taken:
                self._leave_live(subscription)
                self._change(subscription, SubscriptionState.RESUMING)
                subscription.sink.ready(subscription)

    def failed(self, reason: str) -> None:
        self._on_failure(reason)


def _goes_on(subscription: BrokerSubscription) -> bool:
    """Return True if the sink wants the records after a gap of lost or deleted records."""
    subscription.sink.overtaken(subscription)
    return subscription.state is SubscriptionState.RESUMING


def is_of(topic: Topic, epoch: int, offset: int) -> bool:
    """Return True if an offset in the given life of a topic means the same place in its present life."""
    if epoch == topic.epoch:
        return True
    # Offsets of a topic on disk continue from one life to the next. So a subscriber from the end of an
    # earlier life, or from before the first life, is at the start of this life and has missed nothing.
    began_here = epoch < topic.epoch and offset == topic.start_offset
    return began_here and topic.durability is not Durability.MEMORY


def _takes(encode: Encode, one: Appended) -> bool:
    """Return True if a commit has records for subscriptions with this encoding."""
    takes = getattr(encode, "takes", None)
    if takes is None:
        return True
    at = Position(one.topic.epoch, one.offset, one.ordinal)
    return bool(takes(one.topic.name, at, one.records))


def _slices(one: Appended, encode: Encode) -> list[Slice]:
    """Encode a commit's records of one topic."""
    name, records = one.topic.name, one.records
    if type(records) is not list:
        records = list(records)  # records of a batch are split here, once
    if one.end - one.offset <= SLICE_BYTES_MAX and len(records) <= SLICE_RECORDS_MAX:
        at = Position(one.topic.epoch, one.offset, one.ordinal)
        data = encode(name, at, records, one.ms)
        return [Slice(one.end, one.ordinal + len(records), data)]
    slices: list[Slice] = []
    starts = list(accumulate(map(len, records), initial=one.offset))
    first = 0
    while first < len(records):
        last = max(first + 1, bisect_right(starts, starts[first] + SLICE_BYTES_MAX) - 1)
        last = min(last, first + SLICE_RECORDS_MAX, len(records))
        at = Position(one.topic.epoch, starts[first], one.ordinal + first)
        data = encode(name, at, records[first:last], one.ms)
        slices.append(Slice(starts[last], one.ordinal + last, data))
        first = last
    return slices
