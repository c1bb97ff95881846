"""Which rows are the first of their key within a window, and how the work is divided. Pure.

A window begins with the row that stays; one that comes when it is over stays too, and begins the next. Rows
count in the order of their offsets, so the answer is the same in however many steps they come.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.pipeline.dedupe_keys import Words
from headrace.pipeline.staging import Batches

_BUCKETS_MIN, BUCKETS_MAX = 4, 1024
_BUCKET_ROWS = 1 << 20
"""About so many are in memory at a time, with the keys that are known."""

Numbers = npt.NDArray[np.int64]


class Keys(NamedTuple):
    """Each with the row that stayed last."""

    high: Words
    low: Words
    topic: Words
    ms: Numbers

    def at(self, places: Any) -> "Keys":
        return Keys(self.high[places], self.low[places], self.topic[places], self.ms[places])


class Rows(NamedTuple):
    """Those of some keys, in any order."""

    high: Words
    low: Words
    topic: Words
    ms: Numbers
    offset: Numbers


class Decided(NamedTuple):
    dropped: Numbers
    """Places of rows that are there once more."""
    keys: Keys
    """Those that the next rows are held against."""


def decide(known: Keys, rows: Rows, window_ms: int | None) -> Decided:
    """Without a window keys are known for ever."""
    count = len(known.ms)
    both = Keys(
        np.concatenate((known.high, rows.high)),
        np.concatenate((known.low, rows.low)),
        np.concatenate((known.topic, rows.topic)),
        np.concatenate((known.ms, rows.ms)),
    )
    # What is known of a key comes before all its rows.
    offsets = np.concatenate((np.full(count, -1, np.int64), rows.offset))
    order = np.lexsort((offsets, both.low, both.high))
    found = both.at(order)
    begins = np.ones(len(order) + 1, bool)
    begins[1:-1] = (found.high[1:] != found.high[:-1]) | (found.low[1:] != found.low[:-1])
    stays = begins[:-1].copy()
    if window_ms is not None:
        _begin_windows(found.ms, begins, stays, window_ms)
    dropped = order[~stays] - count
    # Of each key the last that stayed.
    kept = np.flatnonzero(stays)
    group = np.cumsum(begins[:-1])[kept]
    last = kept[np.append(group[1:] != group[:-1], True)] if len(kept) else kept
    keys = found.at(last)
    if window_ms is not None:
        keys = _open_ones(found, keys, window_ms)
    return Decided(dropped, keys)


def _begin_windows(
    ms: Numbers, begins: npt.NDArray[np.bool_], stays: npt.NDArray[np.bool_], window_ms: int
) -> None:
    """Have those stay that come when the window of their key is over."""
    # Most keys have one row: only the others are gone through.
    several = np.flatnonzero(~(begins[:-1] & begins[1:]))
    over = 0
    for place, at, is_first in zip(
        several.tolist(), ms[several].tolist(), begins[several].tolist(), strict=True
    ):
        if is_first or at >= over:
            over = at + window_ms
            stays[place] = True


def _open_ones(found: Keys, keys: Keys, window_ms: int) -> Keys:
    """Keys whose window goes on: times never decrease within a topic."""
    topics, which = np.unique(found.topic, return_inverse=True)
    latest = np.zeros(len(topics), np.int64)
    np.maximum.at(latest, which, found.ms)
    is_open = keys.ms + window_ms > latest[np.searchsorted(topics, keys.topic)]
    return keys.at(is_open)


def bucket_count(rows: int, before: int) -> int:
    """For so many rows and keys: a power of two, and never less than before.

    So a bucket lies in one of those before, and is made of whole ones of those that are staged.
    """
    wanted = max(rows // _BUCKET_ROWS, before, _BUCKETS_MIN)
    return min(1 << (wanted - 1).bit_length(), BUCKETS_MAX)


def joined_buckets(staged: Batches, count: int) -> Batches:
    """What was staged in all buckets that there may be, in so many."""
    found: Batches = {}
    for bucket, batches in staged.items():
        found.setdefault(bucket % count, []).extend(batches)
    return found
