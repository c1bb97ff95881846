"""Tables in memory: handles of topics, cursors, notes, and numbers of producers.

The catalogue is some seconds behind the commits. Each table knows what was committed since then, and asks the
catalogue for everything older. When a journal file is applied, the tables forget what the catalogue has now.
The tables write nothing themselves.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from heapq import heapify, heappop, heappush, merge
from itertools import islice, takewhile
from operator import attrgetter
from weakref import WeakValueDictionary

import msgspec
from sortedcontainers import SortedDict, SortedList

from headrace.config.settings import TopicRule
from headrace.errors import BadCursorError, TooManyCursorsError
from headrace.log.catalogue.catalogue import INTEGER_MAX, Catalogue
from headrace.log.catalogue.rows import TopicRow
from headrace.log.commit.commit import CursorChange, NumberedAppend
from headrace.log.commit.journal import RECENT_MAX, Recent
from headrace.log.quota import Kept
from headrace.log.store import (
    NOTE_KEY_BYTES_MAX,
    Appended,
    Cursor,
    Note,
    StoredAppend,
    Topic,
)
from headrace.model import Durability, Position, check_reader_name

CURSORS_MAX = 100_000
"""Largest number of cursors, over all readers and topics; further new cursors are refused."""

PRODUCERS_CACHED_MAX = 100_000
"""Number of producers kept in memory to save reads of the catalogue."""

_STALE_MAX = 64
"""Number by which stale entries may exceed the number of notes before they are cleared."""

_AHEAD_MS = 600_000
"""Notes that are due later than this are not sorted: most are put again, or applied, before then."""


class Handles:
    """The handle of each topic, by name, and the list of names. Knows no records.

    A handle is made when a topic is first requested. Topics that were created or destroyed since the last
    change of the catalogue are known only here.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        rule: Callable[[str], TopicRule],
        is_closed: Callable[[str], bool],
    ) -> None:
        self._catalogue = catalogue
        self._rule = rule
        self._is_closed = is_closed
        self._known: dict[str, Topic] = {}
        self._dropped: WeakValueDictionary[str, Topic] = WeakValueDictionary()
        """Dropped handles that a caller or a commit still holds: a second handle would miss appends."""
        self._unlisted: dict[str, Topic] = {}
        """Topics that exist and are not in the catalogue yet, or never will be."""
        self._destroyed: set[str] = set()
        """Names of topics that were destroyed since the start, and not made again."""

    def get(self, name: str) -> Topic:
        topic = self._known.get(name)
        if topic is None:
            topic = self._known[name] = self.look(name)
        return topic

    def look(self, name: str) -> Topic:
        """Return the same handle as `get`, but keep no handle of a topic that does not exist."""
        topic = self._known.get(name)
        if topic is None:
            topic = self._dropped.get(name)
            if topic is None:
                topic = self._load(name, self._catalogue.topic(name.encode()))
                topic.is_closed = self._is_closed(name)
            if topic.exists:
                self._known[name] = topic
        return topic

    def drop(self, topic: Topic) -> None:
        """Forget the handle of a topic that was never created."""
        # A topic that was destroyed keeps its handle: the catalogue may not know of its end yet.
        if not topic.exists and topic.name not in self._destroyed:
            self._known.pop(topic.name, None)
            self._dropped[topic.name] = topic

    def created(self, topic: Topic) -> None:
        self._known[topic.name] = self._unlisted[topic.name] = topic
        self._destroyed.discard(topic.name)

    def destroyed(self, topic: Topic) -> None:
        self._unlisted.pop(topic.name, None)
        self._destroyed.add(topic.name)

    def applied(self, topic: Topic) -> None:
        """Let the catalogue list the topic from now on, once the catalogue has the topic's present epoch."""
        if topic.name in self._unlisted:
            row = self._catalogue.topic(topic.name.encode())
            # If a topic was destroyed and created again, the catalogue may have only its destruction so far.
            if row is not None and row.epoch == topic.epoch:
                del self._unlisted[topic.name]

    def list(self, prefix: str, after: str, limit: int) -> list[Topic]:
        # A destroyed topic that is still in the catalogue must not take the place of another one.
        listed = (
            row
            for row in self._catalogue.topics(prefix.encode(), after.encode())
            if (known := self._known.get(row.name.decode())) is None or known.exists
        )
        rows = {row.name.decode(): row for row in islice(listed, limit)}
        unlisted = {name for name in self._unlisted if name.startswith(prefix) and name > after}
        # Strings sort by code point, which is also their UTF-8 order. No handle is kept in memory.
        return [
            self._known.get(name) or self._load(name, rows[name])
            for name in sorted(unlisted | rows.keys())[:limit]
        ]

    def kept(self, prefix: str) -> Iterator[Kept]:
        """Yield what is kept of each topic with this prefix."""
        for row in self._catalogue.topics(prefix.encode()):
            name = row.name.decode()
            topic = self._known.get(name) or self._load(name, row)
            if name not in self._unlisted and topic.exists:
                yield Kept(name, topic.start, topic.end)
        for name, topic in self._unlisted.items():
            if name.startswith(prefix):
                yield Kept(name, topic.start, topic.end)

    def _load(self, name: str, row: TopicRow | None) -> Topic:
        topic = Topic(name, self._rule(name).durability)
        if row is None:
            start, topic.last_ms = self._catalogue.grave(name.encode())
            topic.epoch = start.epoch
            topic.start_offset = topic.end_offset = start.offset
            topic.start_ordinal = topic.end_ordinal = start.ordinal
            return topic
        topic.id, topic.epoch, topic.last_ms = row.id, row.epoch, row.last_ms
        topic.start_offset, topic.start_ordinal = row.start_offset, row.start_ordinal
        topic.end_offset, topic.end_ordinal = row.end_offset, row.end_ordinal
        if topic.durability is Durability.MEMORY:
            # The topic has records on disk from before the rule: they are not dropped silently.
            topic.durability = Durability.WRITTEN
        return topic


