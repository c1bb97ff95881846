"""`wombats://` and `loguxs://`: through a proxy that does TLS for the server, as a load balancer does."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest
import pytest_asyncio

import headrace
from headrace.client import Message
from tests.client.logux.peer import LoguxPeer
from tests.client.refusals import refused
from tests.client.tls import Certificate, tls_proxy
from tests.client.topics.wombat_peer import WombatPeer

Until = Callable[[Callable[[], object]], "asyncio.Future[None]"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return Certificate.make(tmp_path_factory.mktemp("tls"))


@pytest_asyncio.fixture
async def tls_port(certificate: Certificate, wombat_peer: WombatPeer) -> AsyncIterator[int]:
    async with tls_proxy(certificate, "127.0.0.1", wombat_peer.port) as tls_port:
        yield tls_port


async def test_it_publishes_and_subscribes(
    tls_port: int, wombat_peer: WombatPeer, certificate: Certificate
) -> None:
    url = f"wombats://localhost:{tls_port}"
    async with headrace.connect(url, ssl=certificate.trusted()) as client:
        subscription = client.subscribe("t", offset=0)
        for payload in (b"foo", b"bar"):
            client.publish_nowait("t", payload)
        await client.flush()
        assert [await anext(subscription) for _ in range(2)] == [
            Message("t", 7, b"foo", "1@7", epoch=1),
            Message("t", 14, b"bar", "1@14", epoch=1),
        ]
        assert client.latency_s is not None
    assert wombat_peer.paths == ["/v1/ws"]


async def test_megabytes_go_both_ways(tls_port: int, certificate: Certificate) -> None:
    url = f"wombats://localhost:{tls_port}/v1/ws"
    payloads = [b"%d" % number + bytes(100_000) for number in range(100)]
    async with headrace.connect(
        url, ssl=certificate.trusted(), receive_bytes_max=500_000, receive_pause_s=0.01
    ) as client:
        subscription = client.subscribe("t", offset=0)
        for payload in payloads:
            await client.window()
            client.publish_nowait("t", payload)
        await asyncio.wait_for(client.flush(), 30)
        async with asyncio.timeout(30):
            assert [(await anext(subscription)).payload for _ in payloads] == payloads


async def test_a_certificate_that_is_not_trusted_or_of_another_name_is_refused(
    tls_port: int, wombat_peer: WombatPeer, certificate: Certificate
) -> None:
    for host, context, reason in (
        (
            "localhost",
            None,
            f"the certificate of localhost:{tls_port} is from an unknown authority",
        ),
        ("127.0.0.1", certificate.trusted(), f"127.0.0.1:{tls_port} is for another host"),
    ):
        url = f"wombats://{host}:{tls_port}"
        dial = partial(headrace.connect, url, ssl=context)
        await refused(lambda timeout_s, dial=dial: dial(connect_timeout_s=timeout_s), reason)
    assert wombat_peer.paths == []


async def test_a_context_may_trust_anyone(tls_port: int) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    async with headrace.connect(f"wombats://127.0.0.1:{tls_port}", ssl=context) as client:
        await client.publish("t", b"foo")


async def test_a_server_without_tls_is_named(wombat_peer: WombatPeer) -> None:
    url = f"wombats://localhost:{wombat_peer.port}"
    await refused(
        lambda timeout_s: headrace.connect(url, connect_timeout_s=timeout_s),
        "the server closed the connection",
    )


async def test_it_goes_on_over_a_lost_connection(
    tls_port: int, wombat_peer: WombatPeer, certificate: Certificate, until: Until
) -> None:
    url = f"wombats://localhost:{tls_port}"
    async with headrace.connect(
        url, ssl=certificate.trusted(), backoff=lambda attempt: 0.01
    ) as client:
        await client.publish("t", b"foo")
        wombat_peer.drop()
        await until(lambda: client.last_error == "the server closed the connection")
        await asyncio.wait_for(client.publish("t", b"bar"), 30)
    assert wombat_peer.payloads("t") == [b"foo", b"bar"]


async def test_logux_goes_through_it_too(certificate: Certificate) -> None:
    async with LoguxPeer() as peer, tls_proxy(certificate, "127.0.0.1", peer.port) as tls_port:
        url = f"loguxs://localhost:{tls_port}"
        async with headrace.connect(url, store=None, ssl=certificate.trusted()) as log:
            server = await peer.greet()
            await log.add({"type": "a"})
            await server.hear("sync")
            await server.say("synced", 1)
            await asyncio.wait_for(log.synced(), 30)
