"""Spread: synced records over 10,000 topics, 256 different ones in each block, no subscriber.

The topics exist before the measurement starts. Afterwards the stored records are counted per topic.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable

from bench.load import figg as load_figg
from bench.load import load
from bench.load import redis as load_redis
from bench.load.load import BLOCK, Publisher, Stream, VerificationError
from bench.measure import Part, Run, measured, percentile_ms, undisturbed
from bench.options import Options
from bench.process import Headrace, Redis, Server, missing

NAME = "spread"
TOPICS = 10_000
STRIDE = 7919  # coprime to TOPICS, so that a block's topics differ and are not neighbours
MAKING = -(-TOPICS // BLOCK) * BLOCK  # before the measurement: at least one per topic
SYNCED, ALWAYS = "headrace synced", "Redis Streams always"


def run(options: Options, say: Callable[[str], None]) -> Part:
    part = Part(NAME, f"spread: publish only, over {TOPICS:,} topics or keys, 64 × 256 in flight")
    redis = missing("redis-server")
    if redis:
        part.notes.append(redis)
    for turn in range(options.repeat):
        say(f"{SYNCED}, {turn + 1} of {options.repeat}")
        part.add(undisturbed(functools.partial(_headrace, options), options.retries))
        if not redis:
            say(f"{ALWAYS}, {turn + 1} of {options.repeat}")
            part.add(undisturbed(functools.partial(_redis, options), options.retries))
    part.compare(
        "rate against Redis always", SYNCED, ALWAYS, lambda run: run.rate, 1.0, at_least=True
    )
    return part


@functools.lru_cache(maxsize=1)
def names() -> tuple[bytes, ...]:
    return tuple(b"spread/%05d" % (index * STRIDE % TOPICS) for index in range(TOPICS))


@functools.lru_cache(maxsize=1)
def figg_stream(count: int) -> Stream:
    return load.blocks_of(load_figg.publish_frames(load.payloads(count), names()))


@functools.lru_cache(maxsize=1)
def redis_stream(count: int) -> Stream:
    return load.blocks_of(load_redis.xadd_frames(load.payloads(count), names()))


def _headrace(options: Options) -> Run:
    with Headrace(options.dir) as server:
        server.start()
        stream = figg_stream(MAKING + options.count)
        publisher = load_figg.publisher((server.host, server.port), stream)
        result = _measure(SYNCED, options, server, publisher)
        found = load_figg.topic_records((server.host, server.http_port), "spread/")
        _verify(options, found)
        return result


def _redis(options: Options) -> Run:
    with Redis(options.dir, "always") as server:
        server.start()
        address = (server.host, server.port)
        stream = redis_stream(MAKING + options.count)
        result = _measure(ALWAYS, options, server, load_redis.publisher(address, stream))
        lengths = load_redis.stream_lengths(address, names())
        found = dict(zip((name.decode() for name in names()), lengths, strict=True))
        _verify(options, found)
        return result


def _measure(label: str, options: Options, server: Server, publisher: Publisher) -> Run:
    result = Run(label, options.count)
    result.extra["making_s"] = load.pump(publisher, None, MAKING // BLOCK)
    server.settle()
    publisher.latencies_s.clear()
    with measured(server, result):
        result.seconds = load.pump(publisher, None, (MAKING + options.count) // BLOCK)
    result.ack_p50_ms = percentile_ms(publisher.latencies_s, 0.50)
    result.ack_p99_ms = percentile_ms(publisher.latencies_s, 0.99)
    publisher.sock.close()
    return result


def _verify(options: Options, found: dict[str, int]) -> None:
    total = MAKING + options.count
    expected = Counter(names()[index % TOPICS].decode() for index in range(total))
    if found != expected:
        wrong = sum(1 for name, records in expected.items() if found.get(name) != records)
        stored = sum(found.values())
        raise VerificationError(f"{stored} of {total} records, {wrong} topics are wrong")