def check_position(topic: Topic, at: Position) -> None:
    """Raise BadCursorError for a position that the topic cannot have given to a reader.

    Checks only what is known without disk access. It does not check that a record begins at the position.
    """
    if at.offset > topic.end_offset or at.ordinal > topic.end_ordinal:
        raise BadCursorError(
            f"offset {at.offset} and ordinal {at.ordinal} lie past the end of topic {topic.name!r}, "
            f"which is at offset {topic.end_offset} and ordinal {topic.end_ordinal}"
        )
    if at.epoch > topic.epoch:
        raise BadCursorError(
            f"topic {topic.name!r} has not had the epoch {at.epoch}: its last is {topic.epoch}"
        )


class Cursors:
    """All cursors, read from the catalogue at the start and changed when a commit is durable.

    Listing cursors, or finding out which records retention must keep, needs no disk access. A cursor belongs
    to the topic's name and so outlives the topic. Both tables are in order: strings sort by code point, which
    is also their UTF-8 order.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        found = [
            Cursor(row.name.decode(), row.reader.decode(), Position(*row[2:5]), row.ms)
            for row in catalogue.cursors()
        ]
        self._by_topic = SortedDict({(one.topic, one.reader): one for one in found})
        """Cursors by topic and reader."""
        self._by_reader = SortedDict({(one.reader, one.topic): one for one in found})
        """The same cursors by reader and topic."""
        self._asked: set[tuple[str, str]] = set()
        """Topic and reader of new cursors whose commit is not durable yet."""

    def check(
        self, reader: str, positions: Mapping[str, Position], look: Callable[[str], Topic]
    ) -> None:
        """Check new cursors of a reader, and reserve room for them. Raises an error if one cannot be set."""
        check_reader_name(reader)
        for name, position in positions.items():
            check_position(look(name), position)
        self._reserve(reader, positions)

    def _reserve(self, reader: str, topics: Collection[str]) -> None:
        """Reserve room for a reader's new cursors before their commit; raise TooManyCursorsError if full."""
        keys = {(topic, reader) for topic in topics}
        new = {key for key in keys if key not in self._by_topic} - self._asked
        count = len(self._by_topic)
        if count + len(self._asked) + len(new) > CURSORS_MAX:
            raise TooManyCursorsError(
                f"there are {count} cursors, and no more than {CURSORS_MAX} are kept: "
                "drop those of readers that are gone"
            )
        self._asked |= new

    def committed(self, changes: Sequence[CursorChange], ms: int) -> None:
        """Store and drop cursors whose commit is durable."""
        for topic, reader, position in changes:
            if position is None:
                self._by_topic.pop((topic, reader), None)
                self._by_reader.pop((reader, topic), None)
            else:
                cursor = Cursor(topic, reader, position, ms)
                self._by_topic[topic, reader] = self._by_reader[reader, topic] = cursor
                self._asked.discard((topic, reader))

    def list(
        self,
        topic: str | None = None,
        reader: str | None = None,
        *,
        after: tuple[str, str] = ("", ""),
        limit: int,
    ) -> list[Cursor]:
        if topic is not None and reader is not None:
            one = self._by_topic.get((topic, reader))
            found: Iterable[Cursor] = [one] if one is not None else []
        elif reader is not None:
            # No name is empty, so every cursor of the reader comes after this key.
            cursors = _from(self._by_reader, (reader, after[0]))
            found = takewhile(lambda one: one.reader == reader, cursors)
        elif topic is not None:
            cursors = _from(self._by_topic, max(after, (topic, "")))
            found = takewhile(lambda one: one.topic == topic, cursors)
        else:
            found = _from(self._by_topic, after)
        return list(
            islice((one for one in found if (one.topic, one.reader) > after), max(0, limit))
        )


