"""Channels: messages of one processor to two others, against Redis Streams; and the memory of idle ones."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

from bench.load_channels import Channels, Side, Streams
from bench.measure import Check, Part, Run, measured, undisturbed
from bench.options import Options
from bench.process import Headrace, Redis, Server, missing

NAME = "channels"
CHANNELS = 1000
MESSAGES, WARM, WINDOW = 30_000, 5_000, 256
IDLE, IDLE_BATCHES = 20_000, 6  # the first batch is the warm-up, the others are measured
OURS, THEIRS = "headrace, synced", "Redis Streams, always"
SETTINGS = ("limits.topics_attached_max=1000000", "channels.ping_s=3600")


def run(options: Options, say: Callable[[str], None]) -> Part:
    part = Part(
        NAME, f"channels: {CHANNELS:,} with one sender and two receivers, {WINDOW} on the way"
    )
    part.notes.append("rate and CPU are per message: sent, delivered to both, acknowledged by both")
    messages = MESSAGES // 4 if options.quick else MESSAGES
    redis = missing("redis-server")
    if redis:
        part.notes.append(redis)
    for turn in range(options.repeat):
        say(f"{OURS}, {turn + 1} of {options.repeat}")
        part.add(undisturbed(partial(_headrace, options, messages), options.retries))
        if not redis:
            say(f"{THEIRS}, {turn + 1} of {options.repeat}")
            part.add(undisturbed(partial(_redis, options, messages), options.retries))
    part.compare(
        "messages per second against Redis Streams, appendfsync always",
        OURS,
        THEIRS,
        lambda one: one.rate,
        3,
        at_least=True,
    )
    say("idle channels")
    _idle(part, options)
    return part


def _headrace(options: Options, messages: int) -> Run:
    with Headrace(options.dir, settings=SETTINGS) as server:
        server.start()
        side = Channels((server.host, server.ws_port), CHANNELS)
        side.join(0, CHANNELS)
        result = _measure(OURS, server, side, messages)
        side.close()
        return result


def _redis(options: Options, messages: int) -> Run:
    with Redis(options.dir, "always") as server:
        server.start()
        side = Streams((server.host, server.port), CHANNELS)
        result = _measure(THEIRS, server, side, messages)
        side.close()
        return result


def _measure(label: str, server: Server, side: Side, messages: int) -> Run:
    side.run(WARM, WINDOW)
    server.settle()
    side.latencies_s.clear()
    result = Run(label, messages)
    with measured(server, result):
        result.seconds = side.run(messages, WINDOW)
    # From send to delivery, of both receivers.
    times = sorted(side.latencies_s)
    result.ack_p50_ms = statistics.median(times) * 1000
    result.ack_p99_ms = times[int(len(times) * 0.99)] * 1000
    return result


def _idle(part: Part, options: Options) -> None:
    """Of channels with three processors each, that have had one message, which both others have read."""
    readings = []
    each = IDLE // 4 if options.quick else IDLE
    with Headrace(options.dir, settings=SETTINGS) as server:
        server.start()
        side = Channels((server.host, server.ws_port), each * IDLE_BATCHES)
        for batch in range(IDLE_BATCHES):
            side.join(batch * each, (batch + 1) * each)
            side.run(each, WINDOW)
            server.settle()
            readings.append(sum(server.memory_now()))
        side.close()
    made = each * (IDLE_BATCHES - 1)
    kib = (readings[-1] - readings[0]) / made / 1024
    part.facts["idle_channel_kib"] = kib
    part.facts["idle_channel_memory_readings"] = readings
    claim = f"an idle channel of {each * IDLE_BATCHES:,}, all processes"
    part.checks.append(Check(NAME, claim, kib, 2, at_least=False, unit="KiB"))
