"""One Logux log: every event is stored once, however often it comes and from any client. No connections here.

An event is identified by the time it was made. An event that is newer than the latest of its host is new
without a lookup. Other events are looked up in the table of ids. The table is updated from the records and is
a little behind them; the ids that it lacks are kept here in memory. Only one job uses the table at a time, so
its answers are never out of date.

    waiting ──all ids are known──▶ appended ──commit──▶ done
"""

import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from headrace.broker.logux.event_ids import EventIds, EventIdsError, Known, Time
from headrace.errors import StoreFailedError
from headrace.log.records import pack_record, split_records
from headrace.log.store import (
    BatchPart,
    Block,
    ColdError,
    Reader,
    Run,
    Runner,
    Store,
    Topic,
    add_in_portions,
    countdown,
)
from headrace.model import RECORD_HEADER_BYTES, Durability, Position
from headrace.payload.logux import (
    BadEnvelopeError,
    Created,
    Envelope,
    Stamp,
    created_of,
    decode_envelope,
    encode_envelope,
    key_of,
    stamp_of,
)
from headrace.printing import quoted

logger = logging.getLogger(__name__)

T = TypeVar("T")

HOSTS_MAX = 100_000
"""Hosts whose latest event is kept in memory, so that the table need not be asked."""

RECENT_MAX = 200_000
"""Events that the table may lack. If it lacks more, further events wait."""

INDEXED_AT_ONCE = 4096
"""Number of events missing in the table at which they are added without waiting for the next tick."""

_LOOKED_UP_MAX = 5000
_READ_BYTES = 1 << 20


class NewEvent(NamedTuple):
    """An event to store, unless the log has it already."""

    payload: bytes
    key: bytes
    stamp: Stamp | None

    @classmethod
    def of(cls, payload: bytes, created: Created) -> "NewEvent":
        return cls(payload, key_of(created), stamp_of(created))


class _Question(NamedTuple):
    """A request for the ordinal of an event."""

    keys: Sequence[bytes]
    """Possible keys of the event."""
    end: int
    """Offset up to which the table must have all records before the lookup."""
    answer: Callable[[int | None], None]


