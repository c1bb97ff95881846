"""The server's side of one Logux connection of protocol 5, without I/O: messages in, commands out.

Every action gets two answers: `synced` when it came, then `logux/processed` or `logux/undo` as an action of
our own. `logux/subscribe` is processed when the channel's history is sent.

A client asks to go on with a channel behind the last action it has of it, or behind our `processed` where
there was none yet: so the id of that says where in the log the channel was then.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace.logux_envelope import (
    BadEnvelopeError,
    Envelope,
    Event,
    Number,
    encode_envelope,
    raw_event,
)
from headrace.session.logux_session import Add, Authenticate, Incoming, LoguxSession, message_name
from headrace.session.server import Close
from headrace.session.units import Unit
from headrace.wire import logux, logux5, websocket
from headrace.wire.logux5 import Meta

MAJOR = 5

CHANNEL_BYTES_MAX = 1024

DENIED = "denied"
_WRONG_CHANNEL = "wrongChannel"
_TOO_LARGE = "tooLarge"

_OURS = "logux/"
_MARK = re.compile(r"\S+ \S+:at:(\d{1,18}):(\d{1,18}) \S+", re.ASCII)


class Mark(NamedTuple):
    """A place in the log."""

    epoch: int
    ordinal: int


class Action(NamedTuple):
    """An action that is not answered yet."""

    event: Event
    meta: Meta


class _Answer(NamedTuple):
    action: Action
    undone: str = ""
    """Why it is refused."""


class Subscribe(NamedTuple):
    """Send the history of a channel and what comes; call `processed` or `undo` with the action."""

    channel: str
    since: str | Mark | None
    """The id of the last action that the peer has, or where it was; None for everything."""
    action: Action


class Unsubscribe(NamedTuple):
    channel: str
    action: Action


class Logux5ServerSession(LoguxSession):
    __slots__ = (
        *("_answers", "_base", "_now_ms", "_number", "_subprotocol", "_subprotocol_min"),
        "node",
    )

    def __init__(self, host: str, subprotocol_min: Number) -> None:
        super().__init__(host)
        self._subprotocol_min = subprotocol_min
        self._subprotocol: Number = 0
        self._base = 0
        self._now_ms = 0
        self._number = 0
        """Of our own actions."""
        self._answers: dict[int, list[_Answer]] = {}
        """What is answered with each unit."""
        self.node = ""
        """The peer's node id, `user:client:tab`."""

    @property
    def base(self) -> int:
        """What times are relative to."""
        return self._base

    def turn_away(self) -> Close:
        self._send(["error", "wrong-credentials"])
        return self.refuse("wrong credentials")

    def processed(self, action: Action, mark: Mark | None = None) -> None:
        """It is done; a subscription goes on at the mark."""
        self._say({"type": "logux/processed", "id": action.meta.id}, mark)

    def undo(self, action: Action, reason: str) -> None:
        """It is refused, and was not stored."""
        undone = {"type": "logux/undo", "id": action.meta.id, "reason": reason}
        self._say({**undone, "action": action.event}, None)

    def denied(self, unit: Unit, events: Sequence[Incoming]) -> None:
        """Of what is to be stored with a unit, the application refuses these."""
        refused = [one.created for one in events]
        self._answers[unit.lowest] = [
            _Answer(one.action, DENIED if one.action.meta.created in refused else one.undone)
            for one in self._answers[unit.lowest]
        ]

    def discard(self, command: object) -> None:
        super().discard(command)
        if isinstance(command, Add):
            del self._answers[command.unit.lowest]

    # Messages

    def _begin(self, message: logux.Connect) -> Authenticate | Close:
        major, _ = message.version
        if major != MAJOR:
            facts = {"supported": MAJOR, "used": major}
            return self._refuse_with(["wrong-protocol", facts], f"protocol {major}")
        options = message.options if message.options is not None else {}
        node = message.host
        if not isinstance(options, dict):
            return self._bad("connect: the fifth element is an object")
        if not isinstance(node, str) or " " in node:
            return self._bad("connect: the node id is a string without spaces")
        self.node = node
        subprotocol = options.get("subprotocol", 0)
        if type(subprotocol) is not int and type(subprotocol) is not float:
            return self._bad("connect: the subprotocol is a number")
        if subprotocol < self._subprotocol_min:
            facts = {"supported": self._subprotocol_min, "used": subprotocol}
            return self._refuse_with(["wrong-subprotocol", facts], f"subprotocol {subprotocol}")
        self._subprotocol = subprotocol
        if self._host in (node, node.partition(":")[0]):
            return self.turn_away()  # that is our own name
        return Authenticate(node, options.get("token"))

    def _welcome(self, now_ms: int, credentials: Any) -> list[NamedTuple]:
        self._base = self._now_ms = now_ms
        # Without this, clients of addresses that begin with ws:// go away.
        self._send(["headers", {"env": "development"}])
        message: list[Any] = ["connected", MAJOR, self._host, [self._connected_ms, now_ms]]
        if credentials is not None:
            message.append({"token": credentials})
        self._send(message)
        return []

    def _heard(self, message: logux.Message, now_ms: int, commands: list[NamedTuple]) -> None:
        self._now_ms = now_ms
        if isinstance(message, logux.Sync):
            self._sync(message, commands)
        elif isinstance(message, logux.Connected | logux.Unknown):
            name = message_name(message)
            commands.append(self._refuse_with(["unknown-message", name], f"message {name!r}"))
        # What else there is says how far its log reaches, which nobody asks.

    def _synced_came(self) -> None:
        """Nobody asks: clients say themselves how far they are."""

    def _sync(self, message: logux.Sync, commands: list[NamedTuple]) -> None:
        actions = [
            Action(event, logux5.parse_meta(meta, self._base, self.node))
            for event, meta in message.events
        ]
        unit = self._unit(message.added)
        answers = self._answers[unit.lowest] = []
        events: list[Incoming] = []
        others: list[NamedTuple] = []
        for action in actions:
            found = self._look_at(action)
            if isinstance(found, Incoming):
                events.append(found)
                answers.append(_Answer(action))
            elif isinstance(found, str):
                answers.append(_Answer(action, found))
            else:
                others.append(found)
        commands.append(Add(events, unit))
        commands += others

    def _look_at(self, action: Action) -> Incoming | Subscribe | Unsubscribe | str:
        """What is to be done with it, or why it is refused."""
        event, meta = action
        kind = event["type"]
        if logux5.client_of(meta.node) != logux5.client_of(self.node):
            return DENIED
        if meta.others.keys() - logux5.OWN_META:
            return DENIED
        if kind in ("logux/subscribe", "logux/unsubscribe"):
            channel = event.get("channel")
            if not isinstance(channel, str) or len(channel.encode()) > CHANNEL_BYTES_MAX:
                return _WRONG_CHANNEL
            if kind == "logux/unsubscribe":
                return Unsubscribe(channel, action)
            return Subscribe(channel, _since(event), action)
        if kind.startswith(_OURS):
            return DENIED
        others = {"subprotocol": self._subprotocol, **meta.others}
        envelope = Envelope(
            raw_event(event), id=meta.id, time=meta.time, meta=others, origin=self.node
        )
        try:
            return Incoming(event, meta.created, encode_envelope(envelope))
        except BadEnvelopeError:
            return _TOO_LARGE

    def _acknowledge(self, ready: Sequence[Unit]) -> None:
        for unit in sorted(ready, key=lambda one: one.lowest):
            self._send(["synced", self._numbers.pop(unit.lowest)])
            for action, undone in self._answers.pop(unit.lowest):
                if undone:
                    self.undo(action, undone)
                else:
                    self.processed(action)

    def _say(self, action: Event, mark: Mark | None) -> None:
        """An action of our own, behind what can be acknowledged by now."""
        if self._units is not None and (ready := self._units.take()):
            self._acknowledge(ready)
        self._number += 1
        shift = self._now_ms - self._base
        made: list[Any] = [shift, self._number]
        if mark is not None:
            made.insert(1, f"{self._host}:at:{mark.epoch}:{mark.ordinal}")
        self._send(["sync", self.sent, action, {"id": made, "time": shift}])

    # Refusals

    def _bad(self, reason: str) -> Close:
        return self._refuse_with(["wrong-format", reason], reason, websocket.PROTOCOL_ERROR)

    def _refuse_with(
        self, error: list[Any], reason: str, code: int = websocket.POLICY_VIOLATION
    ) -> Close:
        self._send(["error", *error])
        return self.refuse(reason, code)


def _since(event: Event) -> str | Mark | None:
    since = event.get("since")
    last = since.get("id") if isinstance(since, dict) else None
    if not isinstance(last, str):
        return None
    found = _MARK.fullmatch(last)
    return Mark(int(found[1]), int(found[2])) if found is not None else last


def is_protocol_5(message: bytes | str) -> bool:
    """Whether a connection that begins with this is of this protocol."""
    binary = isinstance(message, bytes)
    try:
        first = logux.decode(
            message if isinstance(message, bytes) else message.encode(), binary=binary
        )
    except logux.BadMessageError:
        return False
    if isinstance(first, logux.Connect):
        return first.version[0] == MAJOR
    return isinstance(first, logux.Headers)  # others have none
