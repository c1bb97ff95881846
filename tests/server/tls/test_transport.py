"""TLS between a socket and a connection, in memory: handshakes, ends, pauses, and peers that break limits."""

import asyncio
import contextlib
import ssl
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.config.settings import Tls, TlsVersion
from headrace.server.tls.context import load
from headrace.server.tls.transport import (
    HANDSHAKE_BYTES_MAX,
    TlsGate,
    TlsTransport,
)
from tests.certificates import Authority, Certificate
from tests.fakes.places import Places

PLACES = 20
"""Handshakes at once."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def certificate(authority: Authority) -> Certificate:
    return authority.issue("server")


def settings(certificate: Certificate, **more: Any) -> Tls:
    return Tls(cert=str(certificate.certificate), key=str(certificate.key), **more)


class Raw(asyncio.Transport):
    """A socket in memory: keeps what is written, and knows whether it is read."""

    def __init__(self, address: str) -> None:
        super().__init__({"peername": (address, 7)})
        self.sent = b""
        self.is_read = True
        self.wrote_end = self.closed = self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.wrote_end and not self.closed
        self.sent += data

    def write_eof(self) -> None:
        self.wrote_end = True

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def is_closing(self) -> bool:
        return self.closed or self.aborted

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True


class App(asyncio.Protocol):
    """A connection that keeps everything it is told."""

    def __init__(self, *, keeps_open: bool = False) -> None:
        self.received = b""
        self.ended = self.is_lost = False
        self.transport: asyncio.Transport | None = None
        self._keeps_open = keeps_open
        self.pause_after: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        if self.pause_after is not None and len(self.received) >= self.pause_after:
            assert self.transport is not None
            self.transport.pause_reading()

    def eof_received(self) -> bool:
        self.ended = True
        return self._keeps_open

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True


class BufferedApp(asyncio.BufferedProtocol):
    """A connection that takes a few bytes at a time."""

    def __init__(self) -> None:
        self.received = b""
        self._room = bytearray(10)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._room)

    def buffer_updated(self, nbytes: int) -> None:
        self.received += self._room[:nbytes]


class Peer:
    """A client in memory, and the server's side of its connection."""

    def __init__(
        self,
        gate: TlsGate,
        app: Any,
        context: ssl.SSLContext | None = None,
        *,
        host: str = "localhost",
        address: str = "192.0.2.1",
    ) -> None:
        self.raw = Raw(address)
        self.server = TlsTransport(gate, lambda: app)
        self.server.connection_made(self.raw)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        if context is not None:
            self.tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)

    def shake_hands(self, pass_on: Callable[[bytes], None] | None = None) -> None:
        for _ in range(4):
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                (pass_on or self.send_raw)(self._outgoing.read())
                self._take()
            else:
                (pass_on or self.send_raw)(self._outgoing.read())
                return
        raise AssertionError("no handshake")

    def send_raw(self, data: bytes) -> None:
        while data and not self.raw.is_closing():
            room = self.server.get_buffer(-1)
            size = min(len(room), len(data))
            room[:size] = data[:size]
            self.server.buffer_updated(size)
            data = data[size:]

    def send_slowly(self, data: bytes) -> None:
        for one in data:
            self.send_raw(bytes([one]))

    def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self.tls.write(view) :]
        self.send_raw(self._outgoing.read())

    def end(self) -> None:
        with contextlib.suppress(ssl.SSLWantReadError):
            self.tls.unwrap()
        self.send_raw(self._outgoing.read())

    def received(self) -> bytes:
        """Return the bytes that the server has sent."""
        self._take()
        found = b""
        with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            while data := self.tls.read(65536):
                found += data
        return found

    @property
    def is_told_the_end(self) -> bool:
        self._take()
        try:
            return self.tls.read(1) == b""
        except ssl.SSLZeroReturnError:
            return True
        except ssl.SSLWantReadError:
            return False

    def _take(self) -> None:
        self._incoming.write(self.raw.sent)
        self.raw.sent = b""


class Door:
    """A gate, and the reasons for which it has refused peers."""

    def __init__(self, tls: Tls) -> None:
        self.reasons: list[str] = []
        context = load(tls, 0.0).context
        newcomers = Places(PLACES).newcomers
        self.gate = TlsGate(
            context, newcomers, lambda peer, why: self.reasons.append(f"{peer} {why}")
        )

    @property
    def waiting(self) -> int:
        """Number of handshakes that are not complete."""
        return len(self.gate.newcomers)


