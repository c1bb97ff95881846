"""Reports about channels for operators: names, members, what holds the log, and planned destruction."""

from collections.abc import Iterator
from heapq import merge
from itertools import groupby, islice
from typing import Any

from headrace.broker.channel import notes
from headrace.broker.channel.channel import Channel
from headrace.broker.channel.member import Member, Standing
from headrace.broker.channel.membership import Leases
from headrace.broker.channel.notes import StoredSnapshot
from headrace.broker.channel.trimming import LogTrimming
from headrace.log.store import Store, waited_for
from headrace.model import CHANNEL_PREFIX, Position, Span

_PAGE = 200


class ChannelReport:
    def __init__(self, store: Store, leases: Leases, trimming: LogTrimming) -> None:
        self._store = store
        self._leases = leases
        self._trimming = trimming

    def names(self, prefix: str, after: str, limit: int) -> list[str]:
        """Return the channels that have a log, a member or a snapshot, in the order of their names."""
        found = merge(
            _topics(self._store, prefix, after),
            _with_members(self._store, prefix, after),
            _noted(self._store, notes.SNAPSHOT, prefix, after),
            key=str.encode,
        )
        return list(islice((name for name, _ in groupby(found)), limit))

    def describe(
        self, channel: Channel, snapshot: StoredSnapshot | None, now_ms: int
    ) -> dict[str, Any]:
        topic, schedule = channel.topic, channel.schedule
        first = self._trimming.needed(channel, now_ms)
        store = self._store
        kept = store.kept(topic)
        return {
            "name": channel.name,
            "exists": topic.exists,
            "epoch": topic.epoch,
            "start": topic.start_offset,
            "end": topic.end_offset,
            "messages": kept.records,
            "bytes": kept.bytes,
            "reducer": channel.rule.reducer.name,
            "members": [
                self._member(channel, member, first.offset, now_ms)
                for _, member in sorted(channel.members.items())
                if member.is_member
            ],
            "readers": [
                {
                    "reader": hold.reader,
                    "cursor": hold.position.offset,
                    "holds": hold.position.offset <= first.offset < topic.end_offset,
                }
                for hold in waited_for(store, topic, channel.rule.wait_for)
            ],
            "needed_from": first.offset,
            "snapshot": (
                {
                    "offset": snapshot.offset,
                    "epoch": snapshot.epoch,
                    "ms": snapshot.ms,
                    "bytes": len(snapshot.content.data),
                    "messages_behind": store.kept(
                        topic, Position(snapshot.epoch, snapshot.offset, snapshot.ordinal)
                    ).records,
                }
                if snapshot is not None
                else None
            ),
            "destroyed_ms": schedule.due_ms if schedule is not None and schedule.due_ms else None,
            "kept": schedule is not None and not schedule.due_ms,
            "trouble": channel.trouble,
            "lease_ms": channel.rule.lease_ms,
            "grace_ms": channel.rule.grace_ms,
            "now_ms": now_ms,
        }

    def _member(
        self, channel: Channel, member: Member, needed_from: int, now_ms: int
    ) -> dict[str, Any]:
        topic = channel.topic
        offset, ordinal = member.confirmed
        holds = self._leases.holds(channel, member, now_ms)
        at = Position(topic.epoch, offset, ordinal)
        behind = self._store.kept(topic, at)
        return {
            "processor": member.name,
            "present": member.is_present,
            "receive": member.receive.value if member.subscriber is not None else None,
            "new": member.standing is Standing.NEW,
            "cursor": offset,
            "number": member.number,
            "lag_messages": behind.records,
            "lag_bytes": behind.bytes,
            "missed_messages": Span.between(at, topic.start).records,
            "leased_until_ms": self._leases.end_ms(channel, member),
            "holds": holds and member.offset <= needed_from < topic.end_offset,
        }


def _topics(store: Store, prefix: str, after: str) -> Iterator[str]:
    last = CHANNEL_PREFIX + after
    while found := store.topics(CHANNEL_PREFIX + prefix, last, _PAGE):
        for topic in found:
            yield topic.name.removeprefix(CHANNEL_PREFIX)
        last = found[-1].name


def _with_members(store: Store, prefix: str, after: str) -> Iterator[str]:
    """Yield the channels with members. A channel that only remembers senders that have left has none."""
    for name in _noted(store, notes.MEMBER, prefix, after):
        if any(member.is_member for member in notes.read_members(store, name)):
            yield name


def _noted(store: Store, kind: bytes, prefix: str, after: str) -> Iterator[str]:
    """Yield each channel with notes of a kind once, and skip its other notes of the kind."""
    start = notes.begin(kind, prefix)
    last = notes.past(kind, after) if after else start
    while found := store.notes(start, last, 1):
        name, _ = notes.channel_of(found[0].key)
        yield name
        last = notes.past(kind, name)
