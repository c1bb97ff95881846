"""Ids and metas of Logux protocol 5: times on the wire are relative to one that both sides know.

`base` is when the server sent `connected`, in milliseconds. An id is `"ms node counter"`; on the wire it is
`shift`, `[shift, counter]` where the sender's own node made it, or `[shift, node, counter]`.
"""

from typing import Any, NamedTuple

import msgspec

from headrace.logux_envelope import (
    Created,
    Envelope,
    Number,
    created_of,
    id_of,
    is_of_id,
    plain,
    stamp_of,
)
from headrace.wire.logux import HOST_BYTES_MAX, BadMessageError

_json = msgspec.json.Encoder().encode

_NUMBER_MAX = 1 << 52

_BLANK_WIDTH = 15
_BLANK = b"%15d"
"""Where a number is filled in, with spaces before it: JSON does not mind."""
_BLANK_MAX = 10**13
"""Less this or a base, which is less too, a number fits into a blank with its sign."""

RESERVED = "logux/"
"""What types begin with that mean something to clients: only the server says them."""

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
    parts = value if isinstance(value, list) else [value, 0]
    if len(parts) in (2, 3):
        shift, *node, counter = parts
        if _is_number(shift) and _is_number(counter) and all(map(_is_node, node)):
            ms = plain(base + shift)
            if is_of_id(ms) and is_of_id(counter):
                return [ms, *(node or [peer]), plain(counter)]
    raise BadMessageError(
        "sync: the `id` of a meta is SHIFT, [SHIFT, COUNTER] or [SHIFT, NODE, COUNTER]"
    )


def _is_node(value: Any) -> bool:
    if not isinstance(value, str) or " " in value:
        return False
    return 0 < len(value.encode("utf-8", "surrogatepass")) <= HOST_BYTES_MAX


def _is_number(value: Any) -> bool:
    """One that JavaScript writes without an exponent."""
    return (type(value) is int or type(value) is float) and abs(value) < _NUMBER_MAX


def client_of(node: str) -> str:
    """The client in a node id, `user:client:tab`."""
    return ":".join(node.split(":")[:2])


class Shown:
    """An event as protocol 5 shows it, but for the times: these are written anew for each peer."""

    __slots__ = ("_parts", "client", "ms", "node", "time")

    def __init__(self, added: int, envelope: Envelope, channel: str) -> None:
        ms, self.node, counter = id_of(envelope).split(" ")
        self.client = client_of(self.node)
        self.ms = _number(ms)
        self.time = envelope.time if envelope.time is not None else self._first(envelope)
        tail = b',"channels":%b' % _json([channel])
        subprotocol = (envelope.meta or {}).get("subprotocol")
        if subprotocol is not None:
            tail += b',"subprotocol":%b' % _json(subprotocol)
        self._parts = (
            b'["sync",%d,%b,{"id":[' % (added, bytes(envelope.event)),
            b',%b,%b],"time":' % (_json(self.node), counter.encode()),
            tail + b"}]",
        )

    def _first(self, envelope: Envelope) -> Number:
        stamp = stamp_of(created_of(envelope))
        return stamp.ms if stamp is not None else self.ms

    def sync(self, base: int) -> bytes:
        """The message that brings it to a peer with this base, in JSON."""
        head, middle, tail = self._parts
        ms, time = self.ms - base, self.time - base
        if type(ms) is int and type(time) is int:
            return b"%b%d%b%d%b" % (head, ms, middle, time, tail)
        return b"".join((head, _json(ms), middle, _json(time), tail))

    @property
    def template(self) -> bytes | None:
        """The same for any peer, with blanks for both times: it is as long for each of them.

        None where a time is no whole number, or does not fit into a blank.
        """
        if not all(type(one) is int and abs(one) < _BLANK_MAX for one in (self.ms, self.time)):
            return None
        head, middle, tail = (part.replace(b"%", b"%%") for part in self._parts)
        return b"".join((head, _BLANK, middle, _BLANK, tail))


def blank_length(template: bytes) -> int:
    """How long it is when its blanks are filled."""
    return len(template) - template.count(b"%%") + 2 * (_BLANK_WIDTH - len(_BLANK))


def _number(text: str) -> Number:
    return float(text) if "." in text else int(text)
