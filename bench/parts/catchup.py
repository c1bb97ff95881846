"""Catch-up: a subscriber reads a topic from its beginning, from disk, after a restart.

The CPU time per record is compared with that of live delivery, which the ingest part measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from bench.load import figg as load_figg
from bench.load import load
from bench.load.load import BLOCK
from bench.measure import Part, Run, measured, undisturbed
from bench.options import Options
from bench.parts.ingest import SYNCED, headrace
from bench.process import Headrace

NAME = "catchup"
CATCH_UP, LIVE = "headrace catch-up from disk", "headrace synced, live"


def run(options: Options, say: Callable[[str], None], ingest: Part | None = None) -> Part:
    part = Part(NAME, f"catch-up: {options.count:,} records of 128 B, applied to disk")
    for turn in range(options.repeat):
        if ingest is not None and turn < len(ingest.runs.get(SYNCED, [])):
            live = ingest.runs[SYNCED][turn]
            part.runs.setdefault(LIVE, []).append(live)
        else:
            say(f"{LIVE}, {turn + 1} of {options.repeat}")
            live = undisturbed(partial(headrace, LIVE, options, "synced"), options.retries)
            part.add(live)
        say(f"{CATCH_UP}, {turn + 1} of {options.repeat}")
        part.add(undisturbed(partial(_catch_up, options), options.retries))
    part.compare(
        "CPU per record against live delivery",
        CATCH_UP,
        LIVE,
        lambda run: run.cpu_us,
        0.8,
        at_least=False,
    )
    return part


def _catch_up(options: Options) -> Run:
    blocks = options.count // BLOCK
    with Headrace(options.dir) as server:
        server.start()
        publisher = load_figg.publisher(
            (server.host, server.port), load_figg.publish_stream(options.count)
        )
        load.pump(publisher, None, blocks)
        publisher.sock.close()
        stop_s = server.terminate()
        server.start()
        server.settle()
        result = Run(CATCH_UP, options.count, extra={"stop_s": stop_s, "start_s": server.start_s})
        expected = load_figg.data_stream(options.count)
        subscriber = load_figg.FiggSubscriber((server.host, server.port), expected, offset=0)
        with measured(server, result):
            began = time.perf_counter()
            subscriber.attach()
            while not subscriber.has(options.count):
                subscriber.readable()
            result.seconds = time.perf_counter() - began
        subscriber.verify(blocks)
        subscriber.close()
        return result
