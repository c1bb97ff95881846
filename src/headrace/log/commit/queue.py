"""Commits that are not written yet: requests are gathered in as few commits as the size limit allows.

request ──▶ gathering ──full, or a topic is destroyed──▶ sealed ──take()──▶ for the journal
      └───▶ in memory, for topics that are never written ──take_memory()──▶ shown at once
"""

from collections import deque
from collections.abc import Callable
from itertools import chain

from headrace.log.commit.commit import (
    Change,
    Commit,
    CursorChange,
    Decision,
    EndReport,
    NumberedAppend,
    Trim,
)
from headrace.log.commit.journal import ENTRY_HEADER_BYTES, Producer
from headrace.log.store import BatchPart, Topic, countdown
from headrace.model import Durability, Position

_CREATE_BYTES = 96
_CURSOR_BYTES = 32
"""Bytes of the entry's extra, besides the names in it."""
_NOTE_BYTES = ENTRY_HEADER_BYTES + 16
"""Bytes of a note's entry, besides key and value."""
_EXTRA_BYTES = 32
_STAGED_FILE_BYTES = 28
"""Bytes per staged file in a decision."""


def note_bytes_max(commit_bytes_max: int) -> int:
    """Return the largest size of a note's key and value together that fits into a commit."""
    return commit_bytes_max - _NOTE_BYTES - ENTRY_HEADER_BYTES


class Gathering:
    """The commits being gathered. Calls no callback: `done` becomes a waiter of the request's last commit."""

    def __init__(self, commit_bytes_max: int, elapsed_s: Callable[[], float]) -> None:
        self._commit_bytes_max = commit_bytes_max
        self._elapsed_s = elapsed_s
        self._current = Commit()
        self._sealed: deque[Commit] = deque()
        self._memory = [Commit()]
        """Requests for `memory` topics: commits that are shown without being written."""
        self.pending_bytes = 0
        """Bytes of the requests for the journal; the caller subtracts a commit's size once it is written."""

    def mentions(self, topic: Topic) -> bool:
        return any(one.mentions(topic) for one in (self._current, *self._sealed, *self._memory))

    # Requests

    def append(self, batches: dict[Topic, list[bytes]], done: Callable[[], None]) -> None:
        for topic in batches:
            if topic.durability is Durability.MEMORY:
                memory = {
                    one: batches[one] for one in batches if one.durability is Durability.MEMORY
                }
                batches = {one: batches[one] for one in batches if one not in memory}
                done = countdown(2, done) if batches else done
                self._memory[-1].add(memory)
                self._memory[-1].waiters.append(done)
                break
        if batches:
            size = sum(map(len, chain.from_iterable(batches.values())))
            size += ENTRY_HEADER_BYTES * len(batches)
            # Creating a topic takes its own entry, with a name that may be longer than the record.
            size += sum(_CREATE_BYTES + len(topic.name) for topic in batches if not topic.id)
            self._room(size, done).add(batches)

    def append_once(self, once: NumberedAppend) -> None:
        self._commit_for(once.topic, sum(map(len, once.records))).numbered.append(once)

    def decide(self, decision: Decision, done: Callable[[], None]) -> None:
        size = ENTRY_HEADER_BYTES + _EXTRA_BYTES + len(decision.producer.encode())
        size += _STAGED_FILE_BYTES * len(decision.files)
        self._room(size, done).decisions.append(decision)

    def append_parts(
        self, parts: list[tuple[Topic, BatchPart]], end: Producer | None, done: Callable[[], None]
    ) -> None:
        overhead = ENTRY_HEADER_BYTES + _EXTRA_BYTES
        commit = self._memory[-1]
        for topic, part in parts:
            size = overhead + len(part.producer) + len(part.block.data)
            size += 0 if topic.id else _CREATE_BYTES + len(topic.name)
            chosen = self._commit_for(topic, size)
            chosen.parts.append((topic, part))
            if topic.durability is not Durability.MEMORY:
                commit = chosen
                if end == Producer(part.producer.encode(), part.number, progress=part.progress):
                    end = None  # the part's own entry already records this end in the journal
        if end is not None:
            commit = self._room(overhead + len(end.name))
            commit.ends.append(end)
        commit.waiters.append(done)

    def trim(self, topic: Topic, position: Position, done: Callable[[], None]) -> None:
        self._commit_for(topic, 0, done).trims.append(Trim(topic, position))

    def destroy(self, topic: Topic, done: Callable[[], None]) -> None:
        self._commit_for(topic, 0, done).destroyed.append(topic)
        # Later requests belong to the next epoch of the topic.
        if topic.durability is Durability.MEMORY:
            self._memory.append(Commit())
        else:
            self._seal()

    def change(self, change: Change, done: Callable[[], None]) -> None:
        """Gather the whole change in one commit, however long the commit becomes."""
        topic, records, notes, trim, create_above, close, destroy, ends_at = change
        if close and self._current.has_later_records(topic):
            self._seal()
        size = ENTRY_HEADER_BYTES * (1 + bool(records) + (trim is not None) + destroy)
        if records or create_above is not None:
            size += sum(map(len, records))
            size += 0 if topic.id else _CREATE_BYTES + len(topic.name)
        for key, value, _ in notes:
            size += _NOTE_BYTES + len(key) + len(value or b"")
        commit = self._room(size, done)
        commit.changed[topic] = None
        commit.notes += [(topic, note) for note in notes]
        if create_above is not None:
            commit.creates[topic] = create_above
        if records:
            commit.add({topic: records})
        if ends_at is not None:
            count = len(commit.appends.get(topic, ()))
            commit.reports.append(EndReport(topic, count, ends_at))
        if trim is not None:
            commit.trims.append(Trim(topic, trim))
        if destroy:
            commit.destroyed.append(topic)
            self._seal()

    def change_cursors(self, changes: list[CursorChange], done: Callable[[], None]) -> None:
        size = sum(
            ENTRY_HEADER_BYTES + _CURSOR_BYTES + len(one.topic) + len(one.reader) for one in changes
        )
        self._room(size, done).cursors += changes

    # Gathered commits

    def take(self) -> Commit | None:
        """Return the next commit for the journal, or None."""
        if self._sealed:
            return self._sealed.popleft()
        commit = self._current
        if not (commit.waiters or commit.numbered):
            return None
        self._current = Commit()
        return commit

    def take_memory(self) -> list[Commit]:
        """Return the commits that are not for the journal."""
        first = self._memory[0]
        if len(self._memory) == 1 and not (first.waiters or first.numbered or first.parts):
            return []
        # Nobody waits for such a commit longer than for the current step.
        now_s = self._elapsed_s()
        for commit in self._memory:
            commit.asked_s = now_s
        commits, self._memory = self._memory, [Commit()]
        return commits

    def _commit_for(
        self, topic: Topic, size: int, done: Callable[[], None] | None = None
    ) -> Commit:
        if topic.durability is not Durability.MEMORY:
            return self._room(size, done)
        if done is not None:
            self._memory[-1].waiters.append(done)
        return self._memory[-1]

    def _room(self, size: int, done: Callable[[], None] | None = None) -> Commit:
        """Return the commit that takes `size` more bytes for the journal; seal a full one."""
        commit = self._current
        if commit.size + size > self._commit_bytes_max and commit.size:
            self._seal()
            commit = self._current
        if not commit.asked_s:
            commit.asked_s = self._elapsed_s()
        commit.size += size
        self.pending_bytes += size
        if done is not None:
            commit.waiters.append(done)
        return commit

    def _seal(self) -> None:
        self._sealed.append(self._current)
        self._current = Commit()