@pytest.fixture
async def door(certificate: Certificate) -> Door:
    return Door(settings(certificate))


@pytest.fixture
def trusted(authority: Authority) -> ssl.SSLContext:
    return authority.trusted()


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
async def peer(door: Door, app: App, trusted: ssl.SSLContext) -> Peer:
    """A peer whose handshake is complete."""
    made = Peer(door.gate, app, trusted)
    made.shake_hands()
    return made


async def test_a_connection_is_made_when_its_handshake_is_complete(
    door: Door, app: App, trusted: ssl.SSLContext
) -> None:
    peer = Peer(door.gate, app, trusted)
    assert (app.transport, door.waiting) == (None, 1)
    peer.shake_hands()
    assert app.transport is peer.server
    assert (door.waiting, door.reasons) == (0, [])
    peer.send(b"foo")
    app.transport.write(b"bar")
    assert (app.received, peer.received()) == (b"foo", b"bar")
    assert app.transport.get_extra_info("peername") == ("192.0.2.1", 7)
    assert app.transport.get_extra_info("sslcontext") is door.gate.context
    assert app.transport.get_extra_info("peercert") is None


async def test_bytes_may_arrive_one_by_one(door: Door, app: App, trusted: ssl.SSLContext) -> None:
    peer = Peer(door.gate, app, trusted)
    peer.shake_hands(peer.send_slowly)
    peer.tls.write(b"foo")
    peer.send_slowly(peer._outgoing.read())
    assert app.received == b"foo"


async def test_much_passes_in_both_directions(peer: Peer, app: App) -> None:
    data = bytes(range(256)) * 10_000
    peer.send(data)
    assert app.received == data
    assert app.transport is not None
    app.transport.writelines([data[:1000], memoryview(data)[1000:]])
    assert peer.received() == data


async def test_a_buffered_connection_gets_the_rest_in_later_turns(
    door: Door, trusted: ssl.SSLContext
) -> None:
    app = BufferedApp()
    peer = Peer(door.gate, app, trusted)
    peer.shake_hands()
    peer.send(bytes(95))
    assert (len(app.received), peer.raw.is_read) == (10, False)
    for _ in range(10):
        await asyncio.sleep(0)
    assert (len(app.received), peer.raw.is_read) == (95, True)


async def test_a_connection_may_become_another_one_in_the_middle_of_a_read(
    door: Door, trusted: ssl.SSLContext
) -> None:
    second = BufferedApp()

    class First(App):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            assert self.transport is not None
            self.transport.pause_reading()
            self.transport.set_protocol(second)
            self.transport.resume_reading()

    first = First()
    peer = Peer(door.gate, first, trusted)
    peer.shake_hands()
    peer.send(b"foo")
    peer.send(b"bar")
    assert (first.received, second.received) == (b"foo", b"bar")


# Pauses


async def test_a_paused_connection_is_not_read_and_loses_nothing(peer: Peer, app: App) -> None:
    app.pause_after = 1
    peer.send(b"foo")
    assert not peer.raw.is_read
    peer.send(b"bar")  # was on its way already
    peer.end()
    assert (app.received, app.ended) == (b"foo", False)
    app.pause_after = None
    peer.server.resume_reading()
    await asyncio.sleep(0)
    assert (app.received, app.ended) == (b"foobar", True)


async def test_the_socket_decides_when_writing_pauses(peer: Peer, app: App) -> None:
    told = []
    app.pause_writing = lambda: told.append("pause")  # type: ignore[method-assign]
    app.resume_writing = lambda: told.append("resume")  # type: ignore[method-assign]
    peer.server.pause_writing()
    peer.server.resume_writing()
    assert told == ["pause", "resume"]


# The end of a connection


async def test_a_peer_that_has_ended_its_side_still_gets_answers(
    door: Door, trusted: ssl.SSLContext
) -> None:
    app = App(keeps_open=True)
    peer = Peer(door.gate, app, trusted)
    peer.shake_hands()
    peer.send(b"foo")
    peer.end()
    assert (app.received, app.ended, peer.raw.closed) == (b"foo", True, False)
    assert app.transport is not None
    app.transport.write(b"the last answer")
    app.transport.close()
    assert peer.raw.closed
    assert peer.received() == b"the last answer"
    assert peer.is_told_the_end


