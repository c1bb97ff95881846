"""One log of Logux: every event is stored once, whoever brings it and how often. Knows no connection.

An event is known by the time it was made. One that is newer than the latest of its host is new, and nobody is
asked; others are looked up in the table of ids, which follows the records and is a little behind them: what
it lacks is remembered here. There is one job on the table at a time: no answer of it is out of date.

    waiting ──all ids are known──▶ appended ──commit──▶ done
"""

import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from headrace.errors import StoreFailedError
from headrace.log.event_ids import EventIds, EventIdsError, Known, Time
from headrace.log.records import pack_record, split_records
from headrace.log.runner import Runner
from headrace.log.store import ColdError, Reader, Run, Store, Topic
from headrace.logux_envelope import (
    BadEnvelopeError,
    Created,
    Stamp,
    created_of,
    decode_envelope,
    key_of,
    stamp_of,
)
from headrace.model import RECORD_HEADER_BYTES, Durability, Position
from headrace.printing import quoted

logger = logging.getLogger(__name__)

T = TypeVar("T")

HOSTS_MAX = 100_000
"""Hosts whose latest event is remembered without asking the table."""

RECENT_MAX = 200_000
"""Events that the table may lack before further ones wait for it."""

INDEXED_AT_ONCE = 4096
"""So many events that the table lacks are brought into it at once; fewer with the next tick."""

_LOOKED_UP_MAX = 5000
_READ_BYTES = 1 << 20


class NewEvent(NamedTuple):
    """An event that is to be stored unless it is there."""

    payload: bytes
    key: bytes
    stamp: Stamp | None

    @classmethod
    def of(cls, payload: bytes, created: Created) -> "NewEvent":
        return cls(payload, key_of(created), stamp_of(created))


class _Question(NamedTuple):
    """Where an event lies."""

    keys: Sequence[bytes]
    """One of which it has."""
    end: int
    """The offset up to which the table must have everything before it is asked."""
    answer: Callable[[int | None], None]


class _Addition(NamedTuple):
    events: Sequence[NewEvent]
    done: Callable[[], None]


