"""Handles of topics: the handle for each name, and the list of names. Knows no records.

A handle is made when a topic is first requested, from the catalogue or empty. The catalogue is some seconds
behind, so topics created or destroyed since then are known only here.
"""

from collections.abc import Callable
from weakref import WeakValueDictionary

from headrace.config.settings import TopicRule
from headrace.log.catalogue.catalogue import Catalogue
from headrace.log.catalogue.rows import TopicRow
from headrace.log.store import Topic
from headrace.model import Durability


class Handles:
    def __init__(self, catalogue: Catalogue, rule: Callable[[str], TopicRule]) -> None:
        self._catalogue = catalogue
        self._rule = rule
        self._known: dict[str, Topic] = {}
        self._dropped: WeakValueDictionary[str, Topic] = WeakValueDictionary()
        """Dropped handles that a caller may still append to: a second handle would miss those appends."""
        self._unlisted: dict[str, Topic] = {}
        """Topics that exist and are not in the catalogue yet, or never will be."""

    def get(self, name: str) -> Topic:
        topic = self._known.get(name)
        if topic is None:
            topic = self._known[name] = self._find(name)
        return topic

    def look(self, name: str) -> Topic:
        """Return the same handle as `get`, but keep no handle of a topic that does not exist."""
        topic = self._known.get(name)
        if topic is None:
            topic = self._find(name)
            if topic.exists:
                self._known[name] = topic
        return topic

    def _find(self, name: str) -> Topic:
        topic = self._dropped.get(name)
        return topic or self._load(name, self._catalogue.topic(name.encode()))

    def drop(self, topic: Topic) -> None:
        """Forget the handle of a topic that was never created."""
        # A destroyed topic has a `last_ms` and keeps its handle: the catalogue may not know of its end yet.
        if not topic.exists and not topic.last_ms:
            self._known.pop(topic.name, None)
            self._dropped[topic.name] = topic

    def created(self, topic: Topic) -> None:
        self._known[topic.name] = self._unlisted[topic.name] = topic

    def destroyed(self, topic: Topic) -> None:
        self._unlisted.pop(topic.name, None)

    def applied(self, topic: Topic) -> None:
        """Let the catalogue list the topic from now on, once the catalogue has the topic's present epoch."""
        if topic.name in self._unlisted:
            row = self._catalogue.topic(topic.name.encode())
            # If a topic was destroyed and created again, the catalogue may have only its destruction so far.
            if row is not None and row.epoch == topic.epoch:
                del self._unlisted[topic.name]

    def list(self, prefix: str, after: str, limit: int) -> list[Topic]:
        """Return existing topics in the order of their names' bytes."""
        first = after.encode()
        rows: dict[bytes, TopicRow] = {}
        for row in self._catalogue.topics(prefix.encode(), first):
            known = self._known.get(row.name.decode())
            # A destroyed topic that is still in the catalogue must not take the place of another one.
            if known is None or known.exists:
                rows[row.name] = row
                if len(rows) == limit:
                    break
        names = set(rows)
        for name in self._unlisted:
            encoded = name.encode()
            if name.startswith(prefix) and encoded > first:
                names.add(encoded)
        # Listing a topic does not keep its handle in memory.
        return [
            self._known.get(name.decode()) or self._load(name.decode(), rows[name])
            for name in sorted(names)[:limit]
        ]

    def _load(self, name: str, row: TopicRow | None) -> Topic:
        topic = Topic(name, self._rule(name).durability)
        if row is None:
            start = self._catalogue.grave(name.encode())
            topic.epoch = start.epoch
            topic.start_offset = topic.end_offset = start.offset
            topic.start_ordinal = topic.end_ordinal = start.ordinal
            return topic
        topic.id = row.id
        topic.epoch = row.epoch
        topic.start_offset, topic.start_ordinal = row.start_offset, row.start_ordinal
        topic.end_offset, topic.end_ordinal = row.end_offset, row.end_ordinal
        topic.last_ms = row.last_ms
        if topic.durability is Durability.MEMORY:
            # The topic has records on disk from before the rule: they are not dropped silently.
            topic.durability = Durability.WRITTEN
        return topic
