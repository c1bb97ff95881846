"""All streams: creating, appending, closing, deleting and expiry, through the store. Knows no HTTP answers.

The state of a stream is in a note, which the store shows as soon as it is given. So a request is decided and
carried out in one step of the loop, and waits for its commit afterwards. Nobody sees what is not durable
yet: while a name is being created or deleted, it has no stream. Elsewhere: decisions (`stream.py`), reads
(`reading.py`), live readers (`following.py`).
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from headrace.broker.broker import Broker
from headrace.config.settings import TopicRule
from headrace.log.store import Note, Store, Topic, waited_for
from headrace.model import Durability, Position
from headrace.printing import quoted
from headrace.server.http.streams import offsets
from headrace.server.http.streams.content import BYTES
from headrace.server.http.streams.forks import Inherited, counted, forked, released
from headrace.server.http.streams.messages import Append, Claim, Create
from headrace.server.http.streams.refusals import CLOSED, NEXT_OFFSET, RefusedError
from headrace.server.http.streams.stream import (
    PRODUCER,
    STREAM,
    Produced,
    Stream,
    decode_produced,
    decode_stream,
    is_new,
    producer_key,
    producer_note,
    stream_key,
    stream_note,
)

_HELD_MS = 60_000
"""Time after which an expired stream that readers hold is looked at again."""

_NOWHERE = Topic("$streams", Durability.WRITTEN)
"""Topic of changes that only drop notes. It never exists."""


class Found(NamedTuple):
    """A stream that can be read."""

    topic: Topic
    stream: Stream
    is_closed: bool
    """True if its closure is durable."""


class Appended(NamedTuple):
    end: Position
    """End of the request's own records; of the stream for a duplicate."""
    is_closed: bool
    highest: Produced | None
    """Highest number of the request's producer that is known to be durable; None without one."""
    is_duplicate: bool


