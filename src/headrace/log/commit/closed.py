"""Closed topics, which take no more records. A note in the closing change makes the closure durable.

The handle of a topic says whether it is closed. This table reads the note when a handle is made. A store that
never closed a topic pays nothing. Elsewhere: who may close a topic (`server/http/streams/`).
"""

from collections.abc import Callable, Iterable, Sequence

from headrace.errors import ClosedTopicError
from headrace.log.commit.tables import Notes
from headrace.log.store import Note, Topic
from headrace.model import closed_reason

_KEY = b"tc"
"""Begins the key of the note that closes a topic. The topic's name follows."""


class ClosedTopics:
    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self.may_exist = bool(notes.listed(_KEY, b"", 1))
        """False if no topic was closed when the store was opened, nor since."""

    def has(self, name: str) -> bool:
        """Return True if the note about this topic says that it is closed."""
        return self.may_exist and self._notes.get(_KEY + name.encode()) is not None

    def first(self, names: Iterable[str], look: Callable[[str], Topic]) -> str:
        """Return the first name of a closed topic; empty if there is none."""
        if not self.may_exist:
            return ""
        return next((name for name in names if look(name).is_closed), "")

    def refuse(self, topics: Iterable[Topic]) -> None:
        """Raise ClosedTopicError if one of the topics is closed."""
        if self.may_exist:
            for topic in topics:
                if topic.is_closed:
                    raise ClosedTopicError(closed_reason(topic.name))

    def changed(
        self, topic: Topic, notes: Sequence[Note], *, close: bool, destroy: bool
    ) -> Sequence[Note]:
        """Close the topic, or open its next life. Return the notes of the change with that of the closure."""
        key = _KEY + topic.name.encode()
        if close:
            topic.is_closed = self.may_exist = True
            notes = [*notes, Note(key, b"")]
        if destroy and topic.is_closed:
            topic.is_closed = False
            notes = [*notes, Note(key, None)]
        return notes
