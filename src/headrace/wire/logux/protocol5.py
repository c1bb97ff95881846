"""Ids and metas of Logux protocol 5: times on the wire are relative to a time that both sides know.

`base` is the time when the server sent `connected`, in milliseconds. An id is `"ms node counter"`. On the
wire it is `[shift, node, counter]`; the sender's own node may be left out: `[shift, counter]`, or `shift` if
the counter is 0.
"""

from typing import Any, NamedTuple

import msgspec

from headrace.payload.logux import (
    Created,
    Envelope,
    Number,
    created_of,
    id_of,
    is_of_id,
    plain,
    stamp_of,
)
from headrace.wire.logux.messages import HOST_BYTES_MAX, BadLoguxMessageError

_json = msgspec.json.Encoder().encode

_NUMBER_MAX = 1 << 52

_BLANK_WIDTH = 15
_BLANK = b"%15d"
"""Blank for a number. Spaces pad the number on the left, which JSON allows."""
_BLANK_MAX = 10**13
"""Limit of times in a template: minus a base below the same limit, a time fits into a blank with its sign."""

RESERVED = "logux/"
"""Prefix of types that have a meaning to clients. Apart from subscriptions, only the server sends them."""

OWN_META = frozenset({"id", "time", "subprotocol"})
"""Keys that a client may set in the meta of its actions."""


class Meta(NamedTuple):
    """The meta that a client sends with an action."""

    created: Created
    """The action's id as the other protocols write it: milliseconds, node, counter."""
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
    """Parse the meta of an action. Raises `BadLoguxMessageError`."""
    if not isinstance(meta, dict):
        raise BadLoguxMessageError("sync: the meta of an action is an object")
    time: Any = meta.get("time")
    if not _is_number(time):
        raise BadLoguxMessageError("sync: the `time` of a meta is a number")
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
    raise BadLoguxMessageError(
        "sync: the `id` of a meta is SHIFT, [SHIFT, COUNTER] or [SHIFT, NODE, COUNTER]"
    )


def _is_node(value: Any) -> bool:
    if not isinstance(value, str) or " " in value:
        return False
    return 0 < len(value.encode("utf-8", "surrogatepass")) <= HOST_BYTES_MAX


def _is_number(value: Any) -> bool:
    """True for a number that JavaScript writes without an exponent."""
    return (type(value) is int or type(value) is float) and abs(value) < _NUMBER_MAX


def client_of(node: str) -> str:
    """Return the `user:client` of a node id, which is `user:client:tab`."""
    return ":".join(node.split(":")[:2])


class Shown:
    """An event as protocol 5 sends it, without its times, which are different for each peer."""

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
        """Return the `sync` with this event for a peer with this base, in JSON."""
        head, middle, tail = self._parts
        ms, time = self.ms - base, self.time - base
        if type(ms) is int and type(time) is int:
            return b"%b%d%b%d%b" % (head, ms, middle, time, tail)
        return b"".join((head, _json(ms), middle, _json(time), tail))

    @property
    def template(self) -> bytes | None:
        """The `sync` for any peer, with blanks for both times: its length is the same for all peers.

        None if a time is not an integer, or does not fit into a blank.
        """
        if not all(type(one) is int and abs(one) < _BLANK_MAX for one in (self.ms, self.time)):
            return None
        head, middle, tail = (part.replace(b"%", b"%%") for part in self._parts)
        return b"".join((head, _BLANK, middle, _BLANK, tail))


def blank_length(template: bytes) -> int:
    """Return the length of a template when its blanks are filled."""
    return len(template) - template.count(b"%%") + 2 * (_BLANK_WIDTH - len(_BLANK))


def _number(text: str) -> Number:
    return float(text) if "." in text else int(text)
