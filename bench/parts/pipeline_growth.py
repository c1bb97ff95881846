"""Growth of an export's cost per record: with records, with topics, and with earlier batches of the lake.

The time is that of the whole job in a warm Spark session with `local[2]`, on the cores that the server uses
too.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path

from bench.load.load import VerificationError
from bench.measure import Part, timed, warm_up
from bench.options import Options
from bench.process import Headrace

RECORDS, RECORDS_QUICK, PAYLOAD_BYTES = 1_000_000, 100_000, 128
FEW, MANY = 10, 10_000
"""Numbers of topics."""
MORE = 10
"""Times as many records."""
BATCHES, BATCHES_QUICK = 1_000, 100
GROWTH_MAX = 1.25
WARM_UPS = 2
EARLY = "early"
"""Topic whose records are the earlier batches of a lake."""
PATTERN = f"{EARLY}|t/.*"
"""All topics but the audit trail, which says that a lake has taken over."""

_numbers = count()


def measure(part: Part, options: Options, say: Callable[[str], None]) -> None:
    from headrace.spark import session

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

        small = server(FEW, records)
        of_topics = {topics: server(topics, MORE * records) for topics in (FEW, MANY)}
        new = (root / f"new-{number}" for number in count())
        actions: dict[str, tuple[int, Callable[[], None]]] = {}

        def add(label: str, lakes: Iterator[Path], url: str, total: int, known: int = 0) -> None:
            actions[label] = total, partial(_export, lakes, url, total + batches - known)

        add(_of_topics(FEW), new, small, records)
        for topics, url in of_topics.items():
            add(_of_topics(topics, MORE), new, url, MORE * records)
        for number in (1, batches):
            say(f"lakes of {number:,} batches")
            lakes = _lakes(root / f"lake-{number}", small, number, options.repeat)
            add(_of_batches(number), iter(lakes), small, records, known=batches)
        spark = session("headrace-bench", master="local[2]")
        stack.callback(spark.stop)
        warm_up("growth", WARM_UPS, [actions[_of_topics(FEW)][1]], say)
        for turn in range(options.repeat):
            for label, (total, action) in actions.items():
                say(f"{label}, {turn + 1} of {options.repeat}")
                part.add(timed(label, total, action))
    check_growth(part, f"{MORE} × as many records", _of_topics(FEW, MORE), _of_topics(FEW))
    claim = f"{MANY:,} topics, against {FEW}"
    check_growth(part, claim, _of_topics(MANY, MORE), _of_topics(FEW, MORE))
    claim = f"after {batches:,} batches, against 1"
    check_growth(part, claim, _of_batches(batches), _of_batches(1))


def check_growth(
    part: Part, claim: str, large: str, small: str, job: str = "export", unit: str = "record"
) -> None:
    """Check that a record of the large case costs little more than one of the small case."""
    claim = f"{job}, time per {unit}: {claim}"
    seconds = lambda run: run.seconds / run.messages  # noqa: E731
    part.compare(claim, large, small, seconds, GROWTH_MAX, at_least=False)


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
    from headrace.pipeline.export.job import export

    lake = next(lakes)
    done = export(lake, pattern=PATTERN, url=url, take_over=True)
    if done.records != records:
        raise VerificationError(f"{lake}: {done.records:,} records instead of {records:,}")
