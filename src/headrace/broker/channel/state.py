"""The present state of a channel: its snapshot with later messages folded in. Stores nothing on disk.

A computed state is kept while its channel is in memory, so that the next one only needs the messages since
then.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from headrace.broker.channel.core import ChannelState
from headrace.broker.channel.notes import StoredSnapshot
from headrace.log.records import split_records
from headrace.log.store import ColdError
from headrace.model import RECORD_HEADER_BYTES, Position
from headrace.payload.channel import BadMessageError, Content, StoredMessage, decode_message
from headrace.payload.reducers import CannotFoldError
from headrace.printing import quoted

logger = logging.getLogger(__name__)

STATES_BYTES_MAX = 64 << 20
"""Bytes of all states that are kept in memory."""

_READ_BYTES = 1 << 18
_FOLDED_HERE_BYTES = 1 << 14
"""Size of state and messages up to which they are folded without a thread. Most channels have less."""

NOTHING = Content(b"null", True)
"""Content of a state without any message. Code compares it by identity."""


def load_state(
    channel: ChannelState, done: Callable[[StoredSnapshot], None], failed: Callable[[str], None]
) -> None:
    """Compute the state after all messages; with the reducer `uploaded`, load the last upload.

    This is a job of the channel: nothing may be trimmed before it is done.
    """
    assert channel.is_busy
    channel.load_snapshot(partial(_loaded, channel, done, failed), failed)


def _loaded(
    channel: ChannelState,
    done: Callable[[StoredSnapshot], None],
    failed: Callable[[str], None],
    snapshot: StoredSnapshot | None,
) -> None:
    topic, recent = channel.topic, channel.hub.recent_states
    if channel.rule.reducer.is_uploaded:
        is_whole = snapshot is not None and snapshot.offset >= topic.start_offset
        done(snapshot if snapshot is not None and is_whole else _empty(channel, topic.start))
        return
    known = recent.get(channel)
    if known is not None and (snapshot is None or known.offset > snapshot.offset):
        snapshot = known
    end = topic.end
    if snapshot is not None and snapshot.offset >= end.offset:
        done(snapshot)
        return

    def folded(state: StoredSnapshot) -> None:
        recent.put(channel, state)
        done(state)

    Fold(channel, snapshot, end, folded, failed).go_on()


def _empty(channel: ChannelState, at: Position) -> StoredSnapshot:
    return StoredSnapshot(at.epoch, at.offset, at.ordinal, channel.hub.clock_ms(), NOTHING)


class RecentStates:
    """Recently computed states of channels in memory. New states replace the oldest ones."""

    def __init__(self, bytes_max: int = STATES_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._states: OrderedDict[ChannelState, StoredSnapshot] = OrderedDict()

    def get(self, channel: ChannelState) -> StoredSnapshot | None:
        return self._states.get(channel)

    def put(self, channel: ChannelState, state: StoredSnapshot) -> None:
        self.drop(channel)
        self._states[channel] = state
        self._bytes += len(state.content.data)
        while self._bytes > self._bytes_max:
            self.drop(next(iter(self._states)))

    def drop(self, channel: ChannelState) -> None:
        known = self._states.pop(channel, None)
        if known is not None:
            self._bytes -= len(known.content.data)


class Fold:
    """Folds the messages after a snapshot, up to a position. The log must not be trimmed meanwhile."""

    __slots__ = ("_channel", "_done", "_failed", "_offset", "_reader", "_state", "_until")

    def __init__(
        self,
        channel: ChannelState,
        snapshot: StoredSnapshot | None,
        until: Position,
        done: Callable[[StoredSnapshot], None],
        failed: Callable[[str], None],
    ) -> None:
        self._channel = channel
        self._failed = failed
        self._state = snapshot.content if snapshot is not None else None
        self._until = until
        self._done = done
        start = channel.topic.start_offset
        self._offset = max(snapshot.offset, start) if snapshot is not None else start
        self._reader = channel.hub.store.reader(channel.topic)

    def go_on(self) -> None:
        hub = self._channel.hub
        reducer = self._channel.rule.reducer
        try:
            messages, size = self._read()
        except ColdError as cold:
            hub.warm(cold, self.go_on)
            return
        work = partial(reducer.fold, self._state, messages)
        # A large state is decoded and encoded again, even for a few messages.
        if size + len(self._state.data if self._state else b"") <= _FOLDED_HERE_BYTES:
            self._folded(_attempt(work))
        else:
            hub.runner.background(partial(_attempt, work), self._folded)

    def _folded(self, state: Content | BaseException | None) -> None:
        channel = self._channel
        if isinstance(state, BaseException):
            self._failed(f"the reducer {quoted(channel.rule.reducer.name)} fails: {state}")
            return
        self._state = state
        if self._offset < self._until.offset:
            channel.hub.runner.soon(self.go_on)
            return
        at = self._until
        content = state if state is not None else NOTHING
        self._done(StoredSnapshot(at.epoch, at.offset, at.ordinal, channel.hub.clock_ms(), content))

    def _read(self) -> tuple[list[StoredMessage], int]:
        """Return the next messages and their size in bytes.

        Damaged records, which the store reports, and records that are not messages are skipped.
        """
        messages: list[StoredMessage] = []
        chunk = self._reader.read(self._offset, _READ_BYTES)
        size = 0
        for run in chunk.runs:
            at = run.offset
            for record in split_records(run.data, run.record_count):
                at += len(record)
                if at > self._until.offset:
                    break
                size += len(record)
                try:
                    messages.append(decode_message(record[RECORD_HEADER_BYTES:]))
                except BadMessageError as error:
                    logger.error(
                        "channel %s: a record is passed over: %s", quoted(self._channel.name), error
                    )
        self._offset = (
            max(chunk.next_offset, self._offset + 1) if chunk.runs else self._until.offset
        )
        return messages, size


def _attempt(work: Callable[[], Content | None]) -> Content | BaseException | None:
    try:
        return work()
    except CannotFoldError as error:
        return error
