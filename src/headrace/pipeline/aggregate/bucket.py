"""Folds the pieces of one bucket's topics onto their states, and writes the bucket's new file of states."""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from headrace.lake.states import (
    SCHEMA,
    Buckets,
    StatesFile,
    StatesWriter,
    name_of,
    read_states,
)
from headrace.lake.storage.storage import Storage
from headrace.payload.channel import Content
from headrace.pipeline.aggregate.fold import FoldedState, fold, load_reducer
from headrace.pipeline.aggregate.pieces import piece_of, topic_of
from headrace.pipeline.job import Points
from headrace.pipeline.tasks import Letter


class BucketsWork(NamedTuple):
    into: Storage
    number: int
    """Number of the run, which is in the names of its files."""
    buckets: Buckets
    old: Mapping[int, Sequence[str]]
    """Files with the states before, by bucket; a run over lake and log begins without any."""
    reducer: str
    directory: str
    """Directory with the application's own reducer functions."""
    points: Points


class FoldedBucket(NamedTuple):
    """The new file of a bucket, and numbers of the states in it that have changed."""

    bucket: int
    file: StatesFile
    topics: int
    """Number of changed states, which are the first rows of the file."""
    messages: int
    incomplete: int
    failed: int
    first_failure: str


def fold_bucket(work: BucketsWork, place: int, letters: Iterator[Letter]) -> Iterator[Letter]:
    """Fold the pieces in `letters`; yield a `FoldedBucket` as a letter if a state has changed."""
    bucket = work.buckets.changed[place]
    wanted = load_reducer(work.reducer, work.directory)
    old = [work.into.file(path) for path in work.old.get(bucket, ())]
    before: dict[str, FoldedState] = {}
    changed: list[str] = []
    messages = incomplete = failed = 0
    first = ""
    with StatesWriter(work.into, name_of(work.number, bucket, work.buckets.total)) as writer:
        for topic, some in groupby(letters, topic_of):
            if not topic:  # the announced topics come first
                names = {letter.data.decode() for letter in some}
                rows = (row for file in old for row in read_states(file, SCHEMA.names, names))
                before = {row["topic"]: state_of(row) for row in rows}
                continue
            state = fold(topic, map(piece_of, some), wanted, before.get(topic))
            if state == before.get(topic):
                continue
            writer.add(row_of(state, wanted.name))
            changed.append(topic)
            messages += state.messages
            incomplete += not state.complete
            if state.error is not None:
                failed += 1
                first = first or f"topic {topic!r}: {state.error}"
        if not changed:
            return
        for file in old:
            writer.copy(file, without=changed)
        work.points.here("folding")
        folded = FoldedBucket(
            bucket=bucket,
            file=writer.finish(),
            topics=len(changed),
            messages=messages,
            incomplete=incomplete,
            failed=failed,
            first_failure=first,
        )
    yield Letter(0, b"", pickle.dumps(folded))


def row_of(state: FoldedState, reducer: str) -> dict[str, Any]:
    """Return the state as a row of a table of states."""
    row = state._asdict()
    content = row.pop("content")
    return row | {"reducer": reducer, "state": content.data, "is_json": content.is_json}


def state_of(row: Mapping[str, Any]) -> FoldedState:
    """Return the state in a row of a table of states."""
    content = Content(row["state"], row["is_json"])
    others = {name: row[name] for name in FoldedState._fields if name != "content"}
    return FoldedState(content=content, **others)
