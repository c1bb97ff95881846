"""Server side of a processor's connection, without I/O: requests in, answers out in the peer's encoding.

The session only decodes requests. The caller carries them out and answers each.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headrace.payload.channel import BadMessageError, Content, check_processor
from headrace.session.server import Close, GreetedSession, PeerState, Unit
from headrace.wire import channel as wire


class AuthenticateProcessor(NamedTuple):
    """Check the processor's credentials, then call `let_in` or `turn_away`."""

    processor: str
    token: Any


class Request(NamedTuple):
    message: wire.Message
    content: Content | None = None
    """Content of a `send` or an `upload`."""


class ChannelServerSession(GreetedSession):
    __slots__ = ("_ping_s", "attempt", "instance", "processor", "unanswered")

    def __init__(self, ping_s: float) -> None:
        super().__init__()
        self._ping_s = ping_s
        self.processor = ""
        self.instance, self.attempt = "", 0
        self.unanswered = 0
        """Number of requests that are being carried out and not answered yet."""

    def receive_messages(self, messages: Sequence[bytes | str]) -> list[NamedTuple]:
        commands: list[NamedTuple] = []
        for data in messages:
            if self.closed:
                break
            if self._state is PeerState.NEW:
                self.binary = isinstance(data, bytes)
            elif isinstance(data, bytes) is not self.binary:
                commands.append(self._bad("a connection speaks JSON or MessagePack, and not both"))
                break
            try:
                self._receive(wire.decode(data), commands)
            except wire.BadChannelMessageError as error:
                commands.append(self._bad(str(error)))
        return commands

    def let_in(self) -> list[NamedTuple]:
        """Accept the peer, and handle the messages that it sent in the meantime."""
        held = self._let_in()
        welcome = {"type": "welcome", "processor": self.processor}
        self.say(welcome | {"version": wire.VERSION, "ping_s": self._ping_s})
        commands: list[NamedTuple] = []
        for message in held:
            if not self.closed:
                self._receive(message, commands)
        return commands

    def turn_away(self) -> Close:
        return self._end("wrong-credentials", "the credentials are wrong")

    def say(self, message: Mapping[str, Any]) -> None:
        self._out.append(wire.encode(message, binary=self.binary))

    def say_encoded(self, frame: bytes) -> None:
        self._out.append(frame)

    def refuse_request(self, code: str, retry: bool, text: str, of: wire.Message) -> None:
        """Refuse to carry out a request; the connection stays open."""
        error: dict[str, Any] = {"type": "error", "code": code, "retry": retry, "text": text}
        error["of"] = of.__struct_config__.tag
        if not isinstance(of, wire.Hello | wire.Ping):
            error["channel"] = of.channel
        if isinstance(of, wire.Send):
            error["number"] = of.number
        self.say(error)

    @property
    def finished(self) -> bool:
        return not self.unanswered

    def _acknowledge(self, ready: Sequence[Unit]) -> None:
        raise NotImplementedError  # every request has its own answer

    def _receive(self, message: wire.Message, commands: list[NamedTuple]) -> None:
        if self._state is PeerState.AUTHENTICATING:
            self._held.append(message)
        elif self._state is PeerState.NEW:
            if not isinstance(message, wire.Hello):
                commands.append(self._end("hello-first", "say `hello` first"))
                return
            try:
                check_processor(message.processor)
            except BadMessageError as error:
                commands.append(self._bad(str(error)))
                return
            self._state = PeerState.AUTHENTICATING
            self.processor = message.processor
            self.instance, self.attempt = message.instance, message.attempt
            commands.append(AuthenticateProcessor(message.processor, message.token))
        elif isinstance(message, wire.Hello):
            commands.append(self._end("hello-first", "`hello` comes once"))
        elif isinstance(message, wire.Ping):
            self.say({"type": "pong"})
        elif isinstance(message, wire.Send | wire.UploadRequest):
            try:
                content = wire.content_of(message, binary=self.binary)
            except BadMessageError as error:
                self.refuse_request("bad-content", False, str(error), message)
                return
            commands.append(Request(message, content))
        else:
            commands.append(Request(message))

    def _bad(self, text: str) -> Close:
        return self._end("bad-message", text)

    def _end(self, code: str, text: str) -> Close:
        self.say({"type": "error", "code": code, "retry": False, "text": text})
        return self.refuse(text)