def _from(cursors: "SortedDict[tuple[str, str], Cursor]", key: tuple[str, str]) -> Iterator[Cursor]:
    return map(cursors.__getitem__, cursors.irange(key))


class Notes:
    """Notes that are not applied yet. The size of the journal bounds their number.

    A caller sees the value that was put last, at once.
    """

    def __init__(self, catalogue: Catalogue, bytes_max: int) -> None:
        self._catalogue = catalogue
        self._bytes_max = bytes_max
        self._unapplied: dict[bytes, Note] = {}
        """The value that was put last, for each key with puts that the catalogue does not have yet."""
        self._again: dict[bytes, int] = {}
        """Number of further puts per key that the catalogue does not have yet."""
        self._committed: deque[tuple[int, Sequence[Note]]] = deque()
        """Notes that are in the journal, with the number of their commit."""
        self._keys = SortedList()
        """Keys of unapplied notes. Some keys may be applied by now, and some may occur twice."""
        self._due: list[tuple[int, bytes]] = []
        """A heap of the notes due up to `_due_until`. Some may be applied by now, or put again."""
        self._due_until = -1
        self._due_from = (0, b"")
        """Place in the catalogue's order of due notes: every note before it has been put again since."""

    def put(self, notes: Sequence[Note]) -> None:
        """Take new notes, which will be committed in this order."""
        unapplied = self._unapplied
        for key, value, due_ms in notes:
            assert 0 < len(key) <= NOTE_KEY_BYTES_MAX and 0 <= due_ms <= INTEGER_MAX
            assert value is None or len(key) + len(value) <= self._bytes_max
        for note in notes:
            key, value, due_ms = note
            if key in unapplied:
                self._again[key] = self._again.get(key, 0) + 1
            else:
                self._keys.add(key)
            unapplied[key] = note
            if 0 < due_ms <= self._due_until and value is not None:
                heappush(self._due, (due_ms, key))
        self._tidy()

    def committed(self, notes: Sequence[Note], sequence: int) -> None:
        """Record that the notes are in the journal, in the commit `sequence`."""
        self._committed.append((sequence, notes))

    def applied(self, sequence: int, at_least: int) -> bool:
        """Forget notes of commits up to `sequence`, which the catalogue holds now.

        Forgets `at_least` notes or a few more, or all of them. Returns True if there are more to forget.
        """
        committed, unapplied, again = self._committed, self._unapplied, self._again
        while committed and committed[0][0] <= sequence and at_least > 0:
            _, notes = committed.popleft()
            at_least -= len(notes)
            for key, _, _ in notes:
                more = again.pop(key, 0)
                if not more:
                    del unapplied[key]
                elif more > 1:
                    again[key] = more - 1
        self._due_from = (0, b"")
        self._tidy()
        return bool(committed) and committed[0][0] <= sequence

    def get(self, key: bytes) -> Note | None:
        note = self._unapplied.get(key)
        if note is None and (row := self._catalogue.note(key)) is not None:
            note = Note(*row[:3])
        return note if note is not None and note.value is not None else None

    def listed(self, prefix: bytes, after: bytes, limit: int) -> list[Note]:
        applied = (
            Note(*row[:3])
            for row in self._catalogue.notes(prefix, after)
            if row.key not in self._unapplied
        )
        given = self._given(prefix, after)
        return list(islice(merge(given, applied, key=attrgetter("key")), max(0, limit)))

    def due(self, until_ms: int, limit: int) -> list[Note]:
        found = self._due_given(until_ms, limit) + self._due_applied(until_ms, limit)
        return sorted(found, key=attrgetter("due_ms", "key"))[: max(0, limit)]

    def _given(self, prefix: bytes, after: bytes) -> Iterator[Note]:
        keys = self._keys.irange(max(prefix, after), inclusive=(after < prefix, True))
        last = None
        for key in keys:
            if not key.startswith(prefix):
                break
            note = self._unapplied.get(key)
            if note is not None and note.value is not None and key != last:
                last = key
                yield note

    def _due_given(self, until_ms: int, limit: int) -> list[Note]:
        if until_ms > self._due_until:
            self._due_until = until_ms + _AHEAD_MS
            self._put_in_order()
        heap = self._due
        found: dict[bytes, Note] = {}
        while heap and heap[0][0] <= until_ms and len(found) < limit:
            due_ms, key = heappop(heap)
            note = self._unapplied.get(key)
            if note is not None and note.value is not None and note.due_ms == due_ms:
                found[key] = note
        for key, note in found.items():
            heappush(heap, (note.due_ms, key))
        return list(found.values())

    def _due_applied(self, until_ms: int, limit: int) -> list[Note]:
        found: list[Note] = []
        for due_ms, key in self._catalogue.due_notes(self._due_from, until_ms):
            if not found:
                self._due_from = due_ms, key
            if key not in self._unapplied:
                row = self._catalogue.note(key)
                assert row is not None
                found.append(Note(*row[:3]))
                if len(found) >= limit:
                    break
        return found

    def _tidy(self) -> None:
        """Clear stale keys and heap entries once they outnumber the current ones."""
        kept_max = 2 * len(self._unapplied) + _STALE_MAX
        if len(self._keys) > kept_max:
            self._keys = SortedList(self._unapplied)
        if len(self._due) > kept_max:
            self._put_in_order()

    def _put_in_order(self) -> None:
        self._due = [
            (note.due_ms, note.key)
            for note in self._unapplied.values()
            if 0 < note.due_ms <= self._due_until and note.value is not None
        ]
        heapify(self._due)


