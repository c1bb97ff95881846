"""The server's side of one Logux connection of protocol 5, without I/O: messages in, commands out.

A `sync` is answered with `synced`, and each of its actions then with one of our own, `logux/processed` or
`logux/undo`: when what is to be stored is durable, and the channels that it asks for are live. A client that
has got `synced` does not ask again, so one that is cut off within a history must not have it.

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
from headrace.printing import quoted
from headrace.session.logux5_ledger import Ledger
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

_MARK = re.compile(r"[^ ]+ ([^ ]+):at:(\d{1,18}):(\d{1,18}) [^ ]+", re.ASCII)


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
    mark: Mark | None = None


class _Sync:
    """One that is not answered yet."""

    def __init__(self) -> None:
        self.answers: list[_Answer | None] = []
        """One for each action; None where it is not known yet, or given on its own."""
        self.stored: list[int] = []
        """Which of them are of actions that are to be stored."""
        self.open = 1
        """How much is to be done before it is answered: the storing, and each channel."""


class Subscribe(NamedTuple):
    """Send the history of a channel and what comes; call `subscribed` when it is live, or `undo`."""

    channel: str
    filter: Any
    since: "Since | None"
    """Where the peer was; None for everything."""
    action: Action
    unit: Unit
    place: int


class Unsubscribe(NamedTuple):
    """Send no more of a channel, once it is said for each filter; it is answered with its `sync`."""

    channel: str
    filter: Any


class Since(NamedTuple):
    """Behind which action a peer wants to go on."""

    id: str
    mark: Mark | None
    """If that is no action that is stored: where a channel was when we said so."""


class Logux5ServerSession(LoguxSession):
    __slots__ = (
        *("_base", "_now_ms", "_number", "_subprotocol", "_subprotocol_min", "_subscribing"),
        *("_syncs", "ledger", "node", "synced"),
    )

    def __init__(self, host: str, subprotocol_min: Number) -> None:
        super().__init__(host)
        self._subprotocol_min = subprotocol_min
        self._subprotocol: Number = 0
        self._base = 0
        self._now_ms = 0
        self._number = 0
        """Of our own actions."""
        self._syncs: dict[int, _Sync] = {}
        """By their units."""
        self._subscribing: dict[tuple[int, int], Subscribe] = {}
        """Those that a `sync` is not answered for."""
        self.ledger = Ledger()
        self.synced: Number = 0
        """The highest number that the peer has seen on earlier connections."""
        self.node = ""
        """The peer's node id, `user:client:tab`."""

    @property
    def base(self) -> int:
        """What times are relative to."""
        return self._base

    def turn_away(self) -> Close:
        self._send(["error", "wrong-credentials"])
        return self.refuse("wrong credentials")

    def subscribed(self, command: Subscribe, mark: Mark) -> None:
        """A channel is live, from here on."""
        self._settle(command, _Answer(command.action, "", mark))

    def undo(self, command: Subscribe, reason: str) -> None:
        """A channel is refused."""
        self._settle(command, _Answer(command.action, reason))

    def let_go(self, command: Subscribe) -> None:
        """It takes so long that the peer must not be kept waiting for its other answers."""
        if self._subscribing.pop((command.unit.lowest, command.place), None) is not None:
            self.stored(command.unit)

    def denied(self, unit: Unit, may: Sequence[bool]) -> None:
        """Of what is to be stored with a unit, the application refuses some."""
        sync = self._syncs[unit.lowest]
        for place, is_allowed in zip(sync.stored, may, strict=True):
            answer = sync.answers[place]
            if not is_allowed and answer is not None:
                sync.answers[place] = answer._replace(undone=DENIED)

    def stored(self, unit: Unit) -> None:
        sync = self._syncs[unit.lowest]
        sync.open -= 1
        if not sync.open:
            super().stored(unit)

    def discard(self, command: object) -> None:
        super().discard(command)
        if isinstance(command, Add):
            del self._syncs[command.unit.lowest]
        elif isinstance(command, Subscribe):
            self._subscribing.pop((command.unit.lowest, command.place), None)

    def refuse(self, reason: str, code: int = websocket.POLICY_VIOLATION) -> Close:
        # Nobody waits for histories any more.
        for command in list(self._subscribing.values()):
            self.let_go(command)
        return super().refuse(reason, code)

    def _settle(self, command: Subscribe, answer: _Answer) -> None:
        if self._subscribing.pop((command.unit.lowest, command.place), None) is None:
            self._answer(answer)  # it was let go
            return
        self._syncs[command.unit.lowest].answers[command.place] = answer
        self.stored(command.unit)

    def _answer(self, answer: _Answer) -> None:
        event, meta = answer.action
        if answer.undone:
            undo = {"type": "logux/undo", "id": meta.id, "reason": answer.undone, "action": event}
            self._say(undo, None)
        else:
            finished = event["channel"] if answer.mark is not None else ""
            self._say({"type": "logux/processed", "id": meta.id}, answer.mark, finished)

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
        self.node, self.synced = node, message.synced
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
            commands.append(
                self._refuse_with(["unknown-message", name], f"message {quoted(str(name))}")
            )
        # What else there is says how far its log reaches, which nobody asks.

    def _synced_came(self, count: int) -> None:
        self.ledger.answered(count)

    def _sync(self, message: logux.Sync, commands: list[NamedTuple]) -> None:
        actions = [
            Action(event, logux5.parse_meta(meta, self._base, self.node))
            for event, meta in message.events
        ]
        unit = self._unit(message.added)
        sync = self._syncs[unit.lowest] = _Sync()
        events: list[Incoming] = []
        others: list[NamedTuple] = []
        for action in actions:
            found = self._look_at(action, unit, len(sync.answers))
            if isinstance(found, str):
                sync.answers.append(_Answer(action, found))
                continue
            sync.answers.append(_Answer(action))
            if isinstance(found, Incoming):
                events.append(found)
                sync.stored.append(len(sync.answers) - 1)
                continue
            others.append(found)
            if isinstance(found, Subscribe):
                sync.answers[-1] = None
                sync.open += 1
                self._subscribing[unit.lowest, found.place] = found
        commands.append(Add(events, unit))
        commands += others

    def _look_at(
        self, action: Action, unit: Unit, place: int
    ) -> Incoming | Subscribe | Unsubscribe | str:
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
                return Unsubscribe(channel, event.get("filter"))
            return Subscribe(
                channel, event.get("filter"), _since(event, self._host), action, unit, place
            )
        if kind.startswith(logux5.RESERVED):
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
            for answer in self._syncs.pop(unit.lowest).answers:
                if answer is not None:
                    self._answer(answer)

    def _say(self, action: Event, mark: Mark | None, finished: str = "") -> None:
        """An action of our own, behind what can be acknowledged by now."""
        if self._units is not None and (ready := self._units.take()):
            self._acknowledge(ready)
        self._number += 1
        self.ledger.said(finished)
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


def _since(event: Event, host: str) -> Since | None:
    since = event.get("since")
    last = since.get("id") if isinstance(since, dict) else None
    if not isinstance(last, str):
        return None
    found = _MARK.fullmatch(last)
    is_ours = found is not None and found[1] == host
    return Since(
        last, Mark(int(found[2]), int(found[3])) if found is not None and is_ours else None
    )


def is_protocol_5(message: bytes | str) -> bool:
    """Whether a connection that begins with this is of this protocol, or of one that is refused in its words.

    From protocol 1 on the version is one number and an error names numbers; clients of 0.x send two.
    """
    binary = isinstance(message, bytes)
    data = message if isinstance(message, bytes) else message.encode()
    try:
        first = logux.decode(data, binary=binary)
    except logux.BadMessageError:
        return False
    if isinstance(first, logux.Connect):
        major = first.version[0]
        return major == MAJOR or (major >= 1 and not isinstance(_sent_version(data, binary), list))
    return isinstance(first, logux.Headers)  # others have none


def _sent_version(connect: bytes, binary: bool) -> object:
    return logux.unpack(connect, binary=binary)[1]
