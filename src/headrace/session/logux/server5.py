"""Server side of one Logux connection of protocol 5, without I/O: messages in, commands out.

A `sync` is answered with `synced`, and then each of its actions with an action of our own, `logux/processed`
or `logux/undo`. The answers wait until all events to be stored are durable and the channels that the `sync`
asks for are live. A client with a `synced` does not ask again, so a client that is cut off in the middle of a
history must not have received it.

A client resumes a channel behind the last action that it has of the channel, or behind our `processed` if it
has none. So the id of `processed` tells where in the log the channel was at that time.

A ledger records what a node was sent and has received, by channel. It outlives the connection. When a client
resumes, it names the newest action that it has, by time. This is not always the last action that it has
received, so the ledger remembers how far it has received each channel. A client acknowledges each message of
ours, be it an event or an answer, in order, and `connect` has the highest number it has seen.
"""

import re
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace.payload.logux import (
    BadEnvelopeError,
    Envelope,
    Event,
    Number,
    encode_envelope,
    raw_event,
)
from headrace.printing import quoted
from headrace.session.logux.server import AddEvents, AuthenticatePeer, Incoming, LoguxSession
from headrace.session.server import Close, Unit
from headrace.wire import websocket
from headrace.wire.logux import messages as logux
from headrace.wire.logux.messages import Meta

UNFINISHED_MAX = 1000
"""Limit of remembered channels whose history was begun and not finished."""

PLACES_MAX = 10_000
"""Limit of remembered channels of a client, over all its connections. The history of others is sent again."""

UNANSWERED_MAX = 50_000
"""Limit of unacknowledged messages. Above the limit, nothing more is remembered of the client."""

_FINISHED = -1


class Ledger:
    def __init__(self) -> None:
        self._epoch = 0
        """Epoch of the log; 0 before the first event."""
        self._places: dict[str, int] = {}
        """By channel: the number in the log of the last event that the node has received."""
        self._unfinished: set[str] = set()
        """Channels that the node asked for and whose history was not reported as complete."""
        self._sent: deque[tuple[str, int]] = deque()
        """Messages sent and not acknowledged: channel and number of an event, or an answer of ours."""
        self._is_lost = False

    def connected(self, epoch: int, synced: Number) -> "Ledger":
        """Return the ledger for a new connection of the node, which has seen the number `synced`."""
        made = Ledger()
        if epoch == self._epoch:
            made._epoch = epoch
            for place in range(len(self._sent) - 1, -1, -1):
                if self._sent[place][1] == synced > 0:
                    # Everything that was sent before this message has arrived before it.
                    self.answered(place + 1)
                    break
            made._places = dict(self._places)
            made._unfinished = set(self._unfinished)
        return made

    def place(self, channel: str, *, is_resumed: bool) -> int:
        """Return how far the node has a channel that it asks for; 0 if it wants to start over."""
        if is_resumed or channel in self._unfinished:
            return self._places.get(channel, 0)
        return 0

    def begun(self, channel: str) -> None:
        if len(self._unfinished) < UNFINISHED_MAX:
            self._unfinished.add(channel)

    def forget(self, channel: str) -> None:
        self._places.pop(channel, None)
        self._unfinished.discard(channel)

    def sent(self, channel: str, number: int, epoch: int) -> None:
        """Note an event of a channel that is being written."""
        if self._epoch not in (0, epoch):
            self._lose()
        self._epoch = epoch
        self._note(channel, number)

    def said(self, finished: str = "") -> None:
        """Note an answer of ours that will be written; `finished` is a channel whose history it completes.

        Answers are noted before they are written, and events when they are written, so that no event is
        regarded as acknowledged too early.
        """
        self._note(finished, _FINISHED if finished else 0)

    def _note(self, channel: str, number: int) -> None:
        if len(self._sent) >= UNANSWERED_MAX:
            self._lose()
        if not self._is_lost:
            self._sent.append((channel, number))

    def _lose(self) -> None:
        """Forget what was sent and received: acknowledgements can no longer be matched with messages."""
        self._is_lost = True
        self._sent.clear()
        self._places.clear()

    def answered(self, count: int) -> None:
        """Note that the node has acknowledged the next `count` messages."""
        sent, places = self._sent, self._places
        for _ in range(min(count, len(sent))):
            channel, number = sent.popleft()
            if number == _FINISHED:
                self._unfinished.discard(channel)
            elif number:
                if channel not in places and len(places) >= PLACES_MAX:
                    del places[next(iter(places))]  # its history is sent again, and nothing is lost
                places[channel] = number


