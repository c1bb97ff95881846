"""`python -m bench`: runs the parts, prints a table for each, writes everything as JSON.

The exit code is 1 if a verification failed or a server could not be measured. A missed target is printed, but
it is not an error: the figures of a busy machine say little.
"""

from __future__ import annotations

import argparse
import functools
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from bench import process, table
from bench.load import figg as load_figg
from bench.load import load
from bench.load import nats as load_nats
from bench.load import redis as load_redis
from bench.measure import Part, machine
from bench.options import Options
from bench.parts import batches as part_batches
from bench.parts import catchup as part_catchup
from bench.parts import channels as part_channels
from bench.parts import fanout as part_fanout
from bench.parts import footprint as part_footprint
from bench.parts import ingest as part_ingest
from bench.parts import logux as part_logux
from bench.parts import pipeline as part_pipeline
from bench.parts import spark as part_spark
from bench.parts import spread as part_spread

HERE = Path(__file__).parent
PARTS = (
    part_ingest.NAME,
    part_catchup.NAME,
    part_fanout.NAME,
    part_spread.NAME,
    part_batches.NAME,
    part_footprint.NAME,
    part_logux.NAME,
    part_channels.NAME,
    part_spark.NAME,
    part_pipeline.NAME,
)
MESSAGES, MESSAGES_QUICK = 1_000_000, 200_000
REPEAT, REPEAT_QUICK = 3, 1
RETRIES = 2


def main() -> int:
    arguments = _arguments()
    quick = arguments.quick
    options = Options(
        dir=arguments.dir,
        messages=arguments.messages or (MESSAGES_QUICK if quick else MESSAGES),
        repeat=arguments.repeat or (REPEAT_QUICK if quick else REPEAT),
        quick=quick,
        retries=arguments.retries,
    )
    options.dir.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    out = table.console()
    facts = machine(options.dir)
    out.print(f"{facts['cpu']}, {facts['cores']} cores, {facts['file_system']}", highlight=False)
    parts: list[Part] = []
    failures: list[str] = []
    try:
        for name in arguments.only or PARTS:
            try:
                parts.append(_run(name, options, parts, out))
            except FAILURES as failure:
                failures.append(f"{name}: {type(failure).__name__}: {failure}")
                out.print(failures[-1], style="red", highlight=False, markup=False)
            finally:
                process.remove_all()
                _forget()
            _write(arguments.json, facts, options, parts, failures)
    except KeyboardInterrupt:
        out.print("interrupted", style="red")
        return 130
    finally:
        process.remove_all()
    table.print_summary(out, parts)
    out.print(f"written to {arguments.json}", highlight=False)
    return 1 if failures else 0


FAILURES = (
    process.ServerError,
    load.VerificationError,
    load.StallError,
    OSError,
    AssertionError,
)


def _run(name: str, options: Options, done: list[Part], out: Console) -> Part:
    with out.status("") as status:

        def say(text: str) -> None:
            status.update(f"{name}: {text}")
            if not out.is_terminal:
                out.print(f"{name}: {text}", style="dim", highlight=False)

        part = _part(name, done)(options, say)
    part.note_disturbances()
    table.print_part(out, part)
    return part


def _part(name: str, done: list[Part]) -> Callable[[Options, Callable[[str], None]], Part]:
    ingest = next((part for part in done if part.name == part_ingest.NAME), None)
    runs: dict[str, Callable[[Options, Callable[[str], None]], Part]] = {
        part_ingest.NAME: part_ingest.run,
        part_catchup.NAME: functools.partial(part_catchup.run, ingest=ingest),
        part_fanout.NAME: part_fanout.run,
        part_spread.NAME: part_spread.run,
        part_batches.NAME: part_batches.run,
        part_footprint.NAME: part_footprint.run,
        part_logux.NAME: part_logux.run,
        part_channels.NAME: part_channels.run,
        part_spark.NAME: part_spark.run,
        part_pipeline.NAME: part_pipeline.run,
    }
    return runs[name]


def _forget() -> None:
    """Free the encoded streams of a part; the next part makes its own."""
    for made in (
        load.payloads,
        load_figg.publish_stream,
        load_figg.data_stream,
        load_redis.publish_stream,
        load_nats.jetstream_stream,
        load_nats.core_stream,
        part_spread.figg_stream,
        part_spread.redis_stream,
    ):
        made.cache_clear()


def _write(
    path: Path,
    facts: dict[str, object],
    options: Options,
    parts: list[Part],
    failures: list[str],
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "machine": facts,
        "options": {
            "messages": options.count,
            "warm": options.warm,
            "repeat": options.repeat,
            "quick": options.quick,
        },
        "parts": [part.as_json() for part in parts],
        "failures": failures,
    }
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", action="append", choices=PARTS, help="run this part; may be repeated"
    )
    parser.add_argument("--quick", action="store_true", help="fewer messages, one repeat, 0.5 GB")
    parser.add_argument(
        "--json", type=Path, default=HERE / "results" / "latest.json", help="where to write to"
    )
    parser.add_argument("--messages", type=int, help=f"under the clock (default {MESSAGES:,})")
    parser.add_argument("--repeat", type=int, help=f"runs of each pair (default {REPEAT})")
    parser.add_argument(
        "--retries", type=int, default=RETRIES, help="of a run that other processes disturbed"
    )
    parser.add_argument(
        "--dir", type=Path, default=HERE / ".data", help="where the servers' data goes, a real disk"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
