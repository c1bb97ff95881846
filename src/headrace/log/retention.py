"""Retention: finds segments that are too old or exceed the size limit, and makes the store trim them.

Readers in `wait_for` delay the trim: a reader that needs records holds the topic at its position. Each
possible trim point says whether it is *overdue*; then it no longer waits for readers.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, suppress
from functools import partial
from itertools import chain
from math import inf
from operator import attrgetter
from typing import NamedTuple

from headrace.config.settings import Config
from headrace.errors import StoreFailedError
from headrace.log.catalogue.catalogue import INTEGER_MAX, Catalogue
from headrace.log.catalogue.rows import SegmentRow, TopicRow
from headrace.log.embedded import EmbeddedStore
from headrace.log.layout import Layout
from headrace.log.store import Hold, Runner, Topic, waited_for
from headrace.model import Position, Span
from headrace.printing import quoted

logger = logging.getLogger(__name__)

CHECK_SHARE = 0.01
"""Longest time between two checks, as a share of the shortest retention window."""

_TRIMMED_AT_ONCE = 200
_NAMED_MAX = 10
"""Largest number of topics named in one log line."""


class TrimPoint(NamedTuple):
    """A possible new start of a topic."""

    position: Position
    overdue: bool
    """True if the records before the position are deleted even if a reader still needs them."""
    bytes: int = 0
    """Size of the segment that ends here."""


def trimming(
    places: Iterable[TrimPoint], holds: Collection[Hold], start: Position
) -> tuple[Position, list[tuple[str, int]]]:
    """Return the furthest place that no reader holds back or that is overdue; else `start`, the old start.

    Also return the readers that still needed deleted records, and how many records each misses. Offsets never
    go backwards, so a hold from an earlier life of the topic holds all of the present one.
    """
    needed = min((hold.position.offset for hold in holds), default=INTEGER_MAX)
    free = (one.position for one in places if one.overdue or one.position.offset <= needed)
    best = max([start, *free], key=attrgetter("offset"))
    missed = [
        (reader, Span.between(max(at, start, key=attrgetter("ordinal")), best).records)
        for reader, at in holds
        if at.offset < best.offset > start.offset
    ]
    return best, missed


class Expired(NamedTuple):
    """A topic with records that are too old or too many, and its possible new starts."""

    name: str
    epoch: int
    places: list[TrimPoint]


class RetentionSweep:
    def __init__(
        self,
        config: Config,
        layout: Layout,
        store: EmbeddedStore,
        runner: Runner,
        count: Callable[[str, int], None] = lambda name, amount: None,
    ) -> None:
        """`count` is called with the name of a counter and what to add."""
        self._layout = layout
        self._store = store
        self._runner = runner
        self._count = count
        self.reload(config)
        self._checked_s: float | None = None
        self._running = False
        self._trimming: set[str] = set()
        """Topics whose trim is not committed yet: commits may be held back for a long time."""

    def reload(self, config: Config) -> None:
        self._config = config
        # Checks are rare, but frequent enough that records hardly outlive a short retention window.
        shortest_s = _shortest_age_s(config) or inf
        self._interval_s = min(config.retention.check_s, shortest_s * CHECK_SHARE)

    def tick(self, now_ms: int, elapsed_s: float) -> None:
        """Look for expired records when the next check is due.

        `now_ms` comes from the clock that gives records their times, `elapsed_s` from one that cannot be set.
        """
        if self._checked_s is None:
            self._checked_s = elapsed_s
        elif elapsed_s - self._checked_s >= self._interval_s and not self._running:
            self._checked_s = elapsed_s
            self._running = True
            work = partial(find_expired, self._config, self._layout, now_ms)
            self._runner.background(work, self._found)

    def _found(self, result: list[Expired] | BaseException) -> None:
        self._running = False
        if isinstance(result, BaseException):
            logger.error("retention: the catalogue could not be read: %s", result)
        else:
            self._trim_some(result)

    def _trim_some(self, expired: list[Expired]) -> None:
        """Trim a few topics per step, so that the loop is never blocked by ten thousand of them."""
        trimmed: list[str] = []
        for one in expired[:_TRIMMED_AT_ONCE]:
            topic = self._store.topic(one.name)
            # Meanwhile the topic may have been destroyed, or created anew.
            is_same = topic.exists and topic.epoch == one.epoch
            if is_same and one.name not in self._trimming and self._trim(topic, one.places):
                trimmed.append(one.name)
        if trimmed:
            logger.info("retention: deleting old records of %s", _listed(trimmed))
        if len(expired) > _TRIMMED_AT_ONCE:
            self._runner.soon(lambda: self._trim_some(expired[_TRIMMED_AT_ONCE:]))

    def _trim(self, topic: Topic, places: list[TrimPoint]) -> bool:
        readers = self._config.rule(topic.name).retention_wait_for
        start, missed = trimming(places, waited_for(self._store, topic, readers), topic.start)
        if start.offset <= topic.start_offset:
            return False
        name = quoted(topic.name)
        logger.debug("topic %s: deleting records before offset %d", name, start.offset)
        for reader, records in missed:
            logger.warning(
                "topic %s: reader %s will miss %d records: retention has waited for it as long as "
                "retention.wait_s and retention.wait_bytes allow",
                name,
                quoted(reader),
                records,
            )
        with suppress(StoreFailedError):  # the store stops, and its failure is reported already
            self._trimming.add(topic.name)
            self._store.trim(topic, start, partial(self._trimming.discard, topic.name))
            before, after = topic.start_offset, start.offset
            deleted = [one.bytes for one in places if before < one.position.offset <= after]
            self._count("retention_segments_deleted_total", len(deleted))
            self._count("retention_bytes_deleted_total", sum(deleted))
        return True


def _listed(names: list[str]) -> str:
    shown = ", ".join(map(quoted, names[:_NAMED_MAX]))
    more = f" and {len(names) - _NAMED_MAX:,} more" if len(names) > _NAMED_MAX else ""
    return f"{len(names):,} {'topic' if len(names) == 1 else 'topics'}: {shown}{more}"


def find_expired(config: Config, layout: Layout, now_ms: int) -> list[Expired]:
    """Return the topics with expired records. Runs in a thread: reads the catalogue and changes nothing."""
    found: dict[tuple[str, int], list[TrimPoint]] = defaultdict(list)
    with closing(Catalogue.open_for_reading(layout.root)) as catalogue:
        for row, segment, overdue in chain(
            _too_old(config, catalogue, now_ms), _too_much(config, catalogue)
        ):
            end = Position(row.epoch, segment.end, segment.end_ordinal)
            size = segment.end - segment.base
            found[row.name.decode(), row.epoch].append(TrimPoint(end, overdue, size))
    return [Expired(*topic, places) for topic, places in found.items()]


def _shortest_age_s(config: Config) -> float:
    """Return the shortest configured retention window; 0 if everything is kept for ever."""
    ages = [config.retention.age_s, *(rule.retention_age_s or 0.0 for rule in config.topics)]
    return min((age for age in ages if age > 0), default=0.0)


def _too_old(
    config: Config, catalogue: Catalogue, now_ms: int
) -> Iterator[tuple[TopicRow, SegmentRow, bool]]:
    """Yield segments whose records are too old; True for those that wait for readers no longer."""
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
            yield row, segment, segment.last_ms < now_ms - age_ms - wait_ms


def _too_much(config: Config, catalogue: Catalogue) -> Iterator[tuple[TopicRow, SegmentRow, bool]]:
    prefixes = [rule.prefix for rule in config.topics if rule.retention_bytes]
    if config.retention.bytes:
        prefixes = [""]
    for prefix in prefixes:
        for row in catalogue.topics(prefix.encode()):
            limit = config.rule(row.name.decode()).retention_bytes
            if not limit or row.end_offset - row.start_offset <= limit:
                continue
            # Offsets may skip ranges without records, so only the segments tell how much is stored.
            later = 0
            for segment in reversed(catalogue.segments(row.id)):
                if later >= limit and segment.end > row.start_offset:
                    yield row, segment, later >= limit + config.retention.wait_bytes
                later += segment.end - segment.base
