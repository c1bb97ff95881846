"""Where the snapshots of channels are kept: as notes of the store, beside the logs."""

from collections.abc import Callable
from typing import Protocol

from headrace.broker.channel_notes import Snapshot, read_snapshot
from headrace.log.store import Store


class Snapshots(Protocol):
    are_notes: bool
    """Whether they are stored with a change of the store, and not by `save`."""

    def load(
        self,
        channel: str,
        done: Callable[[Snapshot | None], None],
        failed: Callable[[str], None],
    ) -> None:
        """May call back at once, and with one that is being stored."""

    def save(
        self,
        channel: str,
        snapshot: Snapshot,
        done: Callable[[], None],
        failed: Callable[[str], None],
    ) -> None:
        """Unless there is one of a later offset; `done` when it is durable."""


class NotedSnapshots:
    are_notes = True

    def __init__(self, store: Store) -> None:
        self._store = store

    def load(
        self,
        channel: str,
        done: Callable[[Snapshot | None], None],
        failed: Callable[[str], None],
    ) -> None:
        done(read_snapshot(self._store, channel))

    def save(
        self,
        channel: str,
        snapshot: Snapshot,
        done: Callable[[], None],
        failed: Callable[[str], None],
    ) -> None:
        raise NotImplementedError