_Key = tuple[str, str]


class Producers:
    """The last numbers that each producer has appended, so that a repeated append is stored once."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._cached: OrderedDict[_Key, Recent] = OrderedDict()
        self._unapplied: OrderedDict[_Key, tuple[int, Recent]] = OrderedDict()
        """Producers with numbers that the catalogue lacks so far, and their last commit. Never evicted."""
        self._waiting: dict[_Key, dict[int, list[Callable[[StoredAppend], None]]]] = defaultdict(
            dict
        )

    def known(self, once: NumberedAppend) -> StoredAppend | None:
        """Return the answer for a number that was stored or is waiting; None for a new number."""
        key = (once.topic.name, once.producer)
        recent = dict(self._load(key))
        if once.number > max([*recent, *self._waiting.get(key, {})], default=-1):
            return None
        return StoredAppend(recent.get(once.number), duplicate=True)

    def is_waiting(self, once: NumberedAppend) -> bool:
        return once.number in self._waiting.get((once.topic.name, once.producer), {})

    def wait(self, once: NumberedAppend, done: Callable[[StoredAppend], None]) -> None:
        self._waiting[once.topic.name, once.producer].setdefault(once.number, []).append(done)

    def committed(
        self, numbered: Sequence[NumberedAppend], appended: Sequence[Appended], sequence: int
    ) -> list[Callable[[], None]]:
        """Record appends that are durable in commit `sequence`; return the calls that answer waiters."""
        return [
            answer
            for once, one in zip(numbered, appended, strict=True)
            for answer in self._stored(once, one.end, sequence)
        ]

    def _stored(self, once: NumberedAppend, end: int, sequence: int) -> list[Callable[[], None]]:
        """Record that the append is durable in commit `sequence`; return the calls that answer waiters."""
        key = (once.topic.name, once.producer)
        recent = [*self._load(key), (once.number, end)][-RECENT_MAX:]
        self._cached.pop(key, None)
        if sequence:
            self._unapplied[key] = sequence, recent
            self._unapplied.move_to_end(key)
        else:
            self._cache(key, recent)  # the catalogue never holds producers of `memory` topics
        waiting = self._waiting[key].pop(once.number)
        if not self._waiting[key]:
            del self._waiting[key]
        return [
            partial(done, StoredAppend(end, duplicate=index > 0))
            for index, done in enumerate(waiting)
        ]

    def applied(self, sequence: int) -> None:
        """Let producers be evicted whose last commit is at most `sequence`: the catalogue holds them now."""
        while self._unapplied and next(iter(self._unapplied.values()))[0] <= sequence:
            key, (_, recent) = self._unapplied.popitem(last=False)
            self._cache(key, recent)

    def _load(self, key: _Key) -> Recent:
        if key in self._unapplied:
            return self._unapplied[key][1]
        recent = self._cached.pop(key, None)
        if recent is None:
            row = self._catalogue.producer(key[0].encode(), key[1].encode())
            recent = msgspec.msgpack.decode(row.recent, type=Recent) if row is not None else []
        self._cache(key, recent)
        return recent

    def _cache(self, key: _Key, recent: Recent) -> None:
        self._cached[key] = recent
        if len(self._cached) > PRODUCERS_CACHED_MAX:
            self._cached.popitem(last=False)