class LoguxLog:
    def __init__(
        self,
        topic: Topic,
        store: Store,
        runner: Runner,
        ids: EventIds,
        repeated: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`repeated` is called with the number of events that the log has already."""
        self.topic = topic
        self._name = topic.name
        self._repeated = repeated
        self._store = store
        self._runner = runner
        self._ids = ids
        self._generation = -1
        self._life = 0
        """The topic's id, which changes when the topic is created again."""
        self._ready = False
        """True once the table has caught up with the records since it was opened."""
        self._busy = False
        """True while a job on the table is running."""
        self._reader: Reader | None = None
        self._indexed = topic.start
        """Position up to which the table has the records."""
        self._forgotten = 0
        self._waiting: deque[tuple[Sequence[NewEvent], Callable[[], None]]] = deque()
        self._questions: list[_Question] = []
        self._recent: dict[bytes, int] = {}
        """Keys of events that the table lacks, each with the number of its append."""
        self._latest: OrderedDict[bytes, Time] = OrderedDict()
        self._found: dict[bytes, int | None] = {}
        """Ordinals found by lookups since the table was last extended; None for unknown keys."""
        self._appended = self._durable = 0
        """Number of the last append, and of the last committed one."""
        self._unanswered: deque[tuple[int, Callable[[], None]]] = deque()
        self._trouble = ""
        """Error of the last job, which is logged once."""

    def add(self, events: Sequence[NewEvent], done: Callable[[], None]) -> None:
        """Store the new events together and in this order; `done` is called when all events are durable."""
        self._waiting.append((events, done))
        self._go_on()

    def locate(self, keys: Sequence[bytes], answer: Callable[[int | None], None]) -> None:
        """Call `answer` with the ordinal of the event with one of these keys; None if it is not kept."""
        if not self.topic.exists:
            answer(None)
            return
        self._questions.append(_Question(keys, self.topic.end_offset, answer))
        self._go_on()

    def tick(self) -> None:
        """Continue pending work and update the table; called a few times a second."""
        self._go_on()
        if not self._busy and self._ready:
            if self._indexed.offset < self.topic.end_offset:
                self._index()
            else:
                self._forget()

    @property
    def idle(self) -> bool:
        """True if nothing is in progress and the table has all events."""
        busy = self._busy or self._waiting or self._unanswered or self._questions
        return not (busy or self._recent)

    def _go_on(self) -> None:
        if self._is_stale():
            self._ready = False
        if not self._ready:
            if not self._busy:
                self._open()
            return
        while self._waiting and len(self._recent) < RECENT_MAX:
            if not all(map(self._is_known, self._waiting[0][0])):
                if not self._busy:
                    self._look_up()
                return
            self._append(*self._waiting.popleft())
        if self._questions and not self._busy:
            self._ask()
        if len(self._recent) >= INDEXED_AT_ONCE and not self._busy:
            self._index()

    # Detection of new events

    def _is_known(self, event: NewEvent) -> bool:
        """Return True if we can tell without another lookup whether the event is new."""
        return event.key in self._recent or event.key in self._found or self._is_newer(event)

    def _is_newer(self, event: NewEvent) -> bool:
        """Return True if the event is newer than all stored events of its host."""
        stamp = event.stamp
        if stamp is None:
            return False
        latest = self._latest.get(_host(stamp))
        return latest is not None and (stamp.ms, stamp.number) > latest

    def _append(self, events: Sequence[NewEvent], done: Callable[[], None]) -> None:
        fresh = {event.key: event for event in reversed(events) if self._is_new(event)}
        needed = max((self._recent.get(event.key, 0) for event in events), default=0)
        if len(fresh) < len(events):
            self._repeated(len(events) - len(fresh))
        if fresh:
            events = [event for event in events if fresh.pop(event.key, None) is not None]
            try:
                records = [pack_record(event.payload) for event in events]
                self._store.append({self.topic: records}, self._committed)
            except StoreFailedError:
                return  # no client gets an acknowledgement, and the server is about to stop
            needed = self._appended = self._appended + 1
            for event in events:
                self._recent[event.key] = needed
                if event.stamp is not None:
                    self._note_latest(_host(event.stamp), (event.stamp.ms, event.stamp.number))
        self._unanswered.append((needed, done))
        self._answer()

    def _is_new(self, event: NewEvent) -> bool:
        if event.key in self._recent:
            return False
        return self._is_newer(event) or not self._is_kept(self._found[event.key])

    def _is_kept(self, ordinal: int | None) -> bool:
        return ordinal is not None and ordinal >= self.topic.start_ordinal

    def _note_latest(self, host: bytes, time: Time) -> None:
        known = self._latest.pop(host, time)
        self._latest[host] = max(known, time)
        if len(self._latest) > HOSTS_MAX:
            self._latest.popitem(last=False)

    def _committed(self) -> None:
        if self._life == 0:
            self._life = self.topic.id  # the first append has created the topic
        self._durable += 1
        self._answer()

    def _answer(self) -> None:
        # Additions are answered in order: one without new events may still wait for an earlier one.
        while self._unanswered and self._unanswered[0][0] <= self._durable:
            self._unanswered.popleft()[1]()

    # Jobs on the table

    def _look_up(self) -> None:
        waiting = (event for events, _ in self._waiting for event in events)
        events = [event for event in waiting if not self._is_known(event)][:_LOOKED_UP_MAX]
        keys = {event.key for event in events}
        hosts = {_host(event.stamp) for event in events if event.stamp is not None}

        def found(known: Known) -> None:
            self._found |= {key: known.ordinals.get(key) for key in keys}
            for host in hosts:
                # If the table does not have the host, all events of the host are new.
                self._note_latest(host, known.latest.get(host, _BEFORE_ALL))

        self._job(lambda: self._ids.find(self._name, keys, hosts), found)

    def _ask(self) -> None:
        """Look up the ordinals of events for `locate`."""
        if self._indexed.offset < min(self._questions[-1].end, self.topic.end_offset):
            self._index()
            return
        asked, self._questions = self._questions, []

        def found(known: Known) -> None:
            for keys, _, answer in asked:
                ordinals = [known.ordinals.get(key) for key in keys]
                answer(next((one for one in ordinals if self._is_kept(one)), None))

        def failed() -> None:
            self._questions = asked + self._questions

        keys = {key for one in asked for key in one.keys}
        self._job(lambda: self._ids.find(self._name, keys, ()), found, failed)

    def _open(self) -> None:
        """Find out up to which position the table has the records."""
        self._generation = self._ids.generation

        def found(indexed: Position | None) -> None:
            topic = self.topic
            if self._life != topic.id:
                self._life = topic.id
                self._forget_recent(self._durable)
            self._reader = None
            self._found.clear()
            if (
                indexed is not None
                and indexed.epoch == topic.epoch
                and indexed.offset <= topic.end_offset
                and topic.durability is not Durability.MEMORY
            ):
                self._indexed = max(indexed, topic.start)
                self._catch_up()
            else:
                # The table may have ids of records that were lost in a crash of the machine.
                start = self._indexed = topic.start
                self._job(lambda: self._ids.reset(self._name, start), lambda _: self._catch_up())

        self._job(lambda: self._ids.indexed(self._name), found)

    def _catch_up(self) -> None:
        if self._indexed.offset < self.topic.end_offset:
            self._index()
        else:
            self._ready = True

    def _index(self) -> None:
        """Add the next records to the table."""
        if self._reader is None:
            self._reader = self._store.reader(self.topic)
        start = max(self._indexed, self.topic.start)
        try:
            chunk = self._reader.read(start.offset, _READ_BYTES)
        except ColdError as cold:
            self._job(cold.warm, lambda _: self._index())
            return
        ordinal = max((run.ordinal + run.record_count for run in chunk.runs), default=start.ordinal)
        end = Position(self.topic.epoch, chunk.next_offset, ordinal)
        # Every append that is durable by now is in this chunk or before it, or is no longer kept.
        everything = self._durable if end.offset >= self.topic.end_offset else 0

        def work() -> list[bytes]:
            ids, latest = _read_ids(chunk.runs)
            self._ids.add(self._name, ids, latest, end)
            return [key for key, _ in ids]

        def indexed(keys: list[bytes]) -> None:
            self._indexed = end
            self._found.clear()
            for key in keys:
                self._recent.pop(key, None)
            if everything:
                self._forget_recent(everything)
            if not self._ready:
                self._catch_up()

        self._job(work, indexed)

    def _forget_recent(self, last: int) -> None:
        """Drop the keys of events that came with this append or an earlier one."""
        self._recent = {key: number for key, number in self._recent.items() if number > last}

    def _forget(self) -> None:
        """Delete the ids of records that retention has deleted, once there are enough of them."""
        start = self.topic.start_ordinal
        gone = start - self._forgotten
        if gone > INDEXED_AT_ONCE and gone > self._store.kept(self.topic).records // 10:
            self._forgotten = start
            self._job(lambda: self._ids.forget_before(self._name, start), lambda _: None)

    def _job(
        self,
        work: Callable[[], T],
        done: Callable[[T], None],
        undone: Callable[[], None] = lambda: None,
    ) -> None:
        """Run `work` in a thread, then call `done` with its result; `undone` if it failed or is stale."""
        assert not self._busy
        self._busy = True

        def finished(result: T | BaseException) -> None:
            self._busy = False
            if isinstance(result, BaseException):
                undone()
                self._failed(result)
                return
            self._trouble = ""
            if self._is_stale() and self._ready:
                undone()
                self._go_on()
            else:
                done(result)
                if not self._busy:
                    self._go_on()

        self._runner.background(work, finished)

    def _failed(self, error: BaseException) -> None:
        """Log the error. The next tick tries again, with an empty table if this one is damaged."""
        if str(error) != self._trouble:
            self._trouble = str(error)
            logger.error("the table of event ids of %s: %s", quoted(self._name), error)
        if isinstance(error, EventIdsError) and error.is_damage:
            self._ready = False
            if self._generation == self._ids.generation:
                self._ids.discard()

    def _is_stale(self) -> bool:
        """Return True if our data is of an earlier life of the topic, or of a table that was discarded."""
        return self._life != self.topic.id or self._generation != self._ids.generation


_BEFORE_ALL = (-math.inf, -math.inf)


def _host(stamp: Stamp) -> bytes:
    return msgspec.json.encode(stamp.host)


def _read_ids(runs: Sequence[Run]) -> tuple[list[tuple[bytes, int]], dict[bytes, Time]]:
    """Return the id and ordinal of each event, and the latest time of each host."""
    ids: list[tuple[bytes, int]] = []
    latest: dict[bytes, Time] = {}
    for run in runs:
        for number, record in enumerate(split_records(run.data, run.record_count)):
            try:
                created = created_of(decode_envelope(record[RECORD_HEADER_BYTES:]))
            except BadEnvelopeError:
                continue  # none of our protocols has written this record: it has no id
            ids.append((key_of(created), run.ordinal + number))
            stamp = stamp_of(created)
            if stamp is not None:
                host, time = _host(stamp), (stamp.ms, stamp.number)
                latest[host] = max(latest.get(host, time), time)
    return ids, latest


Done = Callable[[BaseException | None], None]

_Events = dict[str, list[NewEvent]]
"""Events by topic, in the order of the batch."""


class BatchEvents:
    """Adds the events of batches to Logux logs, a portion at a time.

    Implements `TopicOwner` of `log/store.py`. A thread looks up the events; the loop learns which are new.
    """

    def __init__(self, log: Callable[[str], LoguxLog], runner: Runner) -> None:
        self._log = log
        self._runner = runner

    def check(self, blocks: Callable[[], Iterator[Block]], done: Done) -> None:
        """Accept every batch: its events were checked when they were uploaded."""
        done(None)

    def add(self, batch: bytes, parts: Sequence[BatchPart], done: Done) -> None:
        add_in_portions(self._runner, parts, _events_of, self._add, done)

    def _add(self, events: _Events, done: Callable[[], None]) -> None:
        one_done = countdown(len(events), done)
        for topic, some in events.items():
            self._log(topic).add(some, one_done)


def _events_of(parts: Sequence[BatchPart]) -> _Events:
    found: _Events = {}
    for block in [part.block for part in parts]:
        events = found.setdefault(block.topic, [])
        for payload in block.payloads():
            try:
                envelope = decode_envelope(payload)
                events.append(NewEvent.of(_marked(payload, envelope), created_of(envelope)))
            except BadEnvelopeError as error:
                # The event was checked when it was staged, so this should not happen. The batch must not wait
                # for the event for ever.
                name = quoted(block.topic)
                logger.error("topic %s: a record of a batch is left out: %s", name, error)
    return found


def _marked(payload: bytes, envelope: Envelope) -> bytes:
    """Return the payload marked as part of a batch: its origin may be connected, but has not sent it."""
    if envelope.origin is None or envelope.batch:
        return payload
    envelope.batch = True
    try:
        return encode_envelope(envelope)
    except BadEnvelopeError:
        # The mark made the payload too large by a few bytes. Without an origin the event needs no mark.
        envelope.origin, envelope.batch = None, False
        return encode_envelope(envelope)
