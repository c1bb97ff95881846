"""TLS between a socket and a connection: handshakes, encryption, and the end of a connection.

To the socket this layer is a protocol; to the connection it is a transport that behaves as a plain one does.
The TLS of asyncio and uvloop is not used, because there a peer that has ended its side gets no more answers,
`write_eof` is missing, and a failed handshake is reported to nobody. Elsewhere: certificates (`context.py`).

A connection is created when its handshake is complete. Until then it holds a socket, a timer and, after its
first bytes, the state of OpenSSL; `limits.handshakes_max`, `HANDSHAKE_TIMEOUT_S` and `HANDSHAKE_BYTES_MAX`
limit them. Received bytes are decrypted at once. While decrypted bytes wait, the socket is not read.
"""

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Iterable
from typing import Any, cast

from headrace.access.certificates import PeerCertificate
from headrace.server.listeners import TLS_HELLO, plain_on_tls_port
from headrace.server.peers.hangup import hang_up, host_of, peer_name
from headrace.server.peers.newcomers import GAVE_WAY, Newcomers

HANDSHAKE_TIMEOUT_S = 10.0
"""Time in which the handshake must be complete, counted from the connection."""
HANDSHAKE_BYTES_MAX = 64 * 1024
"""Bytes that a handshake may have. The largest part are the peer's certificates, if it has any."""

_READ_BYTES_MAX = 256 * 1024
"""Largest read from a socket. All sockets share the buffer, because its bytes are decrypted at once."""
_WRITE_BYTES_MAX = 64 * 1024
"""Bytes that are encrypted at once. OpenSSL keeps a buffer of about this size for the connection."""

MakeProtocol = Callable[[], asyncio.BaseProtocol]


class TlsGate:
    """State that the TLS listeners of a server share."""

    def __init__(
        self, context: ssl.SSLContext, newcomers: Newcomers, refused: Callable[[str, str], None]
    ) -> None:
        self.context = context
        """Replaced when certificates are reloaded, with effect from the next handshake on."""
        self.newcomers = newcomers
        """Connections without a complete handshake."""
        self.refused = refused
        """Called with the name of a peer, and with the reason why it is refused."""
        self.loop = asyncio.get_running_loop()
        self.buffer = memoryview(bytearray(_READ_BYTES_MAX))

    def wrap(self, make: MakeProtocol) -> Callable[[], "TlsTransport"]:
        """Return the factory of a TLS listener, whose connections `make` creates."""
        return lambda: TlsTransport(self, make)


