"""The log checker: records what publishers sent and subscribers received, and reports errors of the log.

It opens no connection and reads no file: the test that drives the clients calls it.

Theory of operation. Every payload is reduced to an 8-byte digest. For each topic the checker keeps how often
each digest was sent and acknowledged, and one *reference log*: the union of the records that all subscribers
received, as stretches of consecutive records without a gap. A subscriber is a position in that log. Its next
record must begin exactly there. A record that the reference already has must have the same bytes; a record
that it does not have yet is added. So a disagreement between subscribers is found as soon as the second one
receives the record. Memory is about 200 bytes per distinct record sent and 16 per record in the log, however
many subscribers there are.

`verdict()` adds the errors that only the whole history can show: acknowledged records that no subscriber
received. So at least one subscriber must have read each topic from its start to its end by then.

All methods may be called from any thread.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from operator import attrgetter
from threading import Lock
from typing import NamedTuple


class ReferenceStretch:
    """Consecutive records without a gap."""

    __slots__ = ("begin", "digests", "ends")

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.ends: array[int] = array("Q")
        self.digests: array[int] = array("Q")

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def end(self) -> int:
        return self.ends[-1] if self.ends else self.begin

    def begin_of(self, row: int) -> int:
        return self.ends[row - 1] if row else self.begin


class ReferenceLog:
    """The stretches of one topic, with 16 bytes per record. Judges nothing."""

    def __init__(self) -> None:
        self.stretches: list[ReferenceStretch] = []
        """Sorted by their first offset."""

    def add(self, begin: int, end: int, digest: int) -> int:
        """Add a record unless the log has one that begins there; return the digest of the log's record."""
        stretch, row = self._locate(begin)
        if row == len(stretch):
            stretch.ends.append(end)
            stretch.digests.append(digest)
        return stretch.digests[row]

    def _locate(self, begin: int) -> tuple[ReferenceStretch, int]:
        """Return the stretch and row of the record that begins here; make an empty stretch if none does."""
        before = bisect_right(self.stretches, begin, key=attrgetter("begin"))
        # The last stretch has the record, unless stretches overlap, as they do in a log with errors.
        for index in reversed(range(before)):
            stretch = self.stretches[index]
            row = bisect_right(stretch.ends, begin)
            if stretch.begin_of(row) == begin:
                return stretch, row
        self.stretches.insert(before, ReferenceStretch(begin))
        return self.stretches[before], 0

    def find(self, digest: int) -> int | None:
        for stretch in self.stretches:
            if digest in stretch.digests:
                return stretch.ends[stretch.digests.index(digest)]
        return None

    def occurrences(self, tickets: dict[int, int]) -> "array[int]":
        """Return the number of times that each ticket's bytes are in the log."""
        seen = array("I", bytes(4 * len(tickets)))
        for stretch in self.stretches:
            for digest in stretch.digests:
                if digest in tickets:
                    seen[tickets[digest]] += 1
        return seen

    def overlaps(self, attachments: set[int]) -> Iterator[tuple[int, int]]:
        """Yield each beginning of a record, or attachment, inside another record, and where that begins."""
        suspects = sorted(attachments.union(one.begin for one in self.stretches))
        for stretch in self.stretches:
            low = bisect_right(suspects, stretch.begin)
            for suspect in suspects[low : bisect_left(suspects, stretch.end)]:
                row = bisect_right(stretch.ends, suspect)
                if stretch.begin_of(row) != suspect:
                    yield suspect, stretch.begin_of(row)


SIZE_PREFIX_BYTES = 4
VIOLATIONS_PER_KIND_MAX = 20
NO_PUBLISHER = 0


class Kind(StrEnum):
    """The kinds of errors of a log."""

    LOST = "lost"  # acknowledged, and received by no subscriber
    PHANTOM = "phantom"  # received, and sent by no publisher
    DUPLICATED = "duplicated"  # in the log more often than it was sent
    ORDER = "order"  # two subscribers received different orders
    BYTES = "bytes"  # one offset, two contents
    BOUNDARY = "boundary"  # a record or an attachment begins inside another record
    OFFSET_ORDER = "offset-order"  # an offset not above the one before it
    OFFSET_SIZE = "offset-size"  # an offset that is not the previous one + 4 + the payload's size
    RESUME_GAP = "resume-gap"  # a resumed subscriber was started too late
    RESUME_DOUBLE = "resume-double"  # a resumed subscriber was started too early
    PUBLISHER_ORDER = "publisher-order"  # one publisher's records are not in the order it sent them