class LoguxLog:
    def __init__(
        self,
        topic: Topic,
        store: Store,
        runner: Runner,
        ids: EventIds,
        repeated: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`repeated` is told how many events were there already."""
        self.topic = topic
        self._repeated = repeated
        self._store = store
        self._runner = runner
        self._ids = ids
        self._generation = -1
        self._life = 0
        """The topic's id: another one when it is made anew."""
        self._ready = False
        """Whether the table had everything once since it was opened."""
        self._busy = False
        """Whether a job on the table is under way."""
        self._reader: Reader | None = None
        self._indexed = topic.start
        """Up to where the table has the records."""
        self._forgotten = 0
        self._waiting: deque[_Addition] = deque()
        self._questions: list[_Question] = []
        self._recent: dict[bytes, int] = {}
        """Events that the table lacks, each with the number of its append."""
        self._latest: OrderedDict[bytes, Time] = OrderedDict()
        self._found: dict[bytes, int | None] = {}
        """What the table said since the last event came into it."""
        self._appended = self._durable = 0
        """Numbers of the last append, and of the last that is committed."""
        self._unanswered: deque[tuple[int, Callable[[], None]]] = deque()
        self._trouble = ""
        """Why the last job failed; it is told once."""

    def add(self, events: Sequence[NewEvent], done: Callable[[], None]) -> None:
        """Store those that are new, together and in this order; `done` when all of them are durable."""
        self._waiting.append(_Addition(events, done))
        self._go_on()

    def locate(self, keys: Sequence[bytes], answer: Callable[[int | None], None]) -> None:
        """The ordinal of the event with one of these; None when there is none such, or it is not kept."""
        if not self.topic.exists:
            answer(None)
            return
        self._questions.append(_Question(keys, self.topic.end_offset, answer))
        self._go_on()

    def tick(self) -> None:
        """Called a few times a second."""
        self._go_on()
        if not self._busy and self._ready:
            if self._indexed.offset < self.topic.end_offset:
                self._index()
            else:
                self._forget()

    @property
    def idle(self) -> bool:
        """Whether nothing is under way, and nothing remembered that is not in the table."""
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
            if not all(map(self._is_known, self._waiting[0].events)):
                if not self._busy:
                    self._look_up()
                return
            self._append(self._waiting.popleft())
        if self._questions and not self._busy:
            self._ask()
        if len(self._recent) >= INDEXED_AT_ONCE and not self._busy:
            self._index()

    # New or not

    def _is_known(self, event: NewEvent) -> bool:
        """Whether we can say if it is new."""
        return event.key in self._recent or event.key in self._found or self._is_newer(event)

    def _is_newer(self, event: NewEvent) -> bool:
        """Whether it was made after all that are there of its host."""
        stamp = event.stamp
        if stamp is None:
            return False
        latest = self._latest.get(_host(stamp))
        return latest is not None and (stamp.ms, stamp.number) > latest

    def _append(self, addition: _Addition) -> None:
        fresh = {event.key: event for event in reversed(addition.events) if self._is_new(event)}
        needed = max((self._recent.get(event.key, 0) for event in addition.events), default=0)
        if len(fresh) < len(addition.events):
            self._repeated(len(addition.events) - len(fresh))
        if fresh:
            events = [event for event in addition.events if fresh.pop(event.key, None) is not None]
            try:
                records = [pack_record(event.payload) for event in events]
                self._store.append({self.topic: records}, self._committed)
            except StoreFailedError:
                return  # nobody is told that it was stored, and the server is about to stop
            needed = self._appended = self._appended + 1
            for event in events:
                self._recent[event.key] = needed
                if event.stamp is not None:
                    self._note_latest(_host(event.stamp), _time(event.stamp))
        self._unanswered.append((needed, addition.done))
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
            self._life = self.topic.id  # the first append has made it
        self._durable += 1
        self._answer()

    def _answer(self) -> None:
        # In their order: an addition with nothing new may still wait for one before it.
        while self._unanswered and self._unanswered[0][0] <= self._durable:
            self._unanswered.popleft()[1]()

    # Jobs on the table

    def _look_up(self) -> None:
        events = [
            event for one in self._waiting for event in one.events if not self._is_known(event)
        ][:_LOOKED_UP_MAX]
        keys = {event.key for event in events}
        stamps = [event.stamp for event in events if event.stamp is not None]
        hosts = {_host(stamp) for stamp in stamps}
        name = self.topic.name

        def found(known: Known) -> None:
            self._found |= {key: known.ordinals.get(key) for key in keys}
            for host in hosts:
                # One that the table has never heard of: whatever comes of it is new.
                self._note_latest(host, known.latest.get(host, _BEFORE_ALL))

        self._job(lambda: self._ids.find(name, keys, hosts), found)

    def _ask(self) -> None:
        """Where events lie that someone has asked for."""
        if self._indexed.offset < min(self._questions[-1].end, self.topic.end_offset):
            self._index()
            return
        asked, self._questions = self._questions, []
        name = self.topic.name

        def found(known: Known) -> None:
            for keys, _, answer in asked:
                ordinals = [known.ordinals.get(key) for key in keys]
                answer(next((one for one in ordinals if self._is_kept(one)), None))

        def failed() -> None:
            self._questions = asked + self._questions

        keys = {key for one in asked for key in one.keys}
        self._job(lambda: self._ids.find(name, keys, ()), found, failed)

    def _open(self) -> None:
        """Find out what the table has."""
        self._generation = self._ids.generation
        name = self.topic.name

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
                # Ids of records that were lost with a machine must not be believed.
                start = self._indexed = topic.start
                self._job(lambda: self._ids.reset(name, start), lambda _: self._catch_up())

        self._job(lambda: self._ids.indexed(name), found)

    def _catch_up(self) -> None:
        if self._indexed.offset < self.topic.end_offset:
            self._index()
        else:
            self._ready = True

    def _index(self) -> None:
        """Bring the next records into the table."""
        if self._reader is None:
            self._reader = self._store.reader(self.topic)
        start = max(self._indexed, self.topic.start)
        try:
            chunk = self._reader.read(start.offset, _READ_BYTES)
        except ColdError as cold:
            self._job(cold.warm, lambda _: self._index())
            return
        epoch, name = self.topic.epoch, self.topic.name
        ordinal = max((run.ordinal + run.record_count for run in chunk.runs), default=start.ordinal)
        end = Position(epoch, chunk.next_offset, ordinal)
        # What is durable by now is in it, or is no longer kept.
        everything = self._durable if end.offset >= self.topic.end_offset else 0

        def work() -> list[bytes]:
            ids, latest = _read_ids(chunk.runs)
            self._ids.add(name, ids, latest, end)
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
        """Those that came with this append or an earlier one."""
        self._recent = {key: number for key, number in self._recent.items() if number > last}

    def _forget(self) -> None:
        """Let go of what retention has taken, when it is worth the while."""
        start = self.topic.start_ordinal
        if start - self._forgotten <= INDEXED_AT_ONCE:
            return
        kept = self._store.kept(self.topic).records
        if start - self._forgotten > kept // 10:
            self._forgotten = start
            name = self.topic.name
            self._job(lambda: self._ids.forget_before(name, start), lambda _: None)

    def _job(
        self,
        work: Callable[[], T],
        done: Callable[[T], None],
        undone: Callable[[], None] = lambda: None,
    ) -> None:
        """Do something in a thread, and go on with what comes of it; `undone` when nothing does."""
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
        """Try again with the next tick; with an empty table when this one is of no use."""
        if str(error) != self._trouble:
            self._trouble = str(error)
            logger.error("the ids of %s: %s", quoted(self.topic.name), error)
        if isinstance(error, EventIdsError) and error.is_damage:
            self._ready = False
            if self._generation == self._ids.generation:
                self._ids.discard()

    def _is_stale(self) -> bool:
        """Whether what we know is of an earlier life of the topic, or of a table that is gone."""
        return self._life != self.topic.id or self._generation != self._ids.generation


_BEFORE_ALL = (-math.inf, -math.inf)


def _host(stamp: Stamp) -> bytes:
    return msgspec.json.encode(stamp.host)


def _time(stamp: Stamp) -> Time:
    return stamp.ms, stamp.number


def _read_ids(runs: Sequence[Run]) -> tuple[list[tuple[bytes, int]], dict[bytes, Time]]:
    """The id and ordinal of each event, and the latest time of each host."""
    ids: list[tuple[bytes, int]] = []
    latest: dict[bytes, Time] = {}
    for run in runs:
        for number, record in enumerate(split_records(run.data, run.record_count)):
            try:
                created = created_of(decode_envelope(record[RECORD_HEADER_BYTES:]))
            except BadEnvelopeError:
                continue  # not written by a protocol of ours: it has no id
            ids.append((key_of(created), run.ordinal + number))
            stamp = stamp_of(created)
            if stamp is not None:
                host, time = _host(stamp), _time(stamp)
                latest[host] = max(latest.get(host, time), time)
    return ids, latest
