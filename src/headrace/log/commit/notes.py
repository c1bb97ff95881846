"""Notes: small durable values by key, beside the log. Writes nothing itself.

Applied notes are in the catalogue, and notes that are not applied yet are here. A reader sees the value that
was put last, at once. The size of the journal bounds the notes in memory.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush, merge
from itertools import islice

from sortedcontainers import SortedList

from headrace.log.catalogue.catalogue import INTEGER_MAX, Catalogue
from headrace.log.store import NOTE_KEY_BYTES_MAX, Note

_SPARE_MAX = 64
"""Number by which stale entries may exceed the number of notes before they are cleared."""

_AHEAD_MS = 600_000
"""Notes that are due later than this are not sorted: most are put again, or applied, before then."""


class Notes:
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
                more = again.get(key, 0)
                if not more:
                    del unapplied[key]
                elif more == 1:
                    del again[key]
                else:
                    again[key] = more - 1
        self._due_from = (0, b"")
        self._tidy()
        return bool(committed) and committed[0][0] <= sequence

    def get(self, key: bytes) -> Note | None:
        note = self._unapplied.get(key)
        if note is not None:
            return note if note.value is not None else None
        row = self._catalogue.note(key)
        return Note(*row[:3]) if row is not None else None

    def listed(self, prefix: bytes, after: bytes, limit: int) -> list[Note]:
        """Return the notes whose keys have the prefix, in the order of their keys."""
        applied = (
            Note(*row[:3])
            for row in self._catalogue.notes(prefix, after)
            if row.key not in self._unapplied
        )
        given = self._given(prefix, after)
        return list(islice(merge(given, applied, key=_key), max(0, limit)))

    def due(self, until_ms: int, limit: int) -> list[Note]:
        """Return the notes due up to `until_ms`, the earliest first."""
        found = self._due_given(until_ms, limit) + self._due_applied(until_ms, limit)
        return sorted(found, key=_due_and_key)[: max(0, limit)]

    def _given(self, prefix: bytes, after: bytes) -> Iterator[Note]:
        if after >= prefix:
            keys = self._keys.irange(after, inclusive=(False, False))
        else:
            keys = self._keys.irange(prefix)
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
        kept_max = 2 * len(self._unapplied) + _SPARE_MAX
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


def _key(note: Note) -> bytes:
    return note.key


def _due_and_key(note: Note) -> tuple[int, bytes]:
    return note.due_ms, note.key