@dataclass(frozen=True, slots=True)
class Violation:
    """One error of the log, with the facts to find it again."""

    kind: Kind
    topic: str
    detail: str
    subscriber: str | None = None
    offset: int | None = None

    def __str__(self) -> str:
        who = f" subscriber {self.subscriber}" if self.subscriber is not None else ""
        where = f" at offset {self.offset}" if self.offset is not None else ""
        return f"{self.kind}: topic {self.topic!r}{who}{where}: {self.detail}"


class LogChecker:
    """Records the history of a test run and judges it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._topics: defaultdict[str, _Topic] = defaultdict(_Topic)
        self._subscribers: dict[tuple[str, str], _Reader] = {}
        self._publishers: dict[str, int] = {}
        self._violations: list[Violation] = []
        self._counts: Counter[Kind] = Counter()

    def sent(
        self, topic: str, payload: bytes, publisher: str | None = None, repeats: bool = False
    ) -> int:
        """Record a publish just before it is sent, or sent again; return the ticket for `acked`.

        With a publisher's name, first occurrences must be in the order of these calls.
        `repeats` is for clients that resend without telling: then any number of copies is allowed.
        """
        with self._lock:
            number = NO_PUBLISHER
            if publisher is not None:
                number = self._publishers.setdefault(publisher, len(self._publishers) + 1)
            return self._topics[topic].sent(_digest(payload), number, repeats)

    def acked(self, topic: str, ticket: int) -> None:
        """Record that the publish with this ticket was acknowledged (once per publish, not per resend)."""
        with self._lock:
            self._topics[topic].acked[ticket] += 1

    def attached(self, subscriber: str, topic: str, asked: int | None, got: int) -> None:
        """Record the offset that a subscriber asked for (None for the end) and the offset that it got."""
        with self._lock:
            reader = self._subscribers.get((subscriber, topic))
            if reader is None:
                self._subscribers[subscriber, topic] = _Reader(got)
            else:
                if asked is not None and got != asked:
                    kind = Kind.RESUME_GAP if got > asked else Kind.RESUME_DOUBLE
                    self._report(kind, topic, f"asked for {asked}, got {got}", subscriber, got)
                reader.position = got
                reader.resumed = True
            self._topics[topic].attachments.add(got)

    def received(self, subscriber: str, topic: str, offset: int, payload: bytes) -> None:
        """Record that a subscriber received a record; `offset` is that on the wire, just past the record."""
        with self._lock:
            state = self._topics[topic]
            digest = _digest(payload)
            begin = offset - SIZE_PREFIX_BYTES - len(payload)
            reader = self._subscribers.setdefault((subscriber, topic), _Reader(begin))
            if begin != reader.position:
                self._misplaced(topic, subscriber, reader, begin, offset)
            reader.position = offset
            reader.resumed = False
            if digest not in state.tickets:
                detail = f"{len(payload)} bytes nobody sent"
                self._report(Kind.PHANTOM, topic, detail, subscriber, offset)
            known = state.log.add(begin, offset, digest)
            # A disagreement is judged at the end, when the rest of the log is known.
            if known != digest and len(state.disagreements) < VIOLATIONS_PER_KIND_MAX:
                state.disagreements.append(_Disagreement(subscriber, offset, digest, known))

    def position(self, subscriber: str, topic: str) -> int | None:
        """Return the offset that this subscriber has reached, or None before it attached."""
        with self._lock:
            reader = self._subscribers.get((subscriber, topic))
            return None if reader is None else reader.position

    def records(self, topic: str) -> int:
        """Return the number of the topic's records that any subscriber received."""
        with self._lock:
            return sum(map(len, self._topics[topic].log.stretches))

    def verdict(self) -> list[Violation]:
        """Return every violation so far; an empty list means that a correct log can have this history.

        Only the first VIOLATIONS_PER_KIND_MAX of each kind are kept.
        """
        with self._lock:
            kept, counts = list(self._violations), Counter(self._counts)
            for name, topic in self._topics.items():
                self._judge(name, topic)
            verdict = self._violations
            # Errors that only the whole history shows may change with more history: they are judged anew.
            self._violations, self._counts = kept, counts
            return verdict

    def _report(
        self,
        kind: Kind,
        topic: str,
        detail: str,
        subscriber: str | None = None,
        offset: int | None = None,
    ) -> None:
        self._counts[kind] += 1
        if self._counts[kind] <= VIOLATIONS_PER_KIND_MAX:
            self._violations.append(Violation(kind, topic, detail, subscriber, offset))

    def _misplaced(
        self, topic: str, subscriber: str, reader: "_Reader", begin: int, offset: int
    ) -> None:
        if reader.resumed:
            kind = Kind.RESUME_GAP if begin > reader.position else Kind.RESUME_DOUBLE
        else:
            kind = Kind.OFFSET_SIZE if offset > reader.position else Kind.OFFSET_ORDER
        detail = f"record begins at {begin}, expected {reader.position}"
        self._report(kind, topic, detail, subscriber, offset)

    def _judge(self, name: str, topic: "_Topic") -> None:
        seen = topic.log.occurrences(topic.tickets)
        counts = zip(topic.sent_times, topic.acked, seen, strict=True)
        for ticket, (sent, acked, found) in enumerate(counts):
            if acked > found:
                detail = f"publish {ticket}: acknowledged {acked}, found {found}"
                self._report(Kind.LOST, name, detail)
            if found > sent and ticket not in topic.repeating:
                detail = f"publish {ticket}: sent {sent}, found {found}"
                self._report(Kind.DUPLICATED, name, detail)
        for one in topic.disagreements:
            self._disagreement(name, topic, one)
        for inside, begin in topic.log.overlaps(topic.attachments):
            detail = f"inside the record that begins at {begin}"
            self._report(Kind.BOUNDARY, name, detail, None, inside)
        self._judge_publishers(name, topic)

    def _disagreement(self, name: str, topic: "_Topic", one: "_Disagreement") -> None:
        """Report a disagreement: ORDER if others received these bytes at another place, else BYTES."""
        elsewhere = topic.log.find(one.digest)
        kind = Kind.BYTES if elsewhere is None else Kind.ORDER
        detail = f"others received other bytes there ({one.digest:016x}, not {one.known:016x})"
        if elsewhere is not None:
            detail += f"; they received these at {elsewhere}"
        self._report(kind, name, detail, one.subscriber, one.offset)

    def _judge_publishers(self, name: str, topic: "_Topic") -> None:
        last: dict[int, int] = {}
        first_seen = bytearray(len(topic.acked))
        names = {number: name for name, number in self._publishers.items()}
        for stretch in topic.log.stretches:
            for end, digest in zip(stretch.ends, stretch.digests, strict=True):
                ticket = topic.tickets.get(digest)
                if ticket is None or first_seen[ticket]:
                    continue
                first_seen[ticket] = 1
                publisher = topic.publishers[ticket]
                if publisher == NO_PUBLISHER:
                    continue
                if ticket < last.get(publisher, -1):
                    detail = f"{names[publisher]}'s publish {ticket} after its {last[publisher]}"
                    self._report(Kind.PUBLISHER_ORDER, name, detail, None, end)
                last[publisher] = max(ticket, last.get(publisher, -1))


