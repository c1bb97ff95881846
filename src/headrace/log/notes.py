"""Notes: small durable values by key, beside the log. Writes nothing itself.

The truth is in the catalogue and, for what is not applied yet, here: whoever asks sees what was given last,
at once. What is here is bounded by the journal.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush, merge
from itertools import islice

from headrace.log.catalogue import INTEGER_MAX, Catalogue
from headrace.log.store import NOTE_KEY_BYTES_MAX, Note

_SPARE_MAX = 64
"""Places of notes that are gone are kept up to so many more than there are notes, before they are cleared."""


class Notes:
    def __init__(self, catalogue: Catalogue, bytes_max: int) -> None:
        self._catalogue = catalogue
        self._bytes_max = bytes_max
        self._unapplied: dict[bytes, tuple[Note, int]] = {}
        """What was given last, and how many were given that the catalogue does not have yet."""
        self._committed: deque[tuple[int, bytes]] = deque()
        """Of each of those that are in the journal, the number of the commit and the key."""
        self._keys: list[bytes] = []
        """In order; some may be applied by now."""
        self._due: list[tuple[int, bytes]] = []
        """A heap; some may be applied, or noted anew."""
        self._due_from = (0, b"")
        """Everything that is due before this place of the catalogue has been noted anew."""

    def put(self, notes: Sequence[Note]) -> None:
        """They are given, and will be committed in this order."""
        for note in notes:
            key, value, due_ms = note
            assert 0 < len(key) <= NOTE_KEY_BYTES_MAX and 0 <= due_ms <= INTEGER_MAX
            assert len(key) + len(value or b"") <= self._bytes_max
        for note in notes:
            key = note.key
            _, count = self._unapplied.get(key, (note, 0))
            self._unapplied[key] = note, count + 1
            if not count:
                self._place(key)
            if note.due_ms and note.value is not None:
                heappush(self._due, (note.due_ms, key))
        self._tidy()

    def committed(self, notes: Sequence[Note], sequence: int) -> None:
        """They are in the journal, in this commit."""
        self._committed.extend((sequence, note.key) for note in notes)

    def applied(self, sequence: int, limit: int) -> bool:
        """The catalogue holds everything up to this commit; returns whether there is more to forget."""
        committed = self._committed
        for _ in range(limit):
            if not committed or committed[0][0] > sequence:
                break
            _, key = committed.popleft()
            note, count = self._unapplied[key]
            if count > 1:
                self._unapplied[key] = note, count - 1
            else:
                del self._unapplied[key]
        self._due_from = (0, b"")
        self._tidy()
        return bool(committed) and committed[0][0] <= sequence

    def get(self, key: bytes) -> Note | None:
        if key in self._unapplied:
            note, _ = self._unapplied[key]
            return note if note.value is not None else None
        row = self._catalogue.note(key)
        return Note(*row[:3]) if row is not None else None

    def listed(self, prefix: bytes, after: bytes, limit: int) -> list[Note]:
        """In the order of their keys."""
        applied = (
            Note(*row[:3])
            for row in self._catalogue.notes(prefix, after)
            if row.key not in self._unapplied
        )
        given = self._given(prefix, after)
        return list(islice(merge(given, applied, key=_key), max(0, limit)))

    def due(self, until_ms: int, limit: int) -> list[Note]:
        """The earliest first."""
        found = self._due_given(until_ms, limit) + self._due_applied(until_ms, limit)
        return sorted(found, key=_due_and_key)[: max(0, limit)]

    def _given(self, prefix: bytes, after: bytes) -> Iterator[Note]:
        keys = self._keys
        first = bisect_right(keys, after) if after >= prefix else bisect_left(keys, prefix)
        for at in range(first, len(keys)):
            key = keys[at]
            if not key.startswith(prefix):
                break
            note, _ = self._unapplied.get(key, (None, 0))
            if note is not None and note.value is not None:
                yield note

    def _due_given(self, until_ms: int, limit: int) -> list[Note]:
        heap = self._due
        found: dict[bytes, Note] = {}
        while heap and heap[0][0] <= until_ms and len(found) < limit:
            due_ms, key = heappop(heap)
            note, _ = self._unapplied.get(key, (None, 0))
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

    def _place(self, key: bytes) -> None:
        at = bisect_left(self._keys, key)
        if at == len(self._keys) or self._keys[at] != key:
            self._keys.insert(at, key)

    def _tidy(self) -> None:
        """Clear what is out of date when it has become more than the rest."""
        kept_max = 2 * len(self._unapplied) + _SPARE_MAX
        if len(self._keys) > kept_max:
            self._keys = sorted(self._unapplied)
        if len(self._due) > kept_max:
            notes = (note for note, _ in self._unapplied.values())
            self._due = [(n.due_ms, n.key) for n in notes if n.due_ms and n.value is not None]
            heapify(self._due)


def _key(note: Note) -> bytes:
    return note.key


def _due_and_key(note: Note) -> tuple[int, bytes]:
    return note.due_ms, note.key
