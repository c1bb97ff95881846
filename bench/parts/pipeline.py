"""Pipeline: an audit of the log against `cat`, which reads the same files and checks nothing.

The other jobs are in `pipeline_export.py`, `pipeline_growth.py`, `pipeline_aggregate.py` and
`pipeline_dedupe.py`.

The time is that of the whole job in a running Spark session: planning, starting tasks, the report. Files are
warm. Spark has one core, so rates are per core.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bench.load import figg as load_figg
from bench.load import load
from bench.load.load import BLOCK, TOPIC, VerificationError
from bench.measure import Check, Part, timed
from bench.options import Options
from bench.parts import pipeline_aggregate, pipeline_dedupe, pipeline_export, pipeline_growth
from bench.process import Headrace

if TYPE_CHECKING:
    from headrace.pipeline.audit.plan import AuditReport

NAME = "pipeline"
RECORDS = 2_000_000 // BLOCK * BLOCK
TIMES, TIMES_QUICK = 8, 2
RECORD_BYTES = 4 + 128
WARM_UPS = 3

AUDIT, CAT = "audit of the log", "cat of its segments"
GB_PER_S = 1.0


def run(options: Options, say: Callable[[str], None]) -> Part:
    from headrace.spark import session

    times = TIMES_QUICK if options.quick else TIMES
    records = RECORDS * times
    title = f"Pipeline: {records:,} records of 128 B, local[1], warm files"
    part = Part(NAME, title)
    with Headrace(options.dir, "written") as server:
        server.start()
        for turn in range(times):
            say(f"publishing, {turn + 1} of {times}")
            publisher = load_figg.publisher(
                (server.host, server.port), load_figg.publish_stream(RECORDS)
            )
            load.pump(publisher, None, RECORDS // BLOCK)
            publisher.sock.close()
        server.settle()
        data = server.dir / "data"
        spark = session("headrace-bench", master="local[1]")
        try:
            for turn in range(WARM_UPS):
                say(f"warming up, {turn + 1} of {WARM_UPS}")
                _cat(data)
                _verify(_audit(data), records)
            for turn in range(options.repeat):
                say(f"{AUDIT}, {turn + 1} of {options.repeat}")
                part.add(timed(CAT, records, lambda: _cat(data)))
                part.add(timed(AUDIT, records, lambda: _audit(data)))
        finally:
            spark.stop()
        _check(part)
        pipeline_export.measure(
            part, options, say, f"http://{server.host}:{server.http_port}", records
        )
    pipeline_growth.measure(part, options, say)
    pipeline_aggregate.measure(part, options, say)
    pipeline_dedupe.measure(part, options, say)
    return part


def _audit(data: Path) -> AuditReport:
    from headrace.pipeline.audit.job import audit

    return audit(data_dir=data)


def _verify(report: AuditReport, records: int) -> None:
    found = {topic.name: topic.records for topic in report.topics}
    if report.lost or found != {TOPIC.decode(): records}:
        raise VerificationError(f"the audit found {found}: {[*report.lines()][-1]}")


def _cat(data: Path) -> None:
    files = sorted(data.glob("segments/*/*.log"))
    subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True)


def _check(part: Part) -> None:
    def rates(label: str) -> list[float]:
        return sorted(run.rate * RECORD_BYTES / 1e9 for run in part.runs[label])

    ours, cats = rates(AUDIT), rates(CAT)
    part.checks.append(
        Check(
            NAME,
            f"{AUDIT}, one core",
            ours[len(ours) // 2],
            GB_PER_S,
            at_least=True,
            unit="GB/s",
            spread=(ours[0], ours[-1]),
        )
    )
    part.facts["cat_gb_per_s"] = cats
