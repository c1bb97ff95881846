"""Channels: messages of one processor to two others, against Redis Streams; and memory of idle channels."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from bench.load.channels import Channels, Side, Streams
from bench.measure import Check, Part, Run, measured
from bench.options import Options
from bench.process import Headrace, Redis, Server, missing

Loads = Sequence[tuple[int, int]]

NAME = "channels"
MANY, FEW = 100_000, 1000
WARM = 5000
WINDOW, WIDE = 256, 4096
LOADS = {MANY: ((WINDOW, 20_000), (WIDE, 40_000)), FEW: ((WINDOW, 30_000),)}
"""For each number of channels: pairs of window (messages in flight) and number of messages.

With very many channels, each gets at most one message.
"""
IDLE, IDLE_BATCHES = 20_000, 6  # the first batch is the warm-up, the others are measured
OURS, THEIRS = "headrace, synced", "Redis Streams, always"
SETTINGS = ("limits.topics_attached_max=1000000", "channels.ping_s=3600")


def run(options: Options, say: Callable[[str], None]) -> Part:
    part = Part(NAME, "channels with one sender and two receivers, on three connections")
    part.notes.append("rate and CPU are per message: sent, delivered to both, acknowledged by both")
    part.notes.append("acknowledgement times are from a send to its delivery")
    redis = missing("redis-server")
    if redis:
        part.notes.append(redis)
    for channels, loads in LOADS.items():
        size = channels // 10 if options.quick else channels
        for turn in range(options.repeat):
            say(f"{size:,} channels, {OURS}, {turn + 1} of {options.repeat}")
            for one in _headrace(options, size, loads):
                part.add(one)
            if not redis:
                say(f"{size:,} channels, {THEIRS}, {turn + 1} of {options.repeat}")
                for one in _redis(options, size, loads):
                    part.add(one)
    size = MANY // 10 if options.quick else MANY
    part.compare(
        f"messages per second in {size:,} channels against Redis Streams, appendfsync always",
        _label(OURS, size, WINDOW),
        _label(THEIRS, size, WINDOW),
        lambda one: one.rate,
        3,
        at_least=True,
    )
    say("idle channels")
    _idle(part, options)
    return part


def _label(name: str, channels: int, window: int) -> str:
    return f"{name}: {channels:,}, {window:,} on the way"


def _headrace(options: Options, channels: int, loads: Loads) -> list[Run]:
    with Headrace(options.dir, settings=SETTINGS) as server:
        server.start()
        side = Channels((server.host, server.ws_port), channels)
        side.join(0, channels)
        return _measure(OURS, server, side, loads, options.quick)


def _redis(options: Options, channels: int, loads: Loads) -> list[Run]:
    with Redis(options.dir, "always") as server:
        server.start()
        side = Streams((server.host, server.port), channels)
        return _measure(THEIRS, server, side, loads, options.quick)


def _measure(name: str, server: Server, side: Side, loads: Loads, quick: bool) -> list[Run]:
    side.run(WARM // 10 if quick else WARM, WINDOW)
    results = []
    for window, messages in loads:
        server.settle()
        side.latencies_s.clear()
        result = Run(_label(name, side.channels, window), messages // 10 if quick else messages)
        with measured(server, result):
            result.seconds = side.run(result.messages, window)
        times = sorted(side.latencies_s)
        result.ack_p50_ms = statistics.median(times) * 1000
        result.ack_p99_ms = times[int(len(times) * 0.99)] * 1000
        results.append(result)
    side.close()
    return results


def _idle(part: Part, options: Options) -> None:
    """Measure the memory of idle channels.

    Each channel has three processors, and has had one message that both others have read.
    """
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
