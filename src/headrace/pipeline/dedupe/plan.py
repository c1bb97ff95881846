"""Decides which rows are the first of their key within a window, and divides the work. Pure.

A window begins with a row that is kept. The first row after the window is kept too, and begins the next
window. Rows count in the order of their offsets, so the result does not depend on the number of runs.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.pipeline.dedupe.keys import Words
from headrace.pipeline.staging import Batches

_BUCKETS_MIN, BUCKETS_MAX = 4, 1024
_BUCKET_ROWS = 1 << 20
"""Approximate number of rows in memory at a time, including the known keys."""

Numbers = npt.NDArray[np.int64]


class Keys(NamedTuple):
    """Known keys, each with the time of its last kept row."""

    high: Words
    low: Words
    topic: Words
    ms: Numbers

    def at(self, places: Any) -> "Keys":
        return Keys(self.high[places], self.low[places], self.topic[places], self.ms[places])


class KeyRows(NamedTuple):
    """Rows of some keys, in any order."""

    high: Words
    low: Words
    topic: Words
    ms: Numbers
    offset: Numbers


class DedupeDecision(NamedTuple):
    dropped: Numbers
    """Places of rows that are duplicates."""
    keys: Keys
    """Keys that the next rows are compared with."""


def decide(known: Keys, rows: KeyRows, window_ms: int | None) -> DedupeDecision:
    """Decide which rows are dropped. Without a window, keys are known for ever."""
    count = len(known.ms)
    both = Keys(
        np.concatenate((known.high, rows.high)),
        np.concatenate((known.low, rows.low)),
        np.concatenate((known.topic, rows.topic)),
        np.concatenate((known.ms, rows.ms)),
    )
    # The known entry of a key comes before all its rows.
    offsets = np.concatenate((np.full(count, -1, np.int64), rows.offset))
    order = np.lexsort((offsets, both.low, both.high))
    found = both.at(order)
    begins = np.ones(len(order) + 1, bool)
    begins[1:-1] = (found.high[1:] != found.high[:-1]) | (found.low[1:] != found.low[:-1])
    stays = begins[:-1].copy()
    if window_ms is not None:
        _begin_windows(found.ms, begins, stays, window_ms)
    dropped = order[~stays] - count
    # Keep the last kept row of each key.
    kept = np.flatnonzero(stays)
    group = np.cumsum(begins[:-1])[kept]
    last = kept[np.append(group[1:] != group[:-1], True)] if len(kept) else kept
    keys = found.at(last)
    if window_ms is not None:
        keys = _open_ones(found, keys, window_ms)
    return DedupeDecision(dropped, keys)


def _begin_windows(
    ms: Numbers, begins: npt.NDArray[np.bool_], stays: npt.NDArray[np.bool_], window_ms: int
) -> None:
    """Keep also the rows that come after the window of their key has ended."""
    # Most keys have only one row. The loop is only for the others.
    several = np.flatnonzero(~(begins[:-1] & begins[1:]))
    over = 0
    for place, at, is_first in zip(
        several.tolist(), ms[several].tolist(), begins[several].tolist(), strict=True
    ):
        if is_first or at >= over:
            over = at + window_ms
            stays[place] = True


def _open_ones(found: Keys, keys: Keys, window_ms: int) -> Keys:
    """Return the keys whose window has not ended yet. Times never decrease within a topic."""
    topics, which = np.unique(found.topic, return_inverse=True)
    latest = np.zeros(len(topics), np.int64)
    np.maximum.at(latest, which, found.ms)
    is_open = keys.ms + window_ms > latest[np.searchsorted(topics, keys.topic)]
    return keys.at(is_open)


def bucket_count(rows: int, before: int) -> int:
    """Return the number of buckets for these rows and keys: a power of two, never smaller than before.

    So each bucket is a part of one earlier bucket, and consists of whole staged buckets.
    """
    wanted = max(rows // _BUCKET_ROWS, before, _BUCKETS_MIN)
    return min(1 << (wanted - 1).bit_length(), BUCKETS_MAX)


def joined_buckets(staged: Batches, count: int) -> Batches:
    """Join batches that were staged in the maximum number of buckets into `count` buckets."""
    found: Batches = {}
    for bucket, batches in staged.items():
        found.setdefault(bucket % count, []).extend(batches)
    return found
