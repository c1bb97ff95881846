"""Client certificates on a real server: unmodified clients of every protocol have their rule's grants."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.testing import ServerProcess, wait_until
from tests.certificates import Authority, Certificate
from tests.system.figg import foreign as figg
from tests.system.test_tls import TlsWire, TlsWombatWire, ask
from tests.system.wombat import foreign as wombat

RULES = """
[[access.certificate]]
match = "CN:billing"
grants = ["publish,subscribe,create,inspect:orders/*"]
[[access.certificate]]
match = "URI:spiffe://example.com/readers/*"
grants = ["subscribe:orders/*", "inspect:*"]
"""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def billing(authority: Authority) -> Certificate:
    return authority.issue("billing", subject="/CN=billing", names=())


@pytest.fixture(scope="module")
def reader(authority: Authority) -> Certificate:
    return authority.issue(
        "reader", subject="/O=Example", names=("URI:spiffe://example.com/readers/7",)
    )


@pytest.fixture(scope="module")
def stranger(authority: Authority) -> Certificate:
    return authority.issue("stranger", subject="/CN=stranger", names=())


def configure(file: Path, authority: Authority, rules: str) -> None:
    own = authority.directory / "server.pem"
    if not own.exists():
        authority.issue("server")
    file.write_text(
        f'[listen.tls]\ncert = "{own}"\nkey = "{own.with_suffix(".key")}"\n'
        f'client_ca = "{authority.own.certificate}"\n{rules}'
    )


def rest_of(wire: TlsWire) -> bytes:
    """Return the bytes that the server sends until it ends the connection properly."""
    data = b""
    while more := wire.socket.recv(65536):
        data += more
    return data


@pytest.fixture
def server(tmp_path: Path, authority: Authority) -> Iterator[ServerProcess]:
    file = tmp_path / "headrace.toml"
    configure(file, authority, RULES)
    with ServerProcess(tmp_path / "data", f"--config={file}") as process:
        yield process
        assert "Traceback" not in process.stderr, process.stderr


def test_an_unmodified_figg_client_has_the_grants_of_its_certificate(
    server: ServerProcess, authority: Authority, billing: Certificate, reader: Certificate
) -> None:
    with TlsWire(server, authority.trusted(billing)) as wire:
        wire.publish(b"orders/1", b"foo")
        with TlsWire(server, authority.trusted(reader)) as other:
            other.attach(b"orders/1", 0)
            assert [one.data for one in other.expect_data(1)] == [b"foo"]
        wire.send(figg.publish(b"payments", 1, b"foo"))
        assert b'no grant for publish of "payments"' in rest_of(wire)
    status, _ = ask(server.http, "GET", "/v1/topic?name=payments", authority.trusted(reader))
    assert status == 404, "nothing of it was stored"


@pytest.mark.parametrize("who", ["stranger", "nobody"])
def test_others_with_and_without_a_certificate_have_no_grants(
    server: ServerProcess, authority: Authority, stranger: Certificate, who: str
) -> None:
    context = authority.trusted(stranger if who == "stranger" else None)
    with TlsWire(server, context) as wire:
        wire.send(figg.publish(b"orders/1", 0, b"foo"))
        assert b'a token is needed for publish of "orders/1"' in rest_of(wire)
    assert ask(server.http, "GET", "/v1/topics", context)[0] == 401
    assert ask(server.http, "GET", "/healthz", context)[0] == 200


def test_wombat_and_http_know_the_certificate_too(
    server: ServerProcess, authority: Authority, billing: Certificate
) -> None:
    context = authority.trusted(billing)
    with TlsWombatWire(server, context) as wire:
        wire.send(wombat.publish("orders/1", 0, b"foo"))
        assert wire.expect(wombat.ACK).number == 0
    assert ask(server.http, "GET", "/v1/topic?name=orders/1", context)[0] == 200
    assert ask(server.http, "DELETE", "/v1/topic?name=orders/1", context)[0] == 403


async def test_the_sdk_and_commands_show_a_certificate(
    server: ServerProcess, authority: Authority, billing: Certificate, headrace_command: Any
) -> None:
    files = {
        "ca": str(authority.own.certificate),
        "cert": str(billing.certificate),
        "key": str(billing.key),
    }
    url = f"figgs://localhost:{server.figg[1]}"
    async with headrace.connect(url, **files) as client:
        await client.publish("orders/1", b"foo")
    given = [part for name, file in files.items() for part in (f"--{name}", file)]
    run = asyncio.to_thread(headrace_command, "publish", "orders/1", "bar", "--url", url, *given)
    done = await run
    assert done.returncode == 0, done.stderr


@pytest.fixture
def headrace_command(request: pytest.FixtureRequest) -> Callable[..., Any]:
    command: Callable[..., Any] = request.getfixturevalue("headrace")
    return command


def test_a_reload_ends_the_connections_whose_grants_have_changed(
    server: ServerProcess,
    authority: Authority,
    billing: Certificate,
    reader: Certificate,
    tmp_path: Path,
) -> None:
    with (
        TlsWire(server, authority.trusted(billing)) as changed,
        TlsWire(server, authority.trusted(reader)) as kept,
    ):
        changed.publish(b"orders/1", b"foo")
        kept.attach(b"orders/1", 0)
        kept.expect_data(1)
        configure(tmp_path / "headrace.toml", authority, RULES.replace("publish,", ""))
        server.signal(signal.SIGHUP)
        assert b"the credentials were revoked or changed" in rest_of(changed)
        assert kept.alive()
    wait_until(lambda: "SIGHUP: changed: access.certificate\n" in server.stderr, what="a line")
