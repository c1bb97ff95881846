"""Functions that feed bytes of a stranger to a decoder, and fail only if the decoder is at fault.

A target takes any bytes. It lets the errors pass that the decoder documents, and asserts what must hold for
every input: the same messages in whatever pieces the bytes come, and what was decoded can be encoded and
decoded again. A target of a session also answers its commands, as a connection does: the first byte of the
input chooses between answers. Elsewhere: who makes the bytes up (`test_targets.py`, `process.py`).
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httptools

from headrace.config.load import load
from headrace.errors import ConfigError, HeadraceError
from headrace.log.batch.blocks import BlockDecoder
from headrace.log.recovery.frames import read_frames, read_header
from headrace.payload import UPLOAD_CHECKS
from headrace.payload.channel import BadMessageError, decode_message, decode_row, encode_message
from headrace.payload.json_limits import BadJSONError, decode_json
from headrace.payload.logux import (
    BadEnvelopeError,
    check_envelope,
    check_event,
    created_of,
    decode_envelope,
    id_of,
    key_of,
    keys_of_id,
)
from headrace.server.http.requests import RequestMeter, RequestRefusedError
from headrace.session.channel.server import AuthenticateProcessor, ChannelServerSession, Request
from headrace.session.figg import FiggServerSession
from headrace.session.logux.server import AddEvents, AuthenticatePeer, LoguxServerSession
from headrace.session.logux.server5 import (
    LogMark,
    Logux5ServerSession,
    Subscribe,
    is_protocol_5,
)
from headrace.session.server import (
    AttachCommand,
    Authenticate,
    DetachCommand,
    Publish,
    TopicSession,
    Unit,
)
from headrace.session.wombat import WombatServerSession
from headrace.wire import channel as channel_wire
from headrace.wire import readers
from headrace.wire.figg import messages as figg
from headrace.wire.figg.decoder import ClientDecoder as FiggClientDecoder
from headrace.wire.figg.decoder import ServerDecoder as FiggServerDecoder
from headrace.wire.logux import messages as logux_wire
from headrace.wire.wombat import messages as wombat
from headrace.wire.wombat.decoder import ClientDecoder as WombatClientDecoder
from headrace.wire.wombat.decoder import ServerDecoder as WombatServerDecoder

Target = Callable[[bytes], None]

NOW_MS = 1_800_000_000_000


def messages_of(data: bytes) -> list[bytes]:
    """Cut bytes into messages: a byte with a length, then the message, until nothing is left."""
    found = []
    while data:
        found.append(data[1 : 1 + data[0]])
        data = data[1 + data[0] :]
    return found


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


# Figg


def _receive(decoder: Any, data: bytes) -> list[Any]:
    found = list(decoder.receive(data))
    while getattr(decoder, "unread", b""):
        found += decoder.receive(b"")
    return found


def _merged(messages: list[Any]) -> list[str]:
    """Return messages in a form that does not depend on the reads that they came with."""
    parts: list[str] = []
    topics: dict[str, list[bytes]] = {}
    for message in messages:
        records = getattr(message, "records", None)
        if isinstance(records, dict):
            for topic, its in records.items():
                topics.setdefault(topic, []).extend(its)
        elif isinstance(getattr(message, "messages", None), list):
            topics.setdefault(message.topic, []).extend(message.messages)
        else:
            if isinstance(message, figg.Bad | wombat.Bad):
                # A publish can be named in the refusal only if enough of it has arrived.
                message = message._replace(refused=None)
            parts.append(repr(message))
    return [*parts, repr(sorted(topics.items()))]


def figg_server(data: bytes) -> None:
    whole = _merged(_receive(FiggServerDecoder(), data))
    decoder, found = FiggServerDecoder(), []
    for piece in pieces(data, 1):
        found += _receive(decoder, piece)
    assert _merged(found) == whole


def figg_client(data: bytes) -> None:
    whole = _merged(_receive(FiggClientDecoder(), data))
    decoder, found = FiggClientDecoder(), []
    for piece in pieces(data, 3):
        found += _receive(decoder, piece)
    assert _merged(found) == whole


class _TopicAnswers:
    """Answers of a connection to the commands of a Figg or Wombat session."""

    def __init__(self, session: TopicSession, data: bytes) -> None:
        self._session = session
        self._choice = data[0] if data else 0
        self._units: list[Unit] = []

    def answer(self, commands: Sequence[Any]) -> None:
        """Carry out the commands; some of the publishes are stored only at the end."""
        session = self._session
        for command in commands:
            self._choice += 1
            if isinstance(command, Publish):
                if self._choice % 2:
                    session.stored(command.unit)
                else:
                    self._units.append(command.unit)
            elif isinstance(command, AttachCommand):
                session.attaching(command)
                epoch, offset = command.epoch or 1, command.offset or 0
                session.attached(command.topic, epoch, offset, exact=bool(self._choice % 2))
            elif isinstance(command, DetachCommand):
                session.detached(command.topic)
            elif isinstance(command, Authenticate):
                session.authenticated(1000)
            elif isinstance(command, readers.Read):
                session.tell_reader(readers.Waiting(command.topic, 1))
                session.tell_reader(readers.Reading(command.topic, 1, 0, True, 1, 0, 0))
            elif isinstance(command, readers.Handled):
                session.tell_reader(readers.Stored(command.topic, command.grant, command.offset))

    def finish(self) -> None:
        """Store what is not stored yet: then every publish that was accepted is acknowledged."""
        self._session.data_to_send()
        for unit in self._units:
            self._session.stored(unit)
        self._session.data_to_send()
        assert self._session.finished


def figg_session(data: bytes) -> None:
    session = FiggServerSession()
    connection = _TopicAnswers(session, data)
    for piece in pieces(data, 64):
        connection.answer(session.receive_data(piece))
        while session.unread_bytes:
            connection.answer(session.receive_data(b""))
    connection.finish()


# Wombat


def wombat_server(data: bytes) -> None:
    messages = messages_of(data)
    whole = _merged(WombatServerDecoder().receive(messages))
    decoder, found = WombatServerDecoder(), []
    for message in messages:
        found += decoder.receive([message])
    assert _merged(found) == whole


def wombat_client(data: bytes) -> None:
    WombatClientDecoder().receive(messages_of(data))


def wombat_session(data: bytes) -> None:
    session = WombatServerSession(0.0, 10.0)
    connection = _TopicAnswers(session, data)
    for number, message in enumerate(messages_of(data)):
        connection.answer(session.receive_messages([message], float(number)))
    connection.finish()


# Logux


def _frame(message: bytes) -> bytes | str:
    """Return a message as a WebSocket delivers it: what can be JSON is text, all else is binary."""
    return message if message[:1] >= b"\x80" else message.decode("utf-8", "replace")


def logux_messages(data: bytes) -> None:
    is_protocol_5(_frame(data))
    for binary in (False, True):
        try:
            message = logux_wire.decode(data, binary=binary)
        except logux_wire.BadLoguxMessageError:
            continue
        logux_wire.type_of(message)


def _logux(session: LoguxServerSession | Logux5ServerSession, data: bytes) -> None:
    choice = data[0] if data else 0
    late: list[Any] = []

    def answer(commands: Sequence[Any]) -> None:
        nonlocal choice
        for command in commands:
            choice += 1
            if isinstance(command, AuthenticatePeer):
                if choice % 8 == 0:
                    session.turn_away()
                elif choice % 2:
                    answer(session.let_in(NOW_MS))
                else:
                    late.append(command)
            elif isinstance(command, AddEvents | Subscribe) and choice % 4 == 0:
                late.append(command)
                if isinstance(command, Subscribe):
                    session.let_go(command)
            else:
                carry_out(command)

    def carry_out(command: Any) -> None:
        if isinstance(command, AddEvents):
            if isinstance(session, Logux5ServerSession):
                session.denied(command.unit, [choice % 3 > 0] * len(command.events))
            session.stored(command.unit)
        elif isinstance(command, Subscribe) and choice % 2:
            session.undo(command, "denied")
        elif isinstance(command, Subscribe):
            session.subscribed(command, LogMark(1, 12))
        elif isinstance(command, AuthenticatePeer) and not session.closed:
            answer(session.let_in(NOW_MS))

    for message in messages_of(data):
        answer(session.receive_messages([_frame(message)], NOW_MS))
        if choice % 5 == 0:
            session.ping()
            session.data_to_send()
    while late:
        carry_out(late.pop())
    session.data_to_send()
    assert session.finished


def logux_session(data: bytes) -> None:
    _logux(LoguxServerSession("server"), data)


def logux5_session(data: bytes) -> None:
    _logux(Logux5ServerSession("server", 0), data)


# Channels


def channel_messages(data: bytes) -> None:
    for text in (data, data.decode("utf-8", "replace")):
        try:
            message = channel_wire.decode(text)
            if isinstance(message, channel_wire.Send | channel_wire.UploadRequest):
                channel_wire.content_of(message, binary=isinstance(text, bytes))
        except (channel_wire.BadChannelMessageError, BadMessageError):
            continue


def channel_session(data: bytes) -> None:
    session = ChannelServerSession(5.0)
    choice = data[0] if data else 0
    is_held = False

    def answer(commands: Sequence[Any]) -> None:
        nonlocal choice, is_held
        for command in commands:
            choice += 1
            if isinstance(command, AuthenticateProcessor):
                if choice % 8 == 0:
                    session.turn_away()
                elif choice % 2:
                    answer(session.let_in())
                else:
                    is_held = True
            elif isinstance(command, Request):
                session.refuse_request("busy", True, "later", command.message)

    for message in messages_of(data):
        answer(session.receive_messages([_frame(message)]))
    if is_held and not session.closed:
        answer(session.let_in())
    session.data_to_send()


# Payloads and files


def payloads(data: bytes) -> None:
    for decode in (decode_message, decode_row):
        try:
            message = decode(data)
        except BadMessageError:
            continue
        if decode is decode_message:
            assert decode_message(encode_message(message)) == message
    for check in (decode_envelope, check_event):
        try:
            check(data)
        except BadEnvelopeError:
            continue
    try:
        check_envelope(data)
    except BadEnvelopeError:
        pass
    else:
        # An event that was accepted can be shown in the form of either protocol.
        envelope = decode_envelope(data)
        assert key_of(created_of(envelope)) in keys_of_id(id_of(envelope))
    try:
        decode_json(data)
    except BadJSONError:
        return


def batch_blocks(data: bytes) -> None:
    outcomes = []
    for size in (len(data) or 1, 7):
        decoder = BlockDecoder(UPLOAD_CHECKS)
        try:
            staged = b"".join(
                bytes(part) for piece in pieces(data, size) for part in decoder.feed(piece)
            )
            decoder.finish()
            outcomes.append((staged, decoder.records))
        except HeadraceError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


_place = tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)


def journal(data: bytes) -> None:
    path = Path(_place.name, "0.journal")
    path.write_bytes(data)
    read_header(path)
    end = 0
    for found in read_frames(path):
        position = getattr(found, "position", end)
        assert 0 <= position <= len(data)
        end = position
    list(read_frames(path, len(data), generation=1))


# HTTP and settings


class _Callbacks:
    """A parser's callbacks that count as both listeners do."""

    def __init__(self) -> None:
        self.meter = RequestMeter(4096)

    def on_message_begin(self) -> None:
        self.meter.begin()

    def on_url(self, url: bytes) -> None:
        self.meter.url(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self.meter.header(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self.meter.head_is_complete()

    def on_body(self, body: bytes) -> None:
        self.meter.body()

    def on_message_complete(self) -> None:
        self.meter.begin()


def http_request(data: bytes) -> None:
    callbacks = _Callbacks()
    parser = httptools.HttpRequestParser(callbacks)
    try:
        for piece in pieces(data, 100):
            if callbacks.meter.feed(parser, piece) is not None:
                return
    except RequestRefusedError:
        return


def settings(data: bytes) -> None:
    path = Path(_place.name, "headrace.toml")
    path.write_bytes(data)
    try:
        load({}, {}, path)
    except ConfigError:
        return


TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        figg_server,
        figg_client,
        figg_session,
        wombat_server,
        wombat_client,
        wombat_session,
        logux_messages,
        logux_session,
        logux5_session,
        channel_messages,
        channel_session,
        payloads,
        batch_blocks,
        journal,
        http_request,
        settings,
    )
}
