"""TLS on real servers: every protocol, the end of connections, reloads, and peers that make mistakes."""

import asyncio
import http.client
import json
import signal
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace import channels
from headrace.reader.http_client import HttpClient, ServerError
from headrace.reader.view import parse_place
from headrace.testing import ServerProcess, wait_until
from tests.certificates import Authority, Certificate
from tests.client.refusals import refused
from tests.fakes.tls_socket import TlsSocket
from tests.system.conftest import Start
from tests.system.figg import foreign as figg
from tests.system.wombat import foreign as wombat

ENDED = "the server closed the connection"


class TlsWire(figg.Wire):
    """A Figg connection over TLS."""

    socket: Any

    def __init__(self, server: ServerProcess, context: ssl.SSLContext) -> None:
        self._context = context
        super().__init__(server.figg)

    def _open(self) -> None:
        self.socket = TlsSocket(self.socket, self._context)


class TlsWombatWire(wombat.Wire):
    """A Wombat connection over TLS."""

    socket: Any

    def __init__(self, server: ServerProcess, context: ssl.SSLContext) -> None:
        self._context = context
        super().__init__(server.ws)

    def _open(self) -> None:
        self.socket = TlsSocket(self.socket, self._context)
        super()._open()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def certificate(authority: Authority) -> Certificate:
    return authority.issue("server")


def flags(certificate: Certificate, **more: object) -> list[str]:
    settings = {"cert": certificate.certificate, "key": certificate.key} | more
    return [f"--set=listen.tls.{key}={value}" for key, value in settings.items()]