class Streams:
    def __init__(
        self,
        store: Store,
        broker: Broker,
        rule: Callable[[str], TopicRule],
        now_ms: Callable[[], int],
        elapsed_ms: Callable[[], int],
    ) -> None:
        self._store = store
        self._broker = broker
        self._rule = rule
        self._now_ms = now_ms
        self._elapsed_ms = elapsed_ms
        self._started_ms = elapsed_ms()
        self._used_ms: dict[str, int] = {}
        """Last use of streams with a time to live, in elapsed time: jumps of the clock make no stream older.

        A start of the server counts as use of all streams.
        """
        self._hidden: dict[str, asyncio.Event] = {}
        """Names that are being created or deleted; the event says that this is durable."""
        self._closing: set[str] = set()
        """Streams whose closure is not durable yet."""
        self._expiring: set[str] = set()
        """Streams whose time is over; they are looked at once more after a commit."""
        self._followers: dict[Topic, dict[Callable[[], None], None]] = {}

    # Looking

    def find(self, name: str) -> Found | None:
        """Return a stream, or any other topic; None if there is none."""
        topic = self._store.look(name)
        stream = decode_stream(self._store.note(stream_key(name)))
        if stream.is_gone and name not in self._hidden:
            raise RefusedError(
                410, f"the stream {quoted(name)} was deleted, and its forks were not"
            )
        if name in self._hidden or not topic.exists:
            return None
        if self._has_expired(topic, stream):
            return None
        return Found(topic, stream, self.is_closed(topic))

    def exists(self, name: str) -> bool:
        """Return True if there is a stream, or any other topic."""
        try:
            return self.find(name) is not None
        except RefusedError:
            return False  # it was deleted, and its forks were not

    def is_closed(self, topic: Topic) -> bool:
        """Return True if the stream is closed and that is durable."""
        return topic.is_closed and topic.name not in self._closing

    def used(self, found: Found) -> None:
        """Count a use of the stream, which extends its time to live."""
        if found.stream.ttl_s is not None and found.topic.exists:
            self._used_ms[found.topic.name] = self._elapsed_ms()

    def _last_used_ms(self, topic: Topic) -> int:
        # Appends and subscriptions of other protocols count as well.
        now_ms = self._now_ms()
        if self._broker.subscriptions(topic):
            return now_ms
        unused_ms = self._elapsed_ms() - self._used_ms.get(topic.name, self._started_ms)
        return max(now_ms - unused_ms, topic.last_ms)

    def _has_expired(self, topic: Topic, stream: Stream) -> bool:
        deadline_ms = stream.deadline_ms(self._last_used_ms(topic))
        return bool(deadline_ms) and deadline_ms <= self._now_ms()

    # Following

    def follow(self, topic: Topic, wake: Callable[[], None]) -> None:
        """Call `wake` when the stream is closed or deleted, until `leave` is called."""
        self._followers.setdefault(topic, {})[wake] = None

    def leave(self, topic: Topic, wake: Callable[[], None]) -> None:
        followers = self._followers.get(topic, {})
        followers.pop(wake, None)
        if not followers:
            self._followers.pop(topic, None)

    def close(self) -> None:
        """Wake all followers: the server stops."""
        for followers in list(self._followers.values()):
            for wake in list(followers):
                wake()

    def _tell(self, topic: Topic) -> None:
        for wake in list(self._followers.get(topic, ())):
            wake()

    # Creating and deleting

    async def settled(self, name: str) -> None:
        """Return when the name is neither being created nor being deleted."""
        while (change := self._hidden.get(name)) is not None:
            await change.wait()

    async def create(
        self,
        name: str,
        wanted: Create,
        records: Sequence[bytes],
        source: Found | None = None,
        inherited: Inherited | None = None,
    ) -> Position:
        """Create a stream where there is none. Return the end of its first records when it is durable.

        With a source, the stream is a fork of it and begins with the inherited records.
        """
        topic = self._store.look(name)
        assert name not in self._hidden and self.find(name) is None
        if topic.durability is Durability.MEMORY:
            raise RefusedError(409, "a rule keeps this topic in memory, which streams cannot be")
        if topic.exists:
            self._refuse_if_needed(topic)
        now_ms = self._now_ms()
        stream = Stream(
            wanted.content_type or BYTES,
            is_made=True,
            life=os.urandom(8),
            ttl_s=wanted.ttl_s,
            expires_ms=wanted.expires_ms,
        )
        if source is not None and inherited is not None:
            stream = self._forked(topic, source, inherited, wanted, stream)
            records = [*inherited.records, *records]
        if topic.exists:
            self._destroy(topic, _ignore)
        notes: list[Note] = []
        if source is not None:
            # The expired stream may have been a fork of the same source, which has just lost it.
            origin = self._store.note(stream_key(source.topic.name))
            state = msgspec.structs.replace(decode_stream(origin), life=stream.source_life)
            due_ms = origin.due_ms if origin is not None else 0
            notes.append(counted(source.topic.name, state, due_ms))
        topic = self._store.topic(name)
        self._used_ms.pop(name, None)
        if stream.ttl_s is not None:
            self._used_ms[name] = self._elapsed_ms()
        done, show = self._hide(name)
        ends: list[Position] = []
        try:
            self._store.change(
                topic,
                records=records,
                notes=[stream_note(name, stream, stream.deadline_ms(now_ms)), *notes],
                create_above=source.topic.epoch if source is not None else 0,
                close=wanted.closes,
                done=show,
                ends_at=ends.append,
            )
        except BaseException:
            show()
            raise
        await done.wait()
        return ends[0]

    def _forked(
        self, topic: Topic, source: Found, inherited: Inherited, wanted: Create, made: Stream
    ) -> Stream:
        """Return the state of a new fork. Raises RefusedError if it cannot have the source's offsets."""
        found = self.find(source.topic.name)
        if found is None or found.topic.epoch != source.topic.epoch:
            raise RefusedError(404, "the source was deleted meanwhile")
        if source.topic.durability is Durability.MEMORY:
            raise RefusedError(409, "a rule keeps the source in memory: it cannot have forks")
        if not topic.exists and self._store.exists(topic.name):
            raise RefusedError(409, "another protocol is creating a topic of this name")
        if inherited.start != topic.end_offset:
            raise RefusedError(
                409,
                f"a stream of this name begins at offset {topic.end_offset}, the records of the source at "
                f"offset {inherited.start}: choose another name, or a source that still has its beginning",
            )
        state = found.stream
        if not state.life:
            state = msgspec.structs.replace(state, life=os.urandom(8))
        return forked(state, source.topic.epoch, inherited.end, wanted, made)

    async def delete(self, topic: Topic) -> None:
        """Delete a stream, or any other topic. Return when that is durable."""
        await self.settled(topic.name)
        if topic.exists:
            await self._delete(topic).wait()

    def _delete(self, topic: Topic) -> asyncio.Event:
        done, show = self._hide(topic.name)

        def deleted() -> None:
            show()
            self._tell(topic)

        try:
            self._destroy(topic, deleted)
        except BaseException:
            show()
            raise
        return done

    def _hide(self, name: str) -> tuple[asyncio.Event, Callable[[], None]]:
        """Hide a name until the returned function is called, which also sets the event."""
        done = self._hidden[name] = asyncio.Event()

        def show() -> None:
            del self._hidden[name]
            done.set()

        return done, show

    def forgotten(self, topic: Topic) -> list[Note]:
        """Return notes that a change has to put when it destroys the topic."""
        note = self._store.note(stream_key(topic.name))
        return [] if note is None else released(topic.name, decode_stream(note), self._store.note)

    def _destroy(self, topic: Topic, done: Callable[[], None]) -> None:
        self._used_ms.pop(topic.name, None)
        if topic.durability is Durability.MEMORY:
            self._store.destroy(topic, done)
        else:
            self._store.change(topic, notes=self.forgotten(topic), destroy=True, done=done)

    # Appending

    async def append(self, found: Found, request: Append, records: Sequence[bytes]) -> Appended:
        """Append to a stream, and close it if the request says so. Return when all of that is durable."""
        topic, stream, _ = found
        claim, name, now_ms = request.claim, topic.name, self._now_ms()
        if topic.durability is Durability.MEMORY:
            raise RefusedError(
                409, "a rule keeps this topic in memory: publish over another protocol"
            )
        known = self._known(stream, claim)
        is_closed = topic.is_closed
        try:
            fresh = is_new(request, stream, known, is_closed=is_closed)
        except RefusedError as refused:
            if refused.status_code == 409:
                # The refusal tells of a closure, a number or a sequence that may not be durable yet.
                await self.durable(topic)
                if is_closed:
                    refused.headers = {CLOSED: "true", NEXT_OFFSET: offsets.encode(topic.end)}
            raise
        self.used(found)
        if not fresh:
            # Numbers that are accepted during this wait are not durable after it: clients take the answer's
            # number for an acknowledgement.
            await self.durable(topic)
            return Appended(topic.end, self.is_closed(topic), known, True)
        notes: list[Note] = []
        changed = stream
        if (claim or request.sequence is not None) and not stream.life:
            changed = msgspec.structs.replace(changed, life=os.urandom(8))
        if request.sequence is not None:
            changed = msgspec.structs.replace(changed, sequence=request.sequence)
        if request.closes:
            changed = msgspec.structs.replace(changed, closer=claim)
        if changed is not stream:
            notes.append(stream_note(name, changed, changed.deadline_ms(now_ms)))
        if claim is not None:
            notes.append(producer_note(changed, claim, now_ms))
        done, ends = asyncio.Event(), list[Position]()

        def stored() -> None:
            done.set()
            if request.closes:
                self._closing.discard(name)
                self._tell(topic)

        self._store.change(
            topic,
            records=records,
            notes=notes,
            close=request.closes,
            done=stored,
            ends_at=ends.append,
        )
        if request.closes:
            self._closing.add(name)
        await done.wait()
        highest = Produced(claim.epoch, claim.number) if claim is not None else None
        return Appended(ends[0], request.closes, highest, False)

    async def durable(self, topic: Topic) -> None:
        """Return when everything that the store was given before is durable."""
        done = asyncio.Event()
        self._store.change(topic, done=done.set)
        await done.wait()

    def _known(self, stream: Stream, claim: Claim | None) -> Produced | None:
        if claim is None or not stream.life:
            return None
        return decode_produced(self._store.note(producer_key(stream, claim.producer)))

    # Expiry

    def due(self, note: Note) -> None:
        """Handle a note that is due: the store returns it until it is put again."""
        if note.key.startswith(PRODUCER):
            self._drop(note)
            return
        name = note.key.removeprefix(STREAM).decode()
        topic, stream = self._store.look(name), decode_stream(note)
        if name in self._hidden:
            return  # its change is on the way
        if not topic.exists or topic.durability is Durability.MEMORY:
            self._drop(note)
        elif not self._has_expired(topic, stream):
            used_ms = self._last_used_ms(topic)
            if stream.ttl_s is not None:
                self._used_ms[name] = self._elapsed_ms() - (self._now_ms() - used_ms)
            self._look_again(topic, stream, stream.deadline_ms(used_ms))
        elif self._holders(topic):
            self._look_again(topic, stream, self._now_ms() + _HELD_MS)
        elif name not in self._expiring:
            # Other protocols may have given appends to the store before the time was over.
            self._expiring.add(name)
            self._store.change(topic, done=partial(self._expire, name))

    def _expire(self, name: str) -> None:
        """Delete a stream whose time is over, now that everything given before is durable."""
        self._expiring.discard(name)
        topic, note = self._store.look(name), self._store.note(stream_key(name))
        if name in self._hidden or not topic.exists or note is None:
            return
        if self._has_expired(topic, decode_stream(note)) and not self._holders(topic):
            self._delete(topic)

    def _drop(self, note: Note) -> None:
        self._store.change(_NOWHERE, notes=[Note(note.key, None)], done=_ignore)

    def _look_again(self, topic: Topic, stream: Stream, due_ms: int) -> None:
        self._store.change(topic, notes=[stream_note(topic.name, stream, due_ms)], done=_ignore)

    def _holders(self, topic: Topic) -> list[str]:
        """Return the readers that retention waits for and that have not read all of the topic."""
        held = waited_for(self._store, topic, self._rule(topic.name).retention_wait_for)
        return [hold.reader for hold in held if hold.position.offset < topic.end_offset]

    def _refuse_if_needed(self, topic: Topic) -> None:
        """Refuse to replace an expired stream that somebody still needs."""
        if decode_stream(self._store.note(stream_key(topic.name))).forks:
            raise RefusedError(409, "the stream has expired, and it has forks")
        if readers := self._holders(topic):
            names = ", ".join(map(quoted, readers))
            reason = f"the stream has expired, and is kept until it is read by {names}"
            raise RefusedError(409, reason)


def _ignore() -> None:
    """Do nothing: nobody waits for this change."""
