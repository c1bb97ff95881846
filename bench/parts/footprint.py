"""Footprint: memory of an idle connection and of an idle topic, and start-up time."""

from __future__ import annotations

import contextlib
import socket
import statistics
import struct
import time
from collections.abc import Callable

from bench.load import figg as load_figg
from bench.load import load
from bench.load import wombat as load_wombat
from bench.measure import Check, Part
from bench.options import Options
from bench.process import Headrace

NAME = "footprint"
CONNECTIONS, CONNECTIONS_WARM = 2000, 500
TOPICS, TOPIC_BATCHES = 10_000, 5  # the first batch is the warm-up, the others are measured
LOG_BYTES, LOG_BYTES_QUICK, LOG_TOPICS = 5_000_000_000, 500_000_000, 1000
FILL_S_MAX = 600.0
BURST_BYTES, BURST_S_MAX = 96 << 20, 5.0  # published just before the SIGKILL
JOURNAL_BYTES_PER_S = 64 << 20
RECORD_BYTES = 1024
ROUNDS_IN_FLIGHT = 8  # a round is one record for each topic


def run(options: Options, say: Callable[[str], None]) -> Part:
    part = Part(NAME, "footprint: memory when idle, start-up time")
    say("idle connections")
    _connections(part, options, "connection", 6, _figg_connection)
    say("idle WebSocket connections")
    _connections(part, options, "WebSocket connection", 24, _websocket)
    say("idle topics")
    _topics(part, options)
    _start_up(part, options, say)
    return part


def _connections(
    part: Part,
    options: Options,
    kind: str,
    kib_max: int,
    connect: Callable[[Headrace], socket.socket],
) -> None:
    with Headrace(options.dir) as server:
        server.start()
        warm = [connect(server) for _ in range(CONNECTIONS_WARM)]
        time.sleep(2)
        before = sum(server.memory_now())
        socks = [connect(server) for _ in range(CONNECTIONS)]
        time.sleep(2)
        each = (sum(server.memory_now()) - before) / CONNECTIONS / 1024
        for sock in warm + socks:
            sock.close()
    part.facts[f"{kind.replace(' ', '_').lower()}_kib"] = each
    claim = f"an idle {kind}, all processes"
    part.checks.append(Check(NAME, claim, each, kib_max, at_least=False, unit="KiB"))


def _figg_connection(server: Headrace) -> socket.socket:
    sock = load.connect(server.host, server.port)
    load_figg.ping(sock, 1)
    return sock


def _websocket(server: Headrace) -> socket.socket:
    sock = load_wombat.connect((server.host, server.ws_port))
    load_wombat.ping(sock, 1)
    return sock


def _topics(part: Part, options: Options) -> None:
    readings = []
    with Headrace(options.dir) as server:
        server.start()
        for batch in range(TOPIC_BATCHES):
            names = [b"idle/%d/%05d" % (batch, index) for index in range(TOPICS)]
            frames = load_figg.publish_frames(load.payloads(TOPICS), names)
            with load.connect(server.host, server.port) as sock:
                _publish_all(sock, b"".join(frames), TOPICS)
            server.settle()
            readings.append(server.memory_now())
        records = load_figg.topic_records((server.host, server.http_port), "idle/")
        assert sum(records.values()) == TOPICS * TOPIC_BATCHES, "a topic is missing"
    made = TOPICS * (TOPIC_BATCHES - 1)
    each = (sum(readings[-1]) - sum(readings[0])) / made / 1024
    main = (readings[-1][0] - readings[0][0]) / made / 1024
    part.notes.append(f"of an idle topic, the server process itself holds {main:.2f} KiB")
    part.facts["topic_kib"] = each
    part.facts["topic_main_kib"] = main
    part.facts["topic_memory_readings"] = readings
    part.checks.append(
        Check(NAME, "an idle topic, all processes", each, 1, at_least=False, unit="KiB")
    )


def _publish_all(sock: socket.socket, data: bytes, count: int) -> None:
    sock.sendall(data)
    _await_acks(sock, load_figg.FiggAcks(), count, time.monotonic() + 60)


