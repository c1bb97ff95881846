"""Ids and metas of Logux protocol 5: times on the wire are relative to one that both sides know.

`base` is when the server sent `connected`, in milliseconds. An id is `"ms node counter"`; on the wire it is
`shift`, `[shift, counter]` where the sender's own node made it, or `[shift, node, counter]`.
"""

from typing import Any, NamedTuple

import msgspec

from headrace.logux_envelope import Created, Envelope, Number, created_of, id_of, plain, stamp_of
from headrace.wire.logux import BadMessageError

_json = msgspec.json.Encoder().encode

_NUMBER_MAX = 1 << 53

OWN_META = frozenset({"id", "time", "subprotocol"})
"""What a client may say of its actions."""


class Meta(NamedTuple):
    """What a client says of an action."""

    created: Created
    """Its id as the other protocols write it: milliseconds, node, counter."""
    time: Number
    others: dict[str, Any]

    @property
    def id(self) -> str:
        return " ".join(map(str, self.created))

    @property
    def node(self) -> str:
        node: str = self.created[1]
        return node


def parse_meta(meta: Any, base: int, peer: str) -> Meta:
    """Raises `BadMessageError`."""
    if not isinstance(meta, dict):
        raise BadMessageError("sync: the meta of an action is an object")
    time: Any = meta.get("time")
    if not _is_number(time):
        raise BadMessageError("sync: the `time` of a meta is a number")
    others = {key: value for key, value in meta.items() if key not in ("id", "time")}
    return Meta(_parse_id(meta.get("id"), base, peer), base + time, others)


def _parse_id(value: Any, base: int, peer: str) -> Created:
    if _is_number(value):
        return [plain(base + value), peer, 0]
    if isinstance(value, list) and len(value) in (2, 3):
        shift, *node, counter = value
        if _is_number(shift) and _is_number(counter) and all(map(_is_node, node)):
            return [plain(base + shift), *(node or [peer]), plain(counter)]
    raise BadMessageError(
        "sync: the `id` of a meta is SHIFT, [SHIFT, COUNTER] or [SHIFT, NODE, COUNTER]"
    )


def _is_node(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and " " not in value


def _is_number(value: Any) -> bool:
    """One that JavaScript writes without an exponent."""
    return (type(value) is int or type(value) is float) and abs(value) < _NUMBER_MAX


def client_of(node: str) -> str:
    """The client in a node id, `user:client:tab`."""
    return ":".join(node.split(":")[:2])


class Shown:
    """An event as protocol 5 shows it: what is the same for all who see it."""

    __slots__ = ("_channels", "_counter", "_ms", "_node", "_time", "client", "node")

    def __init__(self, envelope: Envelope, channel: str) -> None:
        ms, self.node, counter = id_of(envelope).split(" ")
        self.client = client_of(self.node)
        self._ms = _number(ms)
        self._counter = counter.encode()
        self._node = _json(self.node)
        self._time = envelope.time if envelope.time is not None else self._first(envelope)
        channels = _json([channel])
        subprotocol = (envelope.meta or {}).get("subprotocol")
        if subprotocol is not None:
            channels += b',"subprotocol":' + _json(subprotocol)
        self._channels = channels

    def _first(self, envelope: Envelope) -> Number:
        stamp = stamp_of(created_of(envelope))
        return stamp.ms if stamp is not None else self._ms

    def meta(self, base: int) -> bytes:
        """JSON, for a peer with this base."""
        ms, time = _text(self._ms - base), _text(self._time - base)
        return b'{"id":[%b,%b,%b],"time":%b,"channels":%b}' % (
            *(ms, self._node, self._counter, time, self._channels),
        )


def _text(number: Number) -> bytes:
    return b"%d" % number if type(number) is int else _json(number)


def _number(text: str) -> Number:
    return float(text) if "." in text else int(text)