MAJOR = 5

CHANNEL_BYTES_MAX = 1024

DENIED = "denied"
_WRONG_CHANNEL = "wrongChannel"
_TOO_LARGE = "tooLarge"

_MARK = re.compile(r"[^ ]+ ([^ ]+):at:(\d{1,18}):(\d{1,18}) [^ ]+", re.ASCII)


class LogMark(NamedTuple):
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
    """Reason for refusing the action; empty if it is not refused."""
    mark: LogMark | None = None


class _Sync:
    """A `sync` that is not answered yet."""

    def __init__(self) -> None:
        self.answers: list[_Answer | None] = []
        """One answer for each action; None if it is not known yet, or is sent separately."""
        self.stored: list[int] = []
        """Indexes in `answers` of the actions that are to be stored."""
        self.open = 1
        """Number of tasks to finish before the answer: storing the events, and each channel."""


class Subscribe(NamedTuple):
    """Send the history of a channel and its new events; call `subscribed` when it is live, or `undo`."""

    channel: str
    filter: Any
    since: "Since | None"
    """Place behind which the peer resumes; None to send everything."""
    action: Action
    unit: Unit
    place: int


class Unsubscribe(NamedTuple):
    """Remove a filter of a channel; without filters, send no more of it. The answer comes with the `sync`."""

    channel: str
    filter: Any


class Since(NamedTuple):
    """The action behind which a peer wants to resume."""

    id: str
    mark: LogMark | None
    """If the action is our own `processed`, which is not stored: the place of the channel at that time."""