class TlsTransport(asyncio.Transport, asyncio.BufferedProtocol):
    __slots__ = (
        "_ended",
        "_gate",
        "_handshake_bytes",
        "_incoming",
        "_is_buffered",
        "_is_closing",
        "_is_paused",
        "_make",
        "_outgoing",
        "_protocol",
        "_raw",
        "_raw_paused",
        "_received",
        "_timer",
        "_tls",
        "_told_end",
        "_wrote_end",
    )
    _raw: asyncio.Transport
    _tls: ssl.SSLObject

    def __init__(self, gate: TlsGate, make: MakeProtocol) -> None:
        super().__init__()
        self._gate = gate
        self._make = make
        self._timer: asyncio.TimerHandle | None = None
        self._incoming: ssl.MemoryBIO | None = None
        """Received bytes for OpenSSL; None until the first bytes arrive."""
        self._outgoing = ssl.MemoryBIO()
        self._handshake_bytes = 0
        self._protocol: Any = None
        """Protocol of the connection; None until the handshake is complete."""
        self._is_buffered = False
        self._received = b""
        """Decrypted bytes that the connection has not taken yet."""
        self._is_paused = self._raw_paused = False
        self._ended = self._told_end = False
        """True once the peer has ended its side, and once the connection knows that."""
        self._wrote_end = self._is_closing = False

    # Protocol of the socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = cast(asyncio.Transport, transport)
        if not self._gate.newcomers.enter(self, host_of(transport)):
            self._refused("limits.handshakes_max is reached: too many TLS handshakes at once")
            self._raw.abort()
            return
        self._timer = self._gate.loop.call_later(HANDSHAKE_TIMEOUT_S, self.give_up)

    def connection_lost(self, error: Exception | None) -> None:
        self._end_wait()
        self._is_closing = True
        self._received = b""
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.connection_lost(error)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._gate.buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = self._gate.buffer[:nbytes]
        if self._ended:
            return  # OpenSSL reads nothing after the end of the stream, and would keep all of it
        if self._incoming is None and not self._begins(data):
            return
        assert self._incoming is not None
        self._incoming.write(data)
        if self._protocol is None:
            self._shake_hands(nbytes)
        else:
            self._read()

    def eof_received(self) -> bool:
        """Treat the end of the stream as the peer's end, also without the message of TLS that announces it.

        No protocol decides anything at the end of a stream, so nothing is lost if somebody else cut it off.
        """
        if self._protocol is None or (self._told_end and self._wrote_end):
            return False  # the loop closes the socket
        self._ended = True
        self._deliver()
        return not self._is_closing

    def pause_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.resume_writing()

    # Handshake

    def _begins(self, data: memoryview) -> bool:
        """Start a handshake with the first bytes. Return False after the answer to a peer without TLS."""
        start = bytes(data[:_START_BYTES])
        if start[:1] != TLS_HELLO[:1]:
            stranger = plain_on_tls_port(start)
            self._raw.write(stranger.answer)
            self._refuse(stranger.reason)
            return False
        self._incoming = ssl.MemoryBIO()
        context = self._gate.context
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        return True

    def _shake_hands(self, size: int) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            self._handshake_bytes += size
            if self._handshake_bytes > HANDSHAKE_BYTES_MAX:
                self._refuse(f"a TLS handshake may have {HANDSHAKE_BYTES_MAX} bytes")
            return
        except ssl.SSLError as error:
            self._flush()  # the alert for the peer
            self._refuse(f"TLS handshake failed: {handshake_failure(error)}")
            return
        self._flush()
        self._end_wait()
        self.set_protocol(self._make())
        self._protocol.connection_made(self)
        self._read()

    def give_way(self) -> None:
        self._refused(f"the TLS handshake is not complete: {GAVE_WAY}")
        self._raw.abort()

    def give_up(self) -> None:
        """End a connection whose handshake takes too long."""
        if self._incoming is not None:
            self._refused(f"a TLS handshake must be complete within {HANDSHAKE_TIMEOUT_S:g} s")
        self._raw.abort()

    def _refuse(self, why: str) -> None:
        self._refused(why)
        if self._timer is not None:
            self._timer.cancel()
        hang_up(self._raw, self._end_wait)

    def _refused(self, why: str) -> None:
        self._gate.refused(peer_name(self._raw), why)

    def _end_wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._gate.newcomers.leave(self)

    # Reading

    def _read(self) -> None:
        """Decrypt the received bytes, and pass them on."""
        incoming, tls, found = self._incoming, self._tls, []
        assert incoming is not None
        try:
            while incoming.pending or tls.pending():
                data = tls.read(_READ_BYTES_MAX)
                if not data:
                    self._ended = True
                    break
                found.append(data)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self._ended = True
        except ssl.SSLError as error:
            self._flush()
            self._refused(f"TLS failed: {handshake_failure(error)}")
            self.abort()
            return
        self._flush()  # OpenSSL may have to answer, for example with new keys
        if found:
            self._received += found[0] if len(found) == 1 else b"".join(found)
        self._deliver()

    def _deliver(self) -> None:
        """Pass decrypted bytes on until the connection pauses; a small buffer gets the rest a turn later."""
        while self._received and not self._is_paused and not self.is_closing():
            if self._is_buffered:
                room = self._protocol.get_buffer(len(self._received))
                size = min(len(room), len(self._received))
                room[:size] = self._received[:size]
                self._received = self._received[size:]
                self._protocol.buffer_updated(size)
                if self._received:
                    self._gate.loop.call_soon(self._deliver)
                    break
            else:
                data, self._received = self._received, b""
                self._protocol.data_received(data)
        if self._ended and not (self._received or self._is_paused or self._told_end):
            self._tell_end()
        self._control_reading()

    def _tell_end(self) -> None:
        if not self.is_closing():
            self._told_end = True
            if not self._protocol.eof_received():
                self.close()

    def _control_reading(self) -> None:
        """Read from the socket only while everything decrypted has been taken."""
        stop = self._is_paused or bool(self._received)
        if stop is not self._raw_paused and not self.is_closing():
            self._raw_paused = stop
            if stop:
                self._raw.pause_reading()
            else:
                self._raw.resume_reading()

    # Transport of the connection

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "ssl_object":
            return self._tls
        if name == "sslcontext":
            return self._tls.context
        if name == "peercert":
            return self._tls.getpeercert() or default
        return self._raw.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        self._told_end = False
        self._is_buffered = hasattr(protocol, "get_buffer") and not isinstance(
            protocol, asyncio.Protocol
        )

    def get_protocol(self) -> asyncio.BaseProtocol:
        return cast(asyncio.BaseProtocol, self._protocol)

    def is_reading(self) -> bool:
        return not self._is_paused and not self.is_closing()

    def pause_reading(self) -> None:
        self._is_paused = True
        self._control_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        if self._received or self._ended:
            self._gate.loop.call_soon(self._deliver)
        else:
            self._control_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._raw.set_write_buffer_limits(high=high, low=low)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._raw.get_write_buffer_limits()

    def get_write_buffer_size(self) -> int:
        return self._raw.get_write_buffer_size()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._wrote_end or self.is_closing():
            return
        rest = memoryview(data)
        try:
            while rest:
                count = self._tls.write(rest[:_WRITE_BYTES_MAX])
                self._flush()
                rest = rest[count:]
        except ssl.SSLError:
            self.abort()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """End this side: everything written is sent, and the peer may still send."""
        if not self._wrote_end and not self.is_closing():
            self._say_end()
            self._raw.write_eof()

    def close(self) -> None:
        if not self.is_closing():
            self._say_end()
            self._is_closing = True
            self._raw.close()

    def abort(self) -> None:
        self._is_closing = True
        self._raw.abort()

    def is_closing(self) -> bool:
        return self._is_closing or self._raw.is_closing()

    def _say_end(self) -> None:
        """Send the message of TLS that ends this side. Without it, the peer suspects an attack."""
        if self._wrote_end:
            return
        self._wrote_end = True
        with contextlib.suppress(ssl.SSLError):  # most often: the peer has not answered yet
            self._tls.unwrap()
        self._flush()

    def _flush(self) -> None:
        if self._outgoing.pending:
            data = self._outgoing.read()
            if not self._raw.is_closing():
                self._raw.write(data)


def peer_certificate(transport: asyncio.BaseTransport) -> PeerCertificate | None:
    """Return the verified certificate of a peer; None without one, and without TLS."""
    told = transport.get_extra_info("peercert")
    return PeerCertificate.parse(told) if told else None


_START_BYTES = 16
"""Bytes by which a peer without TLS is recognised."""

_FAILURES = {
    "NO_SHARED_CIPHER": "the client and the server have no cipher in common",
    "UNSUPPORTED_PROTOCOL": "the client's version of TLS is older than listen.tls.min_version",
    "VERSION_TOO_LOW": "the client's version of TLS is older than listen.tls.min_version",
    "TLSV1_ALERT_UNKNOWN_CA": "the client does not know the authority of the server's certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the client does not accept the server's certificate",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the client does not accept the server's certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the client says that the server's certificate has expired",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the client does not speak the server's version of TLS",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "the client found no common ground",
}


def handshake_failure(error: ssl.SSLError) -> str:
    """Return the reason of a failure, in words of an operator where they are known."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the client's certificate is not accepted: {error.verify_message}"
    reason = error.reason or ""
    return _FAILURES.get(reason) or reason.replace("_", " ").lower() or "it was broken off"
