"""Finds events of a 0.x client that are echoes of events from this log. Elsewhere: connections.

When such a client reconnects, it sends back, in one message, the events that it got from us since our last
`synced`. Their times differ from those in the log, because the client corrects its clock by another amount on
every connection. An event with a time that the log has is a duplicate, which `LoguxLog` detects. Any other
event is an echo only if

- its host, counter and content are equal to those of an event that was delivered to this client, and
- at least two such events of the message differ from the delivered ones by the same time, and no other
  difference explains as many of them.

Each delivered event absorbs one echo. In doubt, an event is stored: a duplicate is better than a loss.

A client that connects with `synced` N has received all records before the Nth that it may see and has not
sent itself. So the log shows which events were delivered, even after a restart of the server.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from headrace.log.records import split_records
from headrace.log.store import ColdError, Run, Runner, Store, Topic
from headrace.model import RECORD_HEADER_BYTES
from headrace.payload.logux import (
    BadEnvelopeError,
    Created,
    Event,
    Number,
    Stamp,
    created_of,
    decode_envelope,
    plain,
    stamp_of,
)

DELIVERED_MAX = 100_000
"""Number of delivered events that echoes are compared with: the newest ones."""
DELIVERED_BYTES_MAX = 64 << 20
"""Bytes of the log that echoes are compared with: the newest ones."""
MESSAGES_MAX = 8
"""Messages of one connection that are compared. Clients send echoes once, when they connect."""
PAIRS_MAX = 500_000
"""Pairs of one event in a message and one in the log that are compared to find the difference in time."""

_DIGEST_BYTES = 16
_READ_BYTES = 1 << 20

Host = str | Number
Origin = Host | None


class SentEvent(NamedTuple):
    """An event that a client has sent."""

    event: Event
    created: Created


class Echoes:
    """The echoes of one connection."""

    def __init__(
        self,
        topic: Topic,
        store: Store,
        runner: Runner,
        *,
        host: Host,
        synced: int,
        may_see: Callable[[Event, Created, Origin], bool],
    ) -> None:
        """`synced` is the position that the client sent when it connected."""
        self._topic = topic
        self._store = store
        self._runner = runner
        self._host = host
        # If the log never had this position, it is unknown which events were delivered.
        self._synced = synced if synced <= topic.end_ordinal else 0
        self._may_see = may_see
        self._messages = 0
        self._absorbed: set[tuple[bytes, Number]] = set()
        """Delivered events that have absorbed an echo, by digest and milliseconds."""
        self._waiting: deque[tuple[Sequence[SentEvent], Callable[[list[bool]], None]]] = deque()
        self._busy = False

    def sift(self, events: Sequence[SentEvent], answer: Callable[[list[bool]], None]) -> None:
        """Call `answer` with True for each event that is an echo. Messages are answered in their order."""
        self._waiting.append((events, answer))
        if not self._busy:
            self._go_on()

    def _go_on(self) -> None:
        while self._waiting:
            candidates = self._candidates(self._waiting[0][0])
            if candidates:
                self._busy = True
                self._messages += 1
                self._compare(candidates)
                return
            self._answer(set())

    def _answer(self, echoes: set[int]) -> None:
        events, answer = self._waiting.popleft()
        answer([place in echoes for place in range(len(events))])

    def _candidates(self, events: Sequence[SentEvent]) -> "_Candidates":
        """Return the events of other hosts by digest; empty if there is nothing to compare."""
        found: _Candidates = {}
        if not self._synced or self._messages >= MESSAGES_MAX or len(events) < 2:
            return found
        for place, one in enumerate(events):
            stamp = stamp_of(one.created)
            if stamp is not None and stamp.host != self._host:
                same = found.setdefault(_digest(stamp, one.event), _Same(one.event, stamp))
                same.places.setdefault(stamp.ms, place)
        if sum(len(same.places) for same in found.values()) < 2:
            found.clear()
        return found

    # Comparison with delivered events

    def _compare(self, candidates: "_Candidates") -> None:
        """Find the delivered events that differ from those of a message only in their time; then answer."""
        topic, store, synced = self._topic, self._store, self._synced
        reader = store.reader(topic)

        def begin() -> None:
            end = store.locate_ordinal(topic, synced).offset
            first = store.locate_ordinal(topic, max(synced - DELIVERED_MAX, 0)).offset
            near = store.locate_offset(topic, max(end - DELIVERED_BYTES_MAX, 0)).offset
            read(max(first, near), end)

        def read(offset: int, end: int) -> None:
            if offset < end:
                chunk = reader.read(offset, _READ_BYTES)
                if chunk.next_offset > offset:
                    self._runner.background(
                        lambda: self._note_delivered(candidates, chunk.runs),
                        lambda _: self._try(lambda: read(chunk.next_offset, end)),
                    )
                    return
            self._busy = False
            self._answer(self._find(candidates))
            self._go_on()

        self._try(begin)

    def _try(self, step: Callable[[], None]) -> None:
        """Run a step; if it would wait for the disk, read from disk in a thread first and run it again."""
        try:
            step()
        except ColdError as cold:
            self._runner.background(cold.warm, lambda _: self._try(step))

    def _note_delivered(self, candidates: "_Candidates", runs: Iterable[Run]) -> None:
        for run in runs:
            records = split_records(run.data, run.record_count)
            for record in records[: max(self._synced - run.ordinal, 0)]:
                try:
                    envelope = decode_envelope(record[RECORD_HEADER_BYTES:])
                    stamp = stamp_of(created_of(envelope))
                except BadEnvelopeError:
                    continue
                is_own = envelope.origin == self._host and not envelope.batch
                if stamp is not None and not is_own:
                    event = msgspec.json.decode(envelope.event)
                    same = candidates.get(_digest(stamp, event))
                    if same is not None:
                        same.delivered[stamp.ms] = envelope.origin

    def _find(self, candidates: "_Candidates") -> set[int]:
        """Return the places of the echoes among the events of one message."""
        for digest, same in candidates.items():
            for ms, origin in list(same.delivered.items()):
                # A sent event with exactly the time of a delivered event is that event: the log detects it.
                is_known = same.places.pop(ms, None) is not None or (digest, ms) in self._absorbed
                if is_known or not self._may_see(same.event, [ms, *same.stamp[1:]], origin):
                    del same.delivered[ms]
        echoes: set[int] = set()
        while (shift := _shift(candidates.values())) is not None:
            for digest, same in candidates.items():
                for ms in [ms for ms in same.places if ms - shift in same.delivered]:
                    del same.delivered[ms - shift]
                    self._absorbed.add((digest, ms - shift))
                    echoes.add(same.places.pop(ms))
        return echoes


@dataclass(slots=True)
class _Same:
    """Events that differ only in their milliseconds."""

    event: Event
    stamp: Stamp
    places: dict[Number, int] = field(default_factory=dict)
    """Places of the events in the message, by milliseconds."""
    delivered: dict[Number, Origin] = field(default_factory=dict)
    """Origins of the delivered events in the log, by milliseconds."""


_Candidates = dict[bytes, _Same]


def _shift(candidates: Iterable[_Same]) -> Number | None:
    """Return the one difference in time that explains the most events, and at least two; None without one."""
    counts: Counter[Number] = Counter()
    left = PAIRS_MAX
    # Events with few equal events are the most conclusive, so they are counted first.
    for same in sorted(candidates, key=lambda one: len(one.places) * len(one.delivered)):
        left -= len(same.places) * len(same.delivered)
        if left < 0:
            break
        counts.update([ms - other for ms in same.places for other in same.delivered])
    (first, most), (_, next_most) = [*counts.most_common(2), (0, 0), (0, 0)][:2]
    return first if most > max(next_most, 1) else None


def _digest(stamp: Stamp, event: object) -> bytes:
    host, number = [one if isinstance(one, str) else plain(one) for one in stamp[1:]]
    text = msgspec.json.encode([host, number, event], order="sorted")
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()
