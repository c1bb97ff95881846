"""Retention: finds what is too old or too much, a segment at a time, and has the store forget it.

Readers that are waited for hold it back, as far as `holds.py` says.
"""

import logging
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from headrace.config import Config
from headrace.errors import StoreFailedError
from headrace.log.catalogue import Catalogue
from headrace.log.catalogue_rows import SegmentRow, TopicRow
from headrace.log.embedded import EmbeddedStore
from headrace.log.holds import Place, trimming, waited_for
from headrace.log.layout import Layout
from headrace.log.runner import Runner
from headrace.log.store import Topic
from headrace.model import Position
from headrace.printing import quoted

logger = logging.getLogger(__name__)


CHECK_SHARE = 0.01
"""How much of the shortest window may pass between two checks."""

_FORGOTTEN_AT_ONCE = 200
_NAMED_MAX = 10
"""Topics that one log line names."""


class Expired(NamedTuple):
    """A topic whose records are past their time, or too many, and the places where it could begin anew."""

    name: str
    epoch: int
    places: list[Place]


class Retention:
    def __init__(
        self, config: Config, layout: Layout, store: EmbeddedStore, runner: Runner
    ) -> None:
        self._layout = layout
        self._store = store
        self._runner = runner
        self.reload(config)
        self._checked_s: float | None = None
        self._running = False
        self._trimming: set[str] = set()
        """Topics that are forgetting already: commits may be held back."""

    def reload(self, config: Config) -> None:
        """Go on with other settings."""
        self._config = config
        # Seldom, but never so seldom that a short window is overstayed by it.
        shortest_s = _shortest_age_s(config)
        self._interval_s = config.retention.check_s
        if shortest_s:
            self._interval_s = min(self._interval_s, shortest_s * CHECK_SHARE)

    def tick(self, now_ms: int, elapsed_s: float) -> None:
        """Look for expired records when it is time to.

        `now_ms` is of the clock that records get their times from, `elapsed_s` of one that cannot be set.
        """
        if self._checked_s is None:
            self._checked_s = elapsed_s
            return
        if elapsed_s - self._checked_s < self._interval_s or self._running:
            return
        self._checked_s = elapsed_s
        self._running = True
        self._runner.background(
            lambda: find_expired(self._config, self._layout, now_ms), self._found
        )

    def _found(self, result: "list[Expired] | BaseException") -> None:
        self._running = False
        if isinstance(result, BaseException):
            logger.error("retention: the catalogue could not be read: %s", result)
            return
        if result:
            self._forget(result)

    def _forget(self, expired: list[Expired]) -> None:
        """A few topics a step, so that nobody waits for ten thousand of them."""
        forgotten: list[str] = []
        for one in expired[:_FORGOTTEN_AT_ONCE]:
            topic = self._store.topic(one.name)
            # Meanwhile the topic may have been destroyed, or made anew.
            is_same = topic.exists and topic.epoch == one.epoch
            if is_same and one.name not in self._trimming and self._trim(topic, one.places):
                forgotten.append(one.name)
        if forgotten:
            logger.info("retention: old records are deleted of %s", _listed(forgotten))
        if len(expired) > _FORGOTTEN_AT_ONCE:
            self._runner.soon(lambda: self._forget(expired[_FORGOTTEN_AT_ONCE:]))

    def _trim(self, topic: Topic, places: list[Place]) -> bool:
        readers = self._config.rule(topic.name).retention_wait_for
        start, missed = trimming(places, waited_for(self._store, topic, readers), topic.start)
        if start.offset <= topic.start_offset:
            return False
        name = quoted(topic.name)
        logger.debug("topic %s: forgetting records before offset %d", name, start.offset)
        for reader, records in missed:
            logger.warning(
                "topic %s: reader %s will miss %d records: it was waited for as long as "
                "retention.wait_s and retention.wait_bytes allow",
                *(name, quoted(reader), records),
            )
        with suppress(StoreFailedError):  # it stops, and everyone has heard of it
            self._trimming.add(topic.name)
            self._store.trim(topic, start, partial(self._trimming.discard, topic.name))
        return True


def _listed(names: list[str]) -> str:
    """The topics by name, as many as a line can hold."""
    shown = ", ".join(map(quoted, names[:_NAMED_MAX]))
    more = f" and {len(names) - _NAMED_MAX:,} more" if len(names) > _NAMED_MAX else ""
    return f"{len(names):,} {'topic' if len(names) == 1 else 'topics'}: {shown}{more}"


def find_expired(config: Config, layout: Layout, now_ms: int) -> list[Expired]:
    """For a thread: reads the catalogue, changes nothing."""
    catalogue = Catalogue.open_for_reading(layout.root)
    try:
        found: dict[tuple[str, int], list[Place]] = {}
        for row, place in (*_too_old(config, catalogue, now_ms), *_too_much(config, catalogue)):
            found.setdefault((row.name.decode(), row.epoch), []).append(place)
        return [Expired(*topic, places) for topic, places in found.items()]
    finally:
        catalogue.close()


def _shortest_age_s(config: Config) -> float:
    """The shortest window there is; 0 when everything is kept for ever."""
    ages = [config.retention.age_s, *(rule.retention_age_s or 0.0 for rule in config.topics)]
    return min((age for age in ages if age > 0), default=0.0)


def _too_old(config: Config, catalogue: Catalogue, now_ms: int) -> Iterator[tuple[TopicRow, Place]]:
    shortest_s = _shortest_age_s(config)
    if not shortest_s:
        return
    wait_ms = int(config.retention.wait_s * 1000)
    topics: dict[int, TopicRow | None] = {}
    for segment in catalogue.segments_older_than(now_ms - int(shortest_s * 1000)):
        if segment.topic_id not in topics:
            topics[segment.topic_id] = catalogue.topic_by_id(segment.topic_id)
        row = topics[segment.topic_id]
        if row is None or segment.end <= row.start_offset:
            continue
        age_ms = int(config.rule(row.name.decode()).retention_age_s * 1000)
        if age_ms and segment.last_ms < now_ms - age_ms:
            yield row, _behind(row, segment, segment.last_ms < now_ms - age_ms - wait_ms)


def _too_much(config: Config, catalogue: Catalogue) -> Iterator[tuple[TopicRow, Place]]:
    prefixes = [rule.prefix for rule in config.topics if rule.retention_bytes]
    if config.retention.bytes:
        prefixes = [""]
    for prefix in prefixes:
        for row in catalogue.topics(prefix.encode()):
            limit = config.rule(row.name.decode()).retention_bytes
            if not limit or row.end_offset - row.start_offset <= limit:
                continue
            # Offsets may skip where nothing is stored: only segments say how much there is.
            later = 0
            for segment in reversed(catalogue.segments(row.id)):
                if later >= limit and segment.end > row.start_offset:
                    yield row, _behind(row, segment, later >= limit + config.retention.wait_bytes)
                later += segment.end - segment.base


def _behind(row: TopicRow, segment: SegmentRow, overdue: bool) -> Place:
    return Place(Position(row.epoch, segment.end, segment.end_ordinal), overdue)