async def test_what_a_peer_sends_after_its_end_is_not_kept(
    door: Door, trusted: ssl.SSLContext
) -> None:
    """A connection whose publishes wait stays open after the end, and the socket is read."""
    app = App(keeps_open=True)
    peer = Peer(door.gate, app, trusted)
    peer.shake_hands()
    peer.end()
    peer.send_raw(bytes(1 << 20))
    assert peer.server._incoming is not None
    assert peer.server._incoming.pending < 1 << 16
    assert app.transport is not None
    app.transport.write(b"the last answer")
    assert peer.received() == b"the last answer"


@pytest.mark.parametrize("with_end_of_tls", [True, False])
async def test_an_end_closes_a_connection_that_does_not_object(
    peer: Peer, app: App, with_end_of_tls: bool
) -> None:
    if with_end_of_tls:
        peer.end()
    else:
        assert not peer.server.eof_received(), "the loop closes the socket"
    assert (app.ended, peer.server.is_closing()) == (True, True)
    assert peer.is_told_the_end


async def test_the_server_may_end_its_side_and_still_receive(peer: Peer, app: App) -> None:
    peer.server.write(b"bye")
    peer.server.write_eof()
    assert peer.raw.wrote_end
    assert peer.received() == b"bye"
    peer.send(b"late")
    assert app.received == b"late"
    peer.server.write(b"nothing may follow")
    assert peer.raw.sent == b""
    peer.end()
    assert peer.raw.closed


async def test_a_lost_socket_ends_the_connection(peer: Peer, app: App) -> None:
    peer.server.connection_lost(None)
    assert app.is_lost
    assert peer.server.is_closing()
    peer.server.write(b"foo")
    peer.server.close()


async def test_bytes_that_were_changed_on_the_way_end_the_connection(
    peer: Peer, app: App, door: Door
) -> None:
    peer.tls.write(b"foo")
    changed = bytearray(peer._outgoing.read())
    changed[-1] ^= 1
    peer.send_raw(bytes(changed))
    assert (app.received, peer.raw.aborted) == (b"", True)
    assert door.reasons[0].startswith("192.0.2.1:7 TLS failed: ")


# Peers that do not get in


