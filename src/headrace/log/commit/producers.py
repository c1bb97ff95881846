"""Idempotence: who has appended which number, so that a repeated append is stored once.

The truth is in the catalogue and, for commits not applied yet, here.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial

import msgspec

from headrace.log.catalogue import Catalogue
from headrace.log.entries import RECENT_MAX, Recent
from headrace.log.store import Stored, Topic

CACHED_MAX = 100_000
"""Producers remembered without asking the catalogue."""

_Key = tuple[str, str]


class Producers:
    def __init__(self, catalogue: Catalogue, cached_max: int = CACHED_MAX) -> None:
        self._catalogue = catalogue
        self._cached_max = cached_max
        self._cached: OrderedDict[_Key, Recent] = OrderedDict()
        self._unapplied: OrderedDict[_Key, tuple[int, Recent]] = OrderedDict()
        """Those the catalogue does not know all of yet, with their last commit: never forgotten."""
        self._waiting: dict[_Key, dict[int, list[Callable[[Stored], None]]]] = defaultdict(dict)

    def known(self, topic: Topic, producer: str, number: int) -> Stored | None:
        """The answer for a number that was stored before; None for a new one."""
        recent = self._load((topic.name, producer))
        highest = max(self._waiting.get((topic.name, producer), {}), default=-1)
        if recent:
            highest = max(highest, recent[-1][0])
        if number > highest:
            return None
        return Stored(dict(recent).get(number), duplicate=True)

    def is_waiting(self, topic: Topic, producer: str, number: int) -> bool:
        return number in self._waiting.get((topic.name, producer), {})

    def wait(
        self, topic: Topic, producer: str, number: int, done: Callable[[Stored], None]
    ) -> None:
        self._waiting[topic.name, producer].setdefault(number, []).append(done)

    def stored(
        self, topic: Topic, producer: str, number: int, end: int, sequence: int
    ) -> list[Callable[[], None]]:
        """The append is durable in this commit; returns the answers to everyone who waits for it."""
        key = (topic.name, producer)
        recent = [*self._load(key), (number, end)][-RECENT_MAX:]
        self._cached.pop(key, None)
        if sequence:
            self._unapplied[key] = sequence, recent
            self._unapplied.move_to_end(key)
        else:
            self._cache(key, recent)  # a `memory` topic's: the catalogue will never know
        waiting = self._waiting[key].pop(number)
        if not self._waiting[key]:
            del self._waiting[key]
        return [
            partial(done, Stored(end, duplicate=index > 0)) for index, done in enumerate(waiting)
        ]

    def applied(self, sequence: int) -> None:
        """The catalogue holds everything up to this commit."""
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
        if len(self._cached) > self._cached_max:
            self._cached.popitem(last=False)
