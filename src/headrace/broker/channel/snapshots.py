"""Storage of channel snapshots: the interface, and snapshots as notes of the store, beside the logs."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from headrace.broker.channel import notes as notes
from headrace.broker.channel.notes import StoredSnapshot, read_snapshot
from headrace.log.store import Store

OLDER_MAX = 20
"""Snapshots that are read in one step: each may have a megabyte."""


class Older(NamedTuple):
    channels: list[str]
    after: str | None
    """Name after which the next step starts; None at the end."""


class Snapshots(Protocol):
    are_notes: bool
    """True if snapshots are stored with a change of the store, and not by `save`."""

    def load(
        self,
        channel: str,
        done: Callable[[StoredSnapshot | None], None],
        failed: Callable[[str], None],
    ) -> None:
        """Load a snapshot. May call back at once, and with a snapshot that is still being stored."""

    def save(
        self,
        channel: str,
        snapshot: StoredSnapshot,
        done: Callable[[], None],
        failed: Callable[[str], None],
    ) -> None:
        """Store a snapshot unless there is one of a later offset; `done` is called when it is durable."""

    def remove(self, channel: str, done: Callable[[], None], failed: Callable[[str], None]) -> None:
        """Delete a snapshot; `done` is called when that is durable. Notes are deleted by a change instead."""

    def older(
        self,
        before_ms: int,
        after: str,
        done: Callable[[Older], None],
        failed: Callable[[str], None],
    ) -> None:
        """Find some channels whose snapshots were stored before `before_ms`, in the order of their names."""


class NotedSnapshots:
    are_notes = True

    def __init__(self, store: Store) -> None:
        self._store = store

    def load(
        self,
        channel: str,
        done: Callable[[StoredSnapshot | None], None],
        failed: Callable[[str], None],
    ) -> None:
        done(read_snapshot(self._store, channel))

    def save(
        self,
        channel: str,
        snapshot: StoredSnapshot,
        done: Callable[[], None],
        failed: Callable[[str], None],
    ) -> None:
        raise NotImplementedError

    def remove(self, channel: str, done: Callable[[], None], failed: Callable[[str], None]) -> None:
        raise NotImplementedError

    def older(
        self,
        before_ms: int,
        after: str,
        done: Callable[[Older], None],
        failed: Callable[[str], None],
    ) -> None:
        first = notes.begin(notes.SNAPSHOT, "")
        begin = notes.past(notes.SNAPSHOT, after) if after else first
        found = self._store.notes(first, begin, OLDER_MAX)
        names = [notes.channel_of(note.key)[0] for note in found]
        snapshots = [notes.snapshot_of(note) for note in found]
        old = [name for name, one in zip(names, snapshots, strict=True) if one.ms < before_ms]
        done(Older(old, names[-1] if len(names) == OLDER_MAX else None))
