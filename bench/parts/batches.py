"""Batches: records are staged over HTTP in four uploads, then appended as one batch."""

from __future__ import annotations

import http.client
import json
import statistics
import struct
import time
from collections.abc import Callable
from functools import cache
from itertools import count

from bench.load import figg as load_figg
from bench.load import load
from bench.measure import Check, Part, Run, measured
from bench.options import Options
from bench.process import Headrace
from headrace.log.batch.blocks import encode_block

NAME = "batches"
RECORDS, RECORDS_QUICK, RECORD_BYTES = 2_000_000, 400_000, 132
UPLOADS, BLOCK_RECORDS = 4, 500
STAGED, APPENDED = "headrace staged", "headrace appended as a batch"
MB_PER_S_MIN = 200.0

_numbers = count()


def run(options: Options, say: Callable[[str], None]) -> Part:
    records = RECORDS_QUICK if options.quick else RECORDS
    part = Part(NAME, f"batches: {records:,} records of 128 B in {UPLOADS} uploads")
    bodies = _bodies(records)
    with Headrace(options.dir) as server:
        server.start()
        for turn in range(options.repeat + 1):
            say(f"{turn} of {options.repeat}")
            runs = _stage_and_append(server, records, bodies)
            if turn:  # the first turn fills the caches
                for one in runs:
                    part.add(one)
        found = load_figg.topic_records((server.host, server.http_port), "batch/")
        assert sum(found.values()) == records * (options.repeat + 1), "records are missing"
    for label, found_runs in part.runs.items():
        rates = [one.rate * RECORD_BYTES / 1e6 for one in found_runs]
        spread = (min(rates), max(rates))
        middle = statistics.median(rates)
        claim = f"{label}, with record headers"
        part.checks.append(
            Check(NAME, claim, middle, MB_PER_S_MIN, at_least=True, unit="MB/s", spread=spread)
        )
    return part


def _stage_and_append(server: Headrace, records: int, bodies: list[bytes]) -> tuple[Run, Run]:
    staged, appended = Run(STAGED, records), Run(APPENDED, records)
    with measured(server, staged):
        began = time.perf_counter()
        ids = [_post(server, "/v1/staged", body)["id"] for body in bodies]
        staged.seconds = time.perf_counter() - began
    asked = {"producer": "bench", "number": next(_numbers), "staged": ids}
    with measured(server, appended):
        began = time.perf_counter()
        answer = _post(server, "/v1/batches", json.dumps(asked).encode())
        appended.seconds = time.perf_counter() - began
    assert answer["records"] == records, answer
    return staged, appended


def _post(server: Headrace, path: str, body: bytes) -> dict[str, object]:
    connection = http.client.HTTPConnection(server.host, server.http_port, timeout=60)
    try:
        connection.request("POST", path, body)
        response = connection.getresponse()
        answer: dict[str, object] = json.loads(response.read())
        assert response.status == 200, answer
        return answer
    finally:
        connection.close()


@cache
def _bodies(records: int) -> list[bytes]:
    payloads = load.payloads(records)
    size = struct.Struct(">I")
    each = records // UPLOADS
    return [
        b"".join(
            encode_block(
                f"batch/{upload}",
                b"".join(size.pack(len(p)) + p for p in payloads[at : at + BLOCK_RECORDS]),
                BLOCK_RECORDS,
            )
            for at in range(upload * each, (upload + 1) * each, BLOCK_RECORDS)
        )
        for upload in range(UPLOADS)
    ]
