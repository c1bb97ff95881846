"""Notes of the store about channels: members, schedules, ends and snapshots. Elsewhere: the logs.

Keys sort by channel, then by processor. The first two bytes of a key say which kind of note it is.
"""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from headrace.broker.channel.member import Member, Standing
from headrace.log.store import Note, Store
from headrace.payload.channel import Content

MEMBER = b"cm"
SCHEDULE = b"cs"
END = b"ce"
SNAPSHOT = b"cx"
KINDS = frozenset((MEMBER, SCHEDULE, END, SNAPSHOT))

KEPT = b"kept"
"""Schedule of a channel without subscribers that an operator wants to keep."""

_READ_AT_ONCE = 500
_STOP = b"\0\x01"

_encode = msgspec.msgpack.Encoder().encode


class StoredSnapshot(NamedTuple):
    """State that all messages up to a position have been folded into."""

    epoch: int
    offset: int
    ordinal: int
    ms: int
    content: Content


_decode_member = msgspec.msgpack.Decoder(tuple[int, ...]).decode
_decode_snapshot = msgspec.msgpack.Decoder(tuple[int, int, int, int, bool, bytes]).decode
_decode_end = msgspec.msgpack.Decoder(tuple[int, int]).decode


def key(kind: bytes, channel: str) -> bytes:
    # A name may contain a zero byte. The replacement keeps keys in the sort order of the names.
    return kind + channel.encode().replace(b"\0", b"\0\xff") + _STOP


def begin(kind: bytes, prefix: str) -> bytes:
    """Return the bytes that begin the keys of all channels whose names begin with `prefix`."""
    return key(kind, prefix).removesuffix(_STOP)


def past(kind: bytes, channel: str) -> bytes:
    """Return a key after all keys of a channel, and before the keys of the next channel."""
    return key(kind, channel) + b"\xff"


def channel_of(note_key: bytes) -> tuple[str, str]:
    """Return the channel of a key, and the processor if the key is a member's (otherwise empty)."""
    name, _, rest = note_key[2:].partition(_STOP)
    return name.replace(b"\0\xff", b"\0").decode(), rest.decode()


def member_note(channel: str, member: Member, due_ms: int) -> Note:
    value = [*member.confirmed, member.number, member.seen_ms, int(member.standing)]
    if member.lease_ms:
        value.append(member.lease_ms)
    return Note(key(MEMBER, channel) + member.name.encode(), _encode(value), due_ms)


def no_member(channel: str, processor: str) -> Note:
    return Note(key(MEMBER, channel) + processor.encode(), None)


def read_members(store: Store, channel: str) -> Iterator[Member]:
    prefix = after = key(MEMBER, channel)
    while found := store.notes(prefix, after, _READ_AT_ONCE):
        for note in found:
            assert note.value is not None
            offset, ordinal, number, seen_ms, standing, *lease = _decode_member(note.value)
            _, processor = channel_of(note.key)
            known, lease_ms = Standing(standing), lease[0] if lease else 0
            yield Member(processor, offset, ordinal, number, seen_ms, known, lease_ms)
        after = found[-1].key


def snapshot_note(channel: str, snapshot: StoredSnapshot) -> Note:
    *place, content = snapshot
    return Note(key(SNAPSHOT, channel), _encode((*place, content.is_json, content.data)))


def no_snapshot(channel: str) -> Note:
    return Note(key(SNAPSHOT, channel), None)


def read_snapshot(store: Store, channel: str) -> StoredSnapshot | None:
    note = store.note(key(SNAPSHOT, channel))
    return None if note is None or note.value is None else snapshot_of(note)


def snapshot_of(note: Note) -> StoredSnapshot:
    assert note.value is not None
    epoch, offset, ordinal, ms, is_json, data = _decode_snapshot(note.value)
    return StoredSnapshot(epoch, offset, ordinal, ms, Content(data, is_json))


def end_note(channel: str, offset: int, ordinal: int, due_ms: int) -> Note:
    return Note(key(END, channel), _encode((offset, ordinal)), due_ms)


def read_end(store: Store, channel: str) -> int:
    """Return the end offset of the last life of the log that was destroyed; 0 if none is noted."""
    note = store.note(key(END, channel))
    return 0 if note is None or note.value is None else _decode_end(note.value)[0]


def schedule_note(channel: str, due_ms: int) -> Note:
    return Note(key(SCHEDULE, channel), b"", due_ms)


def kept_note(channel: str) -> Note:
    return Note(key(SCHEDULE, channel), KEPT)


def no_schedule(channel: str) -> Note:
    return Note(key(SCHEDULE, channel), None)


def read_schedule(store: Store, channel: str) -> Note | None:
    note = store.note(key(SCHEDULE, channel))
    return None if note is None or note.value is None else note