class Logux5ServerSession(LoguxSession):
    __slots__ = (
        *("_now_ms", "_number", "_subprotocol", "_subprotocol_min", "_subscribing", "_syncs"),
        *("base", "ledger", "node", "synced"),
    )

    def __init__(self, host: str, subprotocol_min: Number) -> None:
        super().__init__(host)
        self._subprotocol_min = subprotocol_min
        self._subprotocol: Number = 0
        self.base = 0
        """Time to which times on the wire are relative, in milliseconds."""
        self._now_ms = 0
        self._number = 0
        """Counter of our own actions."""
        self._syncs: dict[int, _Sync] = {}
        """Unanswered `sync` messages, by the number of their unit."""
        self._subscribing: dict[tuple[int, int], Subscribe] = {}
        """Subscriptions for which a `sync` waits, by the number of its unit and the index of the action."""
        self.ledger = Ledger()
        self.synced: Number = 0
        """Highest number that the peer has seen on earlier connections."""
        self.node = ""
        """The peer's node id, `user:client:tab`."""

    def turn_away(self) -> Close:
        return self._refuse_with(["wrong-credentials"], "wrong credentials")

    def subscribed(self, command: Subscribe, mark: LogMark) -> None:
        """Answer that a channel is live, from `mark` on."""
        self._settle(command, _Answer(command.action, "", mark))

    def undo(self, command: Subscribe, reason: str) -> None:
        """Answer that a channel is refused."""
        self._settle(command, _Answer(command.action, reason))

    def let_go(self, command: Subscribe) -> None:
        """Stop waiting for a subscription: it takes too long to keep the peer waiting for other answers."""
        if self._subscribing.pop((command.unit.lowest, command.place), None) is not None:
            self.stored(command.unit)

    def denied(self, unit: Unit, may: Sequence[bool]) -> None:
        """Note which events of a unit the application refuses; `may` has a value for each event to store."""
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
        if isinstance(command, AddEvents):
            del self._syncs[command.unit.lowest]
        elif isinstance(command, Subscribe):
            self._subscribing.pop((command.unit.lowest, command.place), None)

    def refuse(self, reason: str, code: int = websocket.POLICY_VIOLATION) -> Close:
        # The peer does not need the histories any more, so no `sync` waits for them.
        for command in list(self._subscribing.values()):
            self.let_go(command)
        return super().refuse(reason, code)

    def _settle(self, command: Subscribe, answer: _Answer) -> None:
        if self._subscribing.pop((command.unit.lowest, command.place), None) is None:
            self._answer(answer)  # `let_go` was called before
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

    def _begin(self, message: logux.Connect) -> AuthenticatePeer | Close:
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
        return AuthenticatePeer(node, options.get("token"))

    def _welcome(self, now_ms: int, credentials: Any) -> list[NamedTuple]:
        self.base = self._now_ms = now_ms
        # Without this message, clients disconnect from addresses that begin with ws://.
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
            name = logux.type_of(message)
            commands.append(self._refuse_with(["unknown-message", name], f"message {quoted(name)}"))
        # `pong` only tells how far the peer's log reaches, which is not needed; nor are `headers`.

    def _synced_came(self, count: int) -> None:
        self.ledger.answered(count)

    def _sync(self, message: logux.Sync, commands: list[NamedTuple]) -> None:
        actions = [
            Action(event, logux.parse_meta(meta, self.base, self.node))
            for event, meta in message.events
        ]
        unit = self._unit(message.added)
        sync = self._syncs[unit.lowest] = _Sync()
        events: list[Incoming] = []
        others: list[NamedTuple] = []
        for place, action in enumerate(actions):
            found = self._look_at(action, unit, place)
            undone = found if isinstance(found, str) else ""
            sync.answers.append(None if isinstance(found, Subscribe) else _Answer(action, undone))
            if isinstance(found, Incoming):
                events.append(found)
                sync.stored.append(place)
            elif not isinstance(found, str):
                others.append(found)
                if isinstance(found, Subscribe):
                    sync.open += 1
                    self._subscribing[unit.lowest, place] = found
        commands.append(AddEvents(events, unit))
        commands += others

    def _look_at(
        self, action: Action, unit: Unit, place: int
    ) -> Incoming | Subscribe | Unsubscribe | str:
        """Return the command for an action, or the reason why the action is refused."""
        event, meta = action
        kind = event["type"]
        if logux.client_of(meta.node) != logux.client_of(self.node):
            return DENIED
        if meta.others.keys() - logux.OWN_META:
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
        if kind.startswith(logux.RESERVED):
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

    def _say(self, action: Event, mark: LogMark | None, finished: str = "") -> None:
        """Send an action of our own, after acknowledging every unit that is ready."""
        if self._units is not None and (ready := self._units.take_ready()):
            self._acknowledge(ready)
        self._number += 1
        self.ledger.said(finished)
        shift = self._now_ms - self.base
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
    found, mark = _MARK.fullmatch(last), None
    if found is not None and found[1] == host:
        mark = LogMark(int(found[2]), int(found[3]))
    return Since(last, mark)


def is_protocol_5(message: bytes | str) -> bool:
    """True if a connection that begins with this message speaks this protocol, or gets its form of a refusal.

    From protocol 1 on, the version is one number and an error names numbers; clients of 0.x send two numbers.
    """
    binary = isinstance(message, bytes)
    data = message if isinstance(message, bytes) else message.encode()
    try:
        value = logux.unpack(data, binary=binary)
        first = logux.parse(value)
    except logux.BadLoguxMessageError:
        return False
    if isinstance(first, logux.Connect):
        major = first.version[0]
        return major == MAJOR or (major >= 1 and not isinstance(value[1], list))
    return isinstance(first, logux.Headers)  # other protocols have no `headers`
