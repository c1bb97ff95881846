"""Idempotence: the numbers that each producer has appended, so that a repeated append is stored once.

Numbers of applied commits are in the catalogue, those of commits that are not applied yet are here.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial

import msgspec

from headrace.log.catalogue.catalogue import Catalogue
from headrace.log.commit.journal import RECENT_MAX, Recent
from headrace.log.store import StoredAppend, Topic

CACHED_MAX = 100_000
"""Number of producers kept in memory to save reads of the catalogue."""

_Key = tuple[str, str]


class Producers:
    def __init__(self, catalogue: Catalogue, cached_max: int = CACHED_MAX) -> None:
        self._catalogue = catalogue
        self._cached_max = cached_max
        self._cached: OrderedDict[_Key, Recent] = OrderedDict()
        self._unapplied: OrderedDict[_Key, tuple[int, Recent]] = OrderedDict()
        """Producers with numbers that the catalogue lacks so far, and their last commit. Never evicted."""
        self._waiting: dict[_Key, dict[int, list[Callable[[StoredAppend], None]]]] = defaultdict(
            dict
        )

    def known(self, topic: Topic, producer: str, number: int) -> StoredAppend | None:
        """Return the answer for a number that was stored or is waiting; None for a new number."""
        recent = self._load((topic.name, producer))
        highest = max(self._waiting.get((topic.name, producer), {}), default=-1)
        if recent:
            highest = max(highest, recent[-1][0])
        if number > highest:
            return None
        return StoredAppend(dict(recent).get(number), duplicate=True)

    def is_waiting(self, topic: Topic, producer: str, number: int) -> bool:
        return number in self._waiting.get((topic.name, producer), {})

    def wait(
        self, topic: Topic, producer: str, number: int, done: Callable[[StoredAppend], None]
    ) -> None:
        self._waiting[topic.name, producer].setdefault(number, []).append(done)

    def stored(
        self, topic: Topic, producer: str, number: int, end: int, sequence: int
    ) -> list[Callable[[], None]]:
        """Record that the append is durable in commit `sequence`; return the calls that answer waiters."""
        key = (topic.name, producer)
        recent = [*self._load(key), (number, end)][-RECENT_MAX:]
        self._cached.pop(key, None)
        if sequence:
            self._unapplied[key] = sequence, recent
            self._unapplied.move_to_end(key)
        else:
            self._cache(key, recent)  # the catalogue never holds producers of `memory` topics
        waiting = self._waiting[key].pop(number)
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
        if len(self._cached) > self._cached_max:
            self._cached.popitem(last=False)