@pytest.mark.parametrize("request_", [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\n"])
async def test_plain_http_is_told_that_the_port_speaks_tls(
    door: Door, app: App, request_: bytes
) -> None:
    peer = Peer(door.gate, app)
    peer.send_raw(request_)
    assert peer.raw.sent.startswith(b"HTTP/1.1 400 ")
    assert b"connect with figgs://, wombats:// or https://" in peer.raw.sent
    assert peer.raw.wrote_end
    assert "192.0.2.1:7 this is not TLS" in door.reasons[0]
    assert (app.transport, door.waiting) == (None, 1)
    peer.raw.protocol.connection_lost(None)
    assert door.waiting == 0


async def test_other_plain_peers_are_closed_and_named_in_the_log(door: Door, app: App) -> None:
    peer = Peer(door.gate, app)
    peer.send_raw(b"\x00\x05\x00\x01")
    assert (peer.raw.sent, peer.raw.wrote_end) == (b"", True)
    assert "this is not TLS" in door.reasons[0]


async def test_further_handshakes_are_refused_at_once(door: Door, app: App) -> None:
    waiting = [Peer(door.gate, app) for _ in range(PLACES)]
    more = Peer(door.gate, app)
    assert (more.raw.aborted, door.reasons) == (
        True,
        ["192.0.2.1:7 limits.handshakes_max is reached: too many TLS handshakes at once"],
    )
    more.server.connection_lost(None)
    for peer in waiting:
        peer.server.connection_lost(None)
    assert door.waiting == 0
    assert not Peer(door.gate, app).raw.aborted


async def test_an_address_with_all_handshakes_gives_way_to_others(
    door: Door, app: App, trusted: ssl.SSLContext
) -> None:
    idle = [Peer(door.gate, app) for _ in range(PLACES)]
    idle[0].send_raw(b"\x16\x03\x01")
    other = Peer(door.gate, app, trusted, address="192.0.2.2")
    assert [one.raw.aborted for one in idle] == [True] + [False] * (PLACES - 1)
    assert "192.0.2.1:7 the TLS handshake is not complete" in door.reasons[0]
    idle[0].server.connection_lost(None)
    other.shake_hands()
    other.send(b"hello")
    assert app.received == b"hello"
    assert door.waiting == PLACES - 1


async def test_a_handshake_has_a_limit_of_bytes(door: Door, app: App) -> None:
    peer = Peer(door.gate, app)
    size = 2**17 - 1
    body = b"\x01" + size.to_bytes(3) + b"\x03\x03" + bytes(2**14 - 6)
    for _ in range(10):
        if peer.raw.wrote_end:
            break
        peer.send_raw(b"\x16\x03\x01" + len(body).to_bytes(2) + body)
        body = bytes(2**14)
    assert f"a TLS handshake may have {HANDSHAKE_BYTES_MAX} bytes" in door.reasons[0]


async def test_a_slow_handshake_is_ended(door: Door, app: App) -> None:
    for sends, reasons in ((b"", 0), (b"\x16\x03\x01", 1)):
        peer = Peer(door.gate, app)
        peer.send_raw(sends)
        peer.server.give_up()
        assert (peer.raw.aborted, len(door.reasons)) == (True, reasons), "idle peers cost no line"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
async def test_old_versions_are_refused(
    door: Door, app: App, trusted: ssl.SSLContext, version: ssl.TLSVersion
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        trusted.minimum_version = trusted.maximum_version = version
    trusted.set_ciphers("ALL:@SECLEVEL=0")
    peer = Peer(door.gate, app, trusted)
    with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
        peer.shake_hands()
    assert "older than listen.tls.min_version" in door.reasons[0]


async def test_the_oldest_version_is_a_setting(
    certificate: Certificate, app: App, trusted: ssl.SSLContext
) -> None:
    trusted.maximum_version = ssl.TLSVersion.TLSv1_2
    strict = Door(settings(certificate, min_version=TlsVersion.TLS_1_3))
    with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
        Peer(strict.gate, app, trusted).shake_hands()
    peer = Peer(Door(settings(certificate)).gate, app, trusted)
    peer.shake_hands()
    peer.shake_hands()
    assert peer.tls.version() == "TLSv1.2"
    peer.send(b"foo")
    assert app.received == b"foo"


async def test_a_client_that_does_not_trust_the_certificate_is_named(door: Door, app: App) -> None:
    peer = Peer(door.gate, app, ssl.create_default_context())
    with pytest.raises(ssl.SSLCertVerificationError):
        peer.shake_hands()
    peer.send_raw(peer._outgoing.read())
    assert "the client does not know the authority of the server's certificate" in door.reasons[0]


# Client certificates


@pytest.fixture
async def asking(authority: Authority, certificate: Certificate) -> Door:
    return Door(settings(certificate, client_ca=str(authority.own.certificate)))


async def test_a_client_certificate_is_known_to_the_connection(
    asking: Door, authority: Authority, app: App
) -> None:
    own = authority.issue("billing", subject="/CN=billing", names=("URI:spiffe://example/billing",))
    peer = Peer(asking.gate, app, authority.trusted(own))
    peer.shake_hands()
    found = peer.server.get_extra_info("peercert")
    assert found["subject"] == ((("commonName", "billing"),),)
    assert found["subjectAltName"] == (("URI", "spiffe://example/billing"),)


async def test_a_client_may_have_no_certificate(
    asking: Door, authority: Authority, app: App
) -> None:
    peer = Peer(asking.gate, app, authority.trusted())
    peer.shake_hands()
    assert peer.server.get_extra_info("peercert") is None


@pytest.mark.parametrize("mistake", ["expired", "another authority"])
async def test_a_wrong_client_certificate_is_refused(
    asking: Door, authority: Authority, app: App, mistake: str, tmp_path: Path
) -> None:
    issuer = authority if mistake == "expired" else Authority.make(tmp_path)
    days = -1 if mistake == "expired" else 30
    own = issuer.issue(f"wrong-{mistake.split()[0]}", subject="/CN=billing", days=days)
    peer = Peer(asking.gate, app, authority.trusted(own))
    peer.shake_hands()
    assert app.transport is None
    assert "the client's certificate is not accepted" in asking.reasons[0]
    with pytest.raises(ssl.SSLError, match="ALERT"):
        peer.received()