def _digest(payload: bytes) -> int:
    return int.from_bytes(blake2b(payload, digest_size=8).digest(), "big")


@dataclass(slots=True)
class _Reader:
    """One subscriber's place in one topic."""

    position: int
    resumed: bool = False


class _Disagreement(NamedTuple):
    subscriber: str
    offset: int
    digest: int
    known: int


@dataclass(slots=True)
class _Topic:
    """The records sent to one topic, by ticket, and the records received from it."""

    tickets: dict[int, int] = field(default_factory=dict)  # digest -> ticket
    sent_times: "array[int]" = field(default_factory=lambda: array("I"))
    acked: "array[int]" = field(default_factory=lambda: array("I"))
    publishers: "array[int]" = field(default_factory=lambda: array("I"))
    repeating: set[int] = field(default_factory=set)
    attachments: set[int] = field(default_factory=set)
    disagreements: list[_Disagreement] = field(default_factory=list)
    log: ReferenceLog = field(default_factory=ReferenceLog)

    def sent(self, digest: int, publisher: int, repeats: bool) -> int:
        ticket = self.tickets.setdefault(digest, len(self.tickets))
        if ticket == len(self.acked):
            self.sent_times.append(0)
            self.acked.append(0)
            self.publishers.append(publisher)
        elif self.publishers[ticket] != publisher:
            # Two publishers sent the same bytes: the record's publisher is unknown, and so is its order.
            self.publishers[ticket] = NO_PUBLISHER
        self.sent_times[ticket] += 1
        if repeats:
            self.repeating.add(ticket)
        return ticket
