"""Writes to a server's log: rows become blocks of records, are uploaded, and are appended once by a commit.

A block holds records of one topic, at most as many as an index run may hold. `log/batch/blocks.py` defines
the format. Arrow and numpy do the work per row. Nothing here knows Spark.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import BadTopicNameError, PayloadTooLargeError, SinkError
from headrace.log.batch.blocks import encode_block_header
from headrace.log.read.index import RUN_BYTES_MAX, RUN_RECORDS_MAX
from headrace.model import (
    CHANNEL_PREFIX,
    LOGUX_PREFIX,
    PAYLOAD_BYTES_MAX,
    RECORD_HEADER_BYTES,
    check_publish_topic,
    check_upload_topic,
)
from headrace.reader.http_client import HttpClient
from headrace.reader.view import LogLocation

_JOINED_ROWS = 8 * RUN_RECORDS_MAX
"""Number of rows that are encoded at once. Even rows of maximum size fit into one Arrow array."""


class EncodedBlock(NamedTuple):
    header: bytes
    records: memoryview


def encode_batch(
    topics: pa.Array | str, payloads: pa.Array, prefix: str = ""
) -> Iterator[EncodedBlock]:
    """Yield the rows as blocks and keep their order within each topic.

    All topics must belong to the name space `prefix`.
    """
    if payloads.null_count:
        raise SinkError("a row has no payload: null cannot be written")
    if not len(payloads):
        return
    largest = pc.max(pc.binary_length(payloads)).as_py()
    if largest > PAYLOAD_BYTES_MAX:
        raise PayloadTooLargeError(
            f"a row's payload has {largest} bytes, a record may have {PAYLOAD_BYTES_MAX}"
        )
    if not isinstance(topics, str) and topics.null_count:
        raise SinkError("a row has no topic: null cannot be written to")
    for first in range(0, len(payloads), _JOINED_ROWS):
        some = payloads.slice(first, _JOINED_ROWS)
        if isinstance(topics, str):
            groups = [(topics, len(some))]
        else:
            groups, some = _by_topic(topics.slice(first, _JOINED_ROWS), some)
        yield from _blocks(groups, some, prefix)


def _by_topic(topics: pa.Array, payloads: pa.Array) -> tuple[list[tuple[str, int]], pa.Array]:
    """Return each topic with the index where its rows end, and the payloads sorted by topic."""
    encoded = topics.dictionary_encode()
    names = encoded.dictionary.to_pylist()
    if len(names) == 1:
        return [(names[0], len(payloads))], payloads
    numbers = encoded.indices.to_numpy(zero_copy_only=False)
    # The sort is stable, so the rows of a topic keep their order.
    order = np.argsort(numbers, kind="stable")
    ends = np.cumsum(np.bincount(numbers))
    return list(zip(names, ends.tolist(), strict=True)), payloads.take(pa.array(order))


def _blocks(
    groups: list[tuple[str, int]], payloads: pa.Array, prefix: str
) -> Iterator[EncodedBlock]:
    """Encode all rows as records at once and cut them into blocks."""
    lengths = pc.binary_length(payloads).to_numpy(zero_copy_only=False)
    records = pc.binary_join_element_wise(_prefixes(lengths), payloads, b"")
    data = memoryview(records.buffers()[2])
    ends = np.cumsum(lengths.astype(np.int64) + RECORD_HEADER_BYTES)
    first = position = 0
    for topic, until in groups:
        _check_once(topic, prefix)
        while first < until:
            last = int(np.searchsorted(ends, position + RUN_BYTES_MAX, "right"))
            last = min(last, first + RUN_RECORDS_MAX, until)
            stop = int(ends[last - 1])
            some = data[position:stop]
            yield EncodedBlock(encode_block_header(topic, some, last - first), some)
            first, position = last, stop


def check_written_topic(topic: str, prefix: str) -> None:
    """Raise SinkError if rows of the envelope with this prefix (empty: none) cannot be written to `topic`."""
    try:
        if prefix and topic.startswith(prefix):
            check_upload_topic(topic, (prefix,))
        elif prefix:
            raise SinkError(
                f"this encode writes to topics that begin with {prefix!r}, not to {topic!r}"
            )
        elif topic.startswith(LOGUX_PREFIX):
            raise SinkError(
                f"topic {topic!r} is a log of Logux: give encode = logux to write events to it"
            )
        elif topic.startswith(CHANNEL_PREFIX):
            raise SinkError(
                f"topic {topic!r} is a channel: give encode = channel to write messages to it"
            )
        else:
            check_publish_topic(topic)
    except BadTopicNameError as error:
        raise SinkError(str(error)) from None


_check_once = lru_cache(maxsize=10_000)(check_written_topic)


def _prefixes(lengths: npt.NDArray[np.int32]) -> pa.Array:
    """Return the size field of each record: the four bytes before its payload."""
    sizes = pa.py_buffer(lengths.astype(">u4"))
    array = pa.FixedSizeBinaryArray.from_buffers(pa.binary(4), len(lengths), [None, sizes])
    return array.cast(pa.binary())


# Uploads

STAGED_BYTES = 16 << 20
"""Bytes collected in memory before an upload. Rows may arrive slowly, but uploads must be fast."""

COMMIT_RETRY_S = 120.0
"""Time for which a commit is retried. A server that restarts continues the commit by itself."""


def upload(place: LogLocation, blocks: Iterable[EncodedBlock]) -> list[str]:
    """Upload the blocks as staged files, in order, and return their ids. Runs in a task."""
    ids: list[str] = []
    uploading: Future[dict[str, str]] | None = None
    with (
        closing(HttpClient(place)) as client,
        # One upload runs at a time, while the next body is collected.
        ThreadPoolExecutor(1, "upload") as thread,
    ):
        for body in _bodies(blocks):
            if uploading is not None:
                ids.append(uploading.result()["id"])
            uploading = thread.submit(client.json, "POST", "/v1/staged", {}, body)
        if uploading is not None:
            ids.append(uploading.result()["id"])
    return ids


def decide(place: LogLocation, producer: str, number: int, ids: Sequence[str]) -> bool:
    """Make the server append staged files, in order and once for this batch number. Runs in the driver.

    Return True if another attempt had already written the batch.
    """
    body = {"producer": producer, "number": number, "staged": list(ids)}
    with closing(HttpClient(place, retry_s=COMMIT_RETRY_S)) as client:
        asked_again = False
        while (answer := client.json("POST", "/v1/batches", {}, body)).get("pending"):
            asked_again = True  # the batch is decided: the server continues even if no client asks
    if answer.get("damaged"):
        raise SinkError(
            f"batch {number} of producer {producer!r} is written, but {answer['damaged']} parts of it "
            "were damaged on the server's disk and are lost: the server's log names them"
        )
    return bool(answer["duplicate"]) and not asked_again


def _bodies(blocks: Iterable[EncodedBlock]) -> Iterator[bytes]:
    """Join blocks into request bodies of about STAGED_BYTES."""
    gathered: list[bytes | memoryview] = []
    size = 0
    for block in blocks:
        gathered += block
        size += sum(map(len, block))
        if size >= STAGED_BYTES:
            yield b"".join(gathered)
            gathered, size = [], 0
    if gathered:
        yield b"".join(gathered)