@pytest.fixture(scope="module")
def tls_server(
    certificate: Certificate, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """One server for all tests that do no harm to it."""
    directory = tmp_path_factory.mktemp("tls") / "data"
    with ServerProcess(directory, *flags(certificate)) as process:
        yield process
        assert process.running, process.stderr
        assert "Traceback" not in process.stderr, process.stderr


@pytest.fixture
def trusted(authority: Authority) -> ssl.SSLContext:
    return authority.trusted()


def get(server: ServerProcess, path: str, context: ssl.SSLContext) -> tuple[int, bytes]:
    return ask(server.http, "GET", path, context)


def ask(
    address: tuple[str, int], method: str, path: str, context: ssl.SSLContext, body: bytes = b""
) -> tuple[int, bytes]:
    connection = http.client.HTTPSConnection(*address, timeout=30, context=context)
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


# Every protocol


def test_an_unmodified_figg_client_publishes_and_reads(
    tls_server: ServerProcess, trusted: ssl.SSLContext, topic: bytes
) -> None:
    with TlsWire(tls_server, trusted) as wire:
        wire.publish(topic, b"foo", bytes(250_000))
        wire.attach(topic, 0)
        assert [one.data for one in wire.expect_data(2)] == [b"foo", bytes(250_000)]
        assert wire.socket.tls.version() == "TLSv1.3"


def test_an_unmodified_wombat_client_publishes(
    tls_server: ServerProcess, trusted: ssl.SSLContext, name: str
) -> None:
    with TlsWombatWire(tls_server, trusted) as wire:
        wire.send(wombat.publish(name, 0, bytes(250_000)))
        assert wire.expect(wombat.ACK).number == 0


def test_http_and_its_health_check_answer_on_both_of_their_ports(
    tls_server: ServerProcess, trusted: ssl.SSLContext
) -> None:
    for address in (tls_server.http, tls_server.ws):
        status, body = ask(address, "GET", "/healthz", trusted)
        assert (status, json.loads(body)["status"]) == (200, "ok")
    assert get(tls_server, "/v1/topics", trusted)[0] == 200


async def test_the_sdk_speaks_each_protocol(
    tls_server: ServerProcess, authority: Authority, name: str
) -> None:
    figg_at, ws_at = (f"localhost:{address[1]}" for address in (tls_server.figg, tls_server.ws))
    ca = str(authority.own.certificate)
    for url in (f"figgs://{figg_at}", f"wombats://{ws_at}"):
        async with headrace.connect(url, ca=ca) as client:
            for number in range(3):
                await client.publish(name, b"%d" % number)
            subscription = client.subscribe(name, offset=0)
            assert [(await anext(subscription)).payload for _ in range(3)] == [b"0", b"1", b"2"]
    async with headrace.connect(f"loguxs://{ws_at}/{name}", store=None, ca=ca) as log:
        await log.add({"type": "a"})
        await asyncio.wait_for(log.synced(), 30)
    url = f"channels://{ws_at}/{name}"
    async with channels.join(url, processor="me", ca=ca) as channel:
        await asyncio.wait_for(channel.send(b"foo"), 30)


def test_commands_take_the_authority_from_a_flag_or_the_environment(
    tls_server: ServerProcess, authority: Authority, headrace: Callable[..., Any], name: str
) -> None:
    figg_at, http_at = (f"localhost:{at[1]}" for at in (tls_server.figg, tls_server.http))
    ca = str(authority.own.certificate)
    done = headrace("publish", name, "foo", "--url", f"figgs://{figg_at}", "--ca", ca)
    assert done.returncode == 0, done.stderr
    environ = {
        "HEADRACE_URL": f"figgs://{figg_at}",
        "HEADRACE_HTTP": f"https://{http_at}",
        "HEADRACE_CA": ca,
    }
    done = headrace("subscribe", name, "--until-end", environ=environ)
    assert (done.returncode, done.stdout) == (0, "foo\n"), done.stderr


def test_readers_and_tasks_of_spark_take_the_authority_too(
    tls_server: ServerProcess, authority: Authority
) -> None:
    url = f"https://localhost:{tls_server.http[1]}"
    with closing(HttpClient(parse_place(url, "", str(authority.own.certificate)))) as reader:
        assert "topics" in reader.json("GET", "/v1/topics", {})
    with (
        closing(HttpClient(parse_place(url, ""), retry_s=0.0)) as stranger,
        pytest.raises(ServerError, match="is from an unknown authority"),
    ):
        stranger.json("GET", "/v1/topics", {})


@pytest.mark.parametrize("protocol", ["figg", "wombat"])
def test_megabytes_pass_in_both_directions(
    tls_server: ServerProcess, trusted: ssl.SSLContext, name: str, protocol: str
) -> None:
    payloads = [b"%d" % number + bytes(200_000) for number in range(30)]
    if protocol == "figg":
        topic = name.encode()
        with TlsWire(tls_server, trusted) as wire, TlsWire(tls_server, trusted) as reader:
            reader.attach(topic, 0)
            wire.publish(topic, *payloads)
            assert [one.data for one in reader.expect_data(len(payloads))] == payloads
    else:
        with TlsWombatWire(tls_server, trusted) as sender, TlsWombatWire(tls_server, trusted) as to:
            to.send(wombat.attach(name))
            to.expect(wombat.ATTACHED)
            sender.send(*(wombat.publish(name, at, data) for at, data in enumerate(payloads)))
            while sender.expect(wombat.ACK).number < len(payloads) - 1:
                pass
            assert [to.expect(wombat.PAYLOAD).data for _ in payloads] == payloads


# The end of a connection


def test_a_client_that_ends_its_side_still_gets_the_last_acknowledgement(
    tls_server: ServerProcess, trusted: ssl.SSLContext, topic: bytes
) -> None:
    with TlsWire(tls_server, trusted) as wire:
        wire.send(*(figg.publish(topic, number, bytes(1000)) for number in range(500)))
        wire.socket.end()
        acks = [one.number for one in wire.until_closed()]
        assert acks[-1] == 499


def test_a_client_that_only_closes_its_sending_socket_gets_it_too(
    tls_server: ServerProcess, trusted: ssl.SSLContext, topic: bytes
) -> None:
    with TlsWire(tls_server, trusted) as wire:
        wire.send(*(figg.publish(topic, number, b"foo") for number in range(10)))
        wire.socket.shutdown(socket.SHUT_WR)
        assert [one.number for one in wire.until_closed()][-1] == 9


def test_a_refused_client_gets_the_acknowledgements_before_and_a_proper_end(
    tls_server: ServerProcess, trusted: ssl.SSLContext, topic: bytes
) -> None:
    with TlsWire(tls_server, trusted) as wire:
        wire.send(figg.publish(topic, 0, b"foo"), figg.frame(77, b""), bytes(100_000))
        assert [one.number for one in wire.until_closed()] == [0]
        assert wire.socket.recv(1) == b"", "the end is announced"


def test_a_stopping_server_acknowledges_what_it_has_taken(
    start: Start, certificate: Certificate, trusted: ssl.SSLContext
) -> None:
    server = start(*flags(certificate))
    with TlsWire(server, trusted) as wire, TlsWombatWire(server, trusted) as other:
        wire.publish(b"t", b"foo")
        server.signal(signal.SIGTERM)
        assert wire.until_closed() == []
        with pytest.raises(wombat.Closed, match="1001"):
            other.receive()
    assert server.wait() == 0
    assert "Traceback" not in server.stderr


def test_an_early_answer_arrives_although_the_client_keeps_sending(
    tls_server: ServerProcess, trusted: ssl.SSLContext
) -> None:
    with TlsSocket(socket.create_connection(tls_server.http, 30), trusted) as peer:
        peer.sendall(b"POST /v1/topics HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n")
        for _ in range(20):
            peer.sendall(bytes(100_000))
        answer = b""
        while b"}" not in answer:
            answer += peer.recv(65536)
        assert answer.startswith(b"HTTP/1.1 413 ")


# Peers that make mistakes


def test_metrics_say_when_the_certificate_expires(
    tls_server: ServerProcess, trusted: ssl.SSLContext
) -> None:
    text = get(tls_server, "/metrics", trusted)[1].decode()
    for listener in ("figg", "ws", "http"):
        assert f'headrace_tls_certificate_expires_seconds{{listener="{listener}"}} ' in text


def test_plain_peers_are_told_that_the_port_speaks_tls(
    tls_server: ServerProcess, headrace: Callable[..., Any]
) -> None:
    for address in (tls_server.figg, tls_server.ws, tls_server.http):
        connection = http.client.HTTPConnection(*address, timeout=30)
        connection.request("GET", "/healthz")
        response = connection.getresponse()
        assert response.status == 400
        assert b"the port speaks only TLS" in response.read()
        connection.close()

    def is_refused_and_logged() -> bool:
        # At most one refusal a second is logged.
        with figg.Wire(tls_server.figg) as wire:
            wire.send(figg.publish(b"t", 0, b"foo"))
            assert wire.until_closed() == []
        return "refused, this is not TLS" in tls_server.stderr

    wait_until(is_refused_and_logged, what="a line in the log")
    done = headrace("topics", "--http", "{}:{}".format(*tls_server.http))
    assert done.returncode == 1
    assert "the port speaks only TLS: connect with figgs://" in done.stderr


def test_a_command_says_that_a_port_does_not_speak_tls(
    server: ServerProcess, headrace: Callable[..., Any]
) -> None:
    done = headrace("topics", "--http", "https://{}:{}".format(*server.http))
    assert done.returncode == 1
    assert "does not speak TLS" in done.stderr


async def test_tls_on_a_plain_port_is_named_by_both_sides(start: Start) -> None:
    server = start()  # a busy one sums up what one address does
    for url in ("figgs://{}:{}".format(*server.figg), "wombats://{}:{}".format(*server.ws)):
        connect = partial(headrace.connect, url)
        await refused(
            lambda timeout_s, connect=connect: connect(connect_timeout_s=timeout_s), "TLS"
        )
    wait_until(lambda: "this is TLS, and the port is plain" in server.stderr, what="a log line")


def test_errors_of_certificates_are_one_sentence(
    tls_server: ServerProcess, start: Start, authority: Authority, headrace: Callable[..., Any]
) -> None:
    port, ca = tls_server.http[1], str(authority.own.certificate)

    def reason(url: str, *flags: str) -> str:
        done = headrace("topics", "--http", url, *flags)
        assert done.returncode == 1
        return str(done.stderr).strip()

    assert "is from an unknown authority" in reason(f"https://localhost:{port}")
    elsewhere = start(*flags(authority.issue("elsewhere", names=("DNS:log.example.com",))))
    assert "is for another host" in reason(f"https://localhost:{elsewhere.http[1]}", "--ca", ca)
    elsewhere.kill()
    expired = start(*flags(authority.issue("expired", days=-1)))
    assert "has expired: clients refuse it" in expired.stderr
    assert "has expired" in reason(f"https://localhost:{expired.http[1]}", "--ca", ca)


def test_a_listener_may_stay_plain(
    start: Start, certificate: Certificate, trusted: ssl.SSLContext
) -> None:
    server = start(*flags(certificate, off="http"))
    connection = http.client.HTTPConnection(*server.http, timeout=30)
    connection.request("GET", "/healthz")
    assert connection.getresponse().status == 200
    connection.close()
    with TlsWire(server, trusted) as wire:
        assert wire.alive()


# Reloads


def test_a_new_certificate_counts_from_the_next_handshake_on(
    start: Start, authority: Authority, trusted: ssl.SSLContext, tmp_path: Path
) -> None:
    old, new = authority.issue("old"), authority.issue("new")
    used = Certificate(tmp_path / "cert.pem", tmp_path / "key.pem")

    def install(cert: bytes, key: bytes) -> None:
        used.certificate.write_bytes(cert)
        used.key.write_bytes(key)

    def served(address: tuple[str, int]) -> bytes:
        with socket.create_connection(address, 30) as plain:
            found = TlsSocket(plain, trusted).tls.getpeercert(binary_form=True)
            assert found is not None
            return found

    install(old.certificate.read_bytes(), old.key.read_bytes())
    server = start(*flags(used))
    before = served(server.figg)
    with TlsWire(server, trusted) as wire:
        wire.publish(b"t", b"foo")
        install(new.certificate.read_bytes(), old.key.read_bytes())
        server.signal(signal.SIGHUP)
        wait_until(
            lambda: "the certificate in use stays: listen.tls.key:" in server.stderr,
            what="the refusal of a wrong key",
        )
        assert served(server.figg) == before
        install(new.certificate.read_bytes(), new.key.read_bytes())
        server.signal(signal.SIGHUP)
        wait_until(lambda: served(server.figg) != before, what="the new certificate")
        expected = ssl.PEM_cert_to_DER_cert(new.certificate.read_text())
        assert [served(at) for at in (server.figg, server.ws, server.http)] == [expected] * 3
        wire.publish(b"t", b"bar", first=1)
    assert "Traceback" not in server.stderr


def test_mistakes_in_the_settings_stop_the_start(
    start: Start, certificate: Certificate, tmp_path: Path
) -> None:
    server = start(*flags(certificate, cert=tmp_path / "none.pem"), start=False)
    done = subprocess.run(server.command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith('none.pem" cannot be read: No such file or directory\n')
