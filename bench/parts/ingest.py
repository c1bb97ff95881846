"""Ingest and deliver: one publisher and one subscriber, against peers with the same durability.

Messages are sent in blocks of 256, with at most 64 blocks unacknowledged. The measurement ends when the last
message is both acknowledged and delivered. Then every byte that the subscriber received is verified.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bench.load import figg as load_figg
from bench.load import load
from bench.load import nats as load_nats
from bench.load import redis as load_redis
from bench.load import tls as load_tls
from bench.load import wombat as load_wombat
from bench.load.load import BLOCK, Publisher
from bench.measure import Part, Run, measured, percentile_ms, undisturbed
from bench.options import Options
from bench.process import Headrace, Nats, Redis, Server, missing

NAME = "ingest"
SYNCED, WRITTEN, MIXED = "headrace synced", "headrace written", "headrace synced, 64–192 B"
WOMBAT = "headrace written, Wombat"
TLS = "headrace written, TLS"
ALWAYS, EVERYSEC = "Redis Streams always", "Redis Streams everysec"
JETSTREAM, CORE = "NATS JetStream file", "NATS core (no storage)"


def run(options: Options, say: Callable[[str], None]) -> Part:
    part = Part(NAME, "ingest and deliver: 1 publisher, 1 subscriber, 128 B, 64 × 256 in flight")
    redis, nats = missing("redis-server"), missing("nats-server")
    part.notes.extend(line for line in (redis, nats) if line)
    for turn in range(options.repeat):
        for label, measure in RUNS.items():
            if (redis and "Redis" in label) or (nats and "NATS" in label):
                continue
            say(f"{label}, {turn + 1} of {options.repeat}")
            part.add(undisturbed(partial(measure, label, options), options.retries))
    _check(part)
    return part


def headrace(label: str, options: Options, durability: str, mixed: bool = False) -> Run:
    total = options.warm + options.count
    with Headrace(options.dir, durability) as server:
        server.start()
        address = (server.host, server.port)
        subscriber = load_figg.FiggSubscriber(address, load_figg.data_stream(total, mixed))
        subscriber.attach()
        publisher = load_figg.publisher(address, load_figg.publish_stream(total, mixed))
        result = _measure(label, options, server, publisher, subscriber)
        subscriber.verify(total // BLOCK)
        return result


def _tls(label: str, options: Options) -> Run:
    total = options.warm + options.count
    certificate = load_tls.make_certificate(options.dir)
    connect = partial(load_tls.connect, certificate)
    with Headrace(options.dir, "written", certificate.settings) as server:
        server.start()
        address = (server.host, server.port)
        subscriber = load_figg.FiggSubscriber(
            address, load_figg.data_stream(total), connect=connect
        )
        subscriber.attach()
        publisher = load_figg.publisher(address, load_figg.publish_stream(total), connect)
        result = _measure(label, options, server, publisher, subscriber)
        subscriber.verify(total // BLOCK)
        return result


def _wombat(label: str, options: Options) -> Run:
    total = options.warm + options.count
    with Headrace(options.dir, "written") as server:
        server.start()
        address = (server.host, server.ws_port)
        subscriber = load_wombat.WombatSubscriber(address, load_wombat.payload_stream(total))
        subscriber.attach()
        publisher = load_wombat.publisher(address, load_wombat.publish_stream(total))
        result = _measure(label, options, server, publisher, subscriber)
        subscriber.verify(total // BLOCK)
        return result


def _redis(label: str, options: Options, fsync: str) -> Run:
    total = options.warm + options.count
    with Redis(options.dir, fsync) as server:
        server.start()
        address = (server.host, server.port)
        subscriber = load_redis.RedisSubscriber(address, total)
        publisher = load_redis.publisher(address, load_redis.publish_stream(total))
        result = _measure(label, options, server, publisher, subscriber)
        subscriber.verify(load.payloads(total))
        return result


def _nats(label: str, options: Options, jetstream: bool) -> Run:
    total = options.warm + options.count
    with Nats(options.dir) as server:
        server.start()
        address = (server.host, server.port)
        stream = load_nats.jetstream_stream if jetstream else load_nats.core_stream
        if jetstream:
            load_nats.make_stream(address)
        subscriber = load_nats.NatsSubscriber(address, total, jetstream)
        if jetstream:
            load_nats.make_consumer(address)
        publisher = load_nats.publisher(address, stream(total), jetstream)
        result = _measure(label, options, server, publisher, subscriber)
        subscriber.verify(load.payloads(total))
        return result


def _measure(
    label: str,
    options: Options,
    server: Server,
    publisher: Publisher,
    subscriber: load.Subscriber,
) -> Run:
    result = Run(label, options.count)
    load.pump(publisher, subscriber, options.warm // BLOCK)
    server.settle()
    publisher.latencies_s.clear()
    with measured(server, result):
        total = (options.warm + options.count) // BLOCK
        result.seconds = load.pump(publisher, subscriber, total)
    result.ack_p50_ms = percentile_ms(publisher.latencies_s, 0.50)
    result.ack_p99_ms = percentile_ms(publisher.latencies_s, 0.99)
    publisher.sock.close()
    subscriber.sock.close()
    return result


def _check(part: Part) -> None:
    def rate(run: Run) -> float:
        return run.rate

    def cpu(run: Run) -> float:
        return run.cpu_us

    part.compare("synced: rate against Redis always", SYNCED, ALWAYS, rate, 3.5, at_least=True)
    part.compare("synced: CPU against Redis always", SYNCED, ALWAYS, cpu, 0.6, at_least=False)
    part.compare("written: rate against Redis everysec", WRITTEN, EVERYSEC, rate, 2, at_least=True)
    part.compare("written: CPU against Redis everysec", WRITTEN, EVERYSEC, cpu, 0.8, at_least=False)
    part.compare(
        "Wombat: rate against Figg, both written", WOMBAT, WRITTEN, rate, 0.5, at_least=True
    )
    part.compare("written: rate against JetStream file", WRITTEN, JETSTREAM, rate, 5, at_least=True)


RUNS: dict[str, Callable[[str, Options], Run]] = {
    SYNCED: lambda label, options: headrace(label, options, "synced"),
    ALWAYS: lambda label, options: _redis(label, options, "always"),
    WRITTEN: lambda label, options: headrace(label, options, "written"),
    TLS: _tls,
    WOMBAT: _wombat,
    EVERYSEC: lambda label, options: _redis(label, options, "everysec"),
    JETSTREAM: lambda label, options: _nats(label, options, jetstream=True),
    CORE: lambda label, options: _nats(label, options, jetstream=False),
    MIXED: lambda label, options: headrace(label, options, "synced", mixed=True),
}
