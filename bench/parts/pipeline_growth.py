"""Growth of an export's cost per record: with topics, with earlier batches of the lake, and with records.

The time is that of the whole command with `local[2]`, including the start of Spark, on the cores that the
server uses too.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path

from bench.load.load import VerificationError
from bench.measure import Part, in_turns
from bench.options import Options
from bench.process import Headrace

RECORDS, RECORDS_QUICK, PAYLOAD_BYTES = 1_000_000, 100_000, 128
TOPICS = (10, 1_000, 10_000)
MORE = 10
"""Times as many records, from the fewest topics."""
BATCHES, BATCHES_QUICK = 1_000, 100
GROWTH_MAX = 1.25
FEW, MANY = TOPICS[0], TOPICS[-1]
EARLY = "early"
"""Topic whose records are the earlier batches of a lake."""

_numbers = count()


def measure(part: Part, options: Options, say: Callable[[str], None]) -> None:
    records = RECORDS_QUICK if options.quick else RECORDS
    batches = BATCHES_QUICK if options.quick else BATCHES
    root = options.dir / "growth"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, root, ignore_errors=True)

        def server(topics: int, total: int) -> str:
            say(f"{total:,} records of {topics:,} topics")
            one = stack.enter_context(Headrace(options.dir, "written"))
            one.start()
            url = f"http://{one.host}:{one.http_port}"
            _fill(url, {f"t/{number:05}": total // topics for number in range(topics)})
            _fill(url, {EARLY: batches})
            one.settle()
            return url

        urls = {topics: server(topics, records) for topics in TOPICS}
        large = server(FEW, MORE * records)
        new = (root / f"new-{number}" for number in count())
        actions: dict[str, Callable[[], object]] = {
            _of_topics(topics): partial(_export, new, url, records + batches)
            for topics, url in urls.items()
        }
        for number in (1, batches):
            say(f"lakes of {number:,} batches")
            lakes = _lakes(root / f"lake-{number}", urls[FEW], number, options.repeat)
            actions[_of_batches(number)] = partial(_export, iter(lakes), urls[FEW], records)
        for run in in_turns(options.repeat, records, actions, say):
            part.add(run)
        action = partial(_export, new, large, MORE * records + batches)
        for run in in_turns(options.repeat, MORE * records, {_of_topics(FEW, MORE): action}, say):
            part.add(run)

    def grows(claim: str, ours: str, theirs: str) -> None:
        claim = f"export, time per record: {claim}"
        seconds = lambda run: run.seconds / run.messages  # noqa: E731
        part.compare(claim, ours, theirs, seconds, GROWTH_MAX, at_least=False)

    grows(f"{MANY:,} topics, against {FEW}", _of_topics(MANY), _of_topics(FEW))
    grows(f"after {batches:,} batches, against 1", _of_batches(batches), _of_batches(1))
    grows(f"{MORE} × as many records", _of_topics(FEW, MORE), _of_topics(FEW))


def _of_topics(topics: int, times: int = 1) -> str:
    more = f", {times} × as many records" if times > 1 else ""
    return f"export of {topics:,} topics{more}"


def _of_batches(batches: int) -> str:
    return f"export of {FEW} topics after {batches:,} batches"


def _fill(url: str, topics: dict[str, int]) -> None:
    """Append records to topics, as one batch."""
    from headrace.reader.upload import EncodedBlock, decide, encode_batch, upload
    from headrace.reader.view import LogLocation

    def blocks() -> Iterator[EncodedBlock]:
        import numpy as np
        import pyarrow as pa

        chance = np.random.default_rng(7)
        for topic, records in topics.items():
            payloads = chance.bytes(records * PAYLOAD_BYTES)
            offsets = pa.py_buffer(np.arange(records + 1, dtype=np.int32) * PAYLOAD_BYTES)
            buffers = [None, offsets, pa.py_buffer(payloads)]
            yield from encode_batch(
                topic, pa.BinaryArray.from_buffers(pa.binary(), records, buffers)
            )

    place = LogLocation(urls=(url,))
    decide(place, "bench", next(_numbers), upload(place, blocks()))


def _lakes(first: Path, url: str, batches: int, copies: int) -> list[Path]:
    """Make equal lakes without Spark: each batch has one record, or the only batch has all."""
    from headrace.pipeline.export.job import export
    from headrace.pipeline.tasks import LocalRunner

    size = 1 if batches > 1 else 1 << 30
    done = export(first, [EARLY], url=url, batch_bytes=size, take_over=True, runner=LocalRunner())
    if done.batches != batches:
        raise VerificationError(f"{first} has {done.batches} batches instead of {batches}")
    others = [first.with_name(f"{first.name}-{number}") for number in range(1, copies)]
    for other in others:
        shutil.copytree(first, other)
    return [first, *others]


def _export(lakes: Iterator[Path], url: str, records: int) -> None:
    lake = next(lakes)
    command = [sys.executable, "-m", "headrace", "pipeline", "export", "--once", "--take-over"]
    command += ["--http", url.removeprefix("http://"), "--lake", str(lake), "--json"]
    done = subprocess.run(
        [*command, "--master", "local[2]"], stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(done.stdout)["records"]
    if found != records:
        raise VerificationError(f"{lake}: {found:,} records instead of {records:,}")