def _start_up(part: Part, options: Options, say: Callable[[str], None]) -> None:
    log_bytes = LOG_BYTES_QUICK if options.quick else LOG_BYTES
    say("start-up of an empty server")
    new, empty = _starts_empty(options)
    clean: list[float] = []
    crashed: list[float] = []
    bursts: list[int] = []
    with Headrace(options.dir) as server:
        server.start()
        say(f"publishing {log_bytes / 1e9:g} GB to {LOG_TOPICS:,} topics")
        began = time.monotonic()
        published = _fill(server, log_bytes)
        fill_s = time.monotonic() - began
        stop_s = server.terminate()
        for _ in range(options.repeat):
            say("start-up after a clean stop")
            server.start()
            clean.append(server.start_s)
            server.terminate()
        for _ in range(options.repeat):
            say("start-up after SIGKILL")
            server.start()
            server.pause_children()  # so that the whole burst must be recovered
            bursts.append(_fill(server, BURST_BYTES, BURST_S_MAX))
            server.kill()
            server.start()
            crashed.append(server.start_s)
            server.terminate()
        server.start()
        found = load_figg.topic_records((server.host, server.http_port), "log/")
        stored = sum(found.values()) * (RECORD_BYTES + 4)
        expected = published + sum(bursts)
        assert stored >= expected, f"{stored} bytes of {expected} are there"
    part.facts |= {
        "start_new_s": new,
        "start_empty_s": empty,
        "start_clean_s": clean,
        "start_crashed_s": crashed,
        "journal_bytes_at_crash": bursts,
        "log_bytes": published,
        "fill_bytes_per_s": published / fill_s,
        "stop_s": stop_s,
    }
    base = statistics.median(empty)
    limit = 2 * base + 1
    part.notes.append(
        f"start-up: new directory {statistics.median(new):.2f} s, empty {base:.2f} s; "
        f"{published / 1e9:.2f} GB published at {published / fill_s / 1e6:.0f} MB/s; "
        f"{statistics.mean(bursts) / (1 << 20):.0f} MiB in the journal at the crash"
    )
    _start_check(part, f"start-up, {published / 1e9:.1f} GB, after a clean stop", clean, limit)
    allowed = limit + min(bursts) / JOURNAL_BYTES_PER_S
    _start_check(part, f"start-up, {published / 1e9:.1f} GB, after SIGKILL", crashed, allowed)


def _start_check(part: Part, claim: str, times: list[float], limit: float) -> None:
    spread = (min(times), max(times))
    value = statistics.median(times)
    part.checks.append(Check(NAME, claim, value, limit, at_least=False, unit="s", spread=spread))


def _starts_empty(options: Options) -> tuple[list[float], list[float]]:
    """Measure starts in a new directory, and again in the same one, which is still empty."""
    new: list[float] = []
    again: list[float] = []
    for _ in range(options.repeat):
        with Headrace(options.dir) as server:
            server.start()
            new.append(server.start_s)
            server.terminate()
            server.start()
            again.append(server.start_s)
            server.terminate()
    return new, again


def _fill(server: Headrace, size: int, seconds_max: float = FILL_S_MAX) -> int:
    """Publish about `size` bytes of log, one record per topic in turn, for at most `seconds_max`.

    Return the number of acknowledged bytes.
    """
    payload = load.payloads(1)[0].ljust(RECORD_BYTES, b".")
    names = [b"log/%04d" % index for index in range(LOG_TOPICS)]
    one = bytearray(b"".join(load_figg.publish_frames([payload] * LOG_TOPICS, names)))
    stride = len(one) // LOG_TOPICS
    number_at = 8 + 4 + len(names[0])
    pack_into = struct.Struct(">Q").pack_into
    acks = load_figg.FiggAcks()
    rounds = max(size // (LOG_TOPICS * (RECORD_BYTES + 4)), 1)
    deadline = time.monotonic() + seconds_max
    with load.connect(server.host, server.port) as sock, contextlib.suppress(TimeoutError):
        for turn in range(rounds):
            for index in range(LOG_TOPICS):
                pack_into(one, index * stride + number_at, turn * LOG_TOPICS + index)
            _await_acks(sock, acks, (turn - ROUNDS_IN_FLIGHT) * LOG_TOPICS, deadline)
            sock.sendall(one)
        _await_acks(sock, acks, rounds * LOG_TOPICS, deadline)
    return acks.acked * (RECORD_BYTES + 4)


def _await_acks(sock: socket.socket, acks: load_figg.FiggAcks, count: int, deadline: float) -> None:
    sock.settimeout(max(deadline - time.monotonic(), 0.01))
    while acks.acked < count:
        more = sock.recv(1 << 16)
        if not more:
            raise ConnectionError("the server closed the publisher's connection")
        acks.feed(more)
