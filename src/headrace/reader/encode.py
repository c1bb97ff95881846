"""Arrow batches → blocks of records for an upload. Work per row is done by Arrow and numpy.

A block is records of one topic, no more than an index run may hold; its format is `log/blocks.py`'s.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import PayloadTooLargeError
from headrace.log.blocks import encode_block_header
from headrace.log.index import RUN_BYTES_MAX, RUN_RECORDS_MAX
from headrace.model import PAYLOAD_BYTES_MAX, RECORD_HEADER_BYTES
from headrace.spark.sink_columns import SinkError, check_written_topic

_JOINED_ROWS = 8 * RUN_RECORDS_MAX
"""Rows that are made records at once: however large, they fit into one array of Arrow's."""


class EncodedBlock(NamedTuple):
    header: bytes
    records: memoryview


def encode_batch(
    topics: pa.Array | str, payloads: pa.Array, prefix: str = ""
) -> Iterator[EncodedBlock]:
    """The rows as blocks, in their order within each topic; all topics are of the name space `prefix`."""
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
    """Each topic with where its rows end, and the rows in that order."""
    encoded = topics.dictionary_encode()
    names = encoded.dictionary.to_pylist()
    if len(names) == 1:
        return [(names[0], len(payloads))], payloads
    numbers = encoded.indices.to_numpy(zero_copy_only=False)
    # Stable: rows of a topic stay in their order.
    order = np.argsort(numbers, kind="stable")
    ends = np.cumsum(np.bincount(numbers))
    return list(zip(names, ends.tolist(), strict=True)), payloads.take(pa.array(order))


def _blocks(
    groups: list[tuple[str, int]], payloads: pa.Array, prefix: str
) -> Iterator[EncodedBlock]:
    """All rows made records at once, and cut into blocks."""
    lengths = pc.binary_length(payloads).to_numpy(zero_copy_only=False)
    records = pc.binary_join_element_wise(_prefixes(lengths), payloads, b"")
    data = memoryview(records.buffers()[2])
    ends = np.cumsum(lengths.astype(np.int64) + RECORD_HEADER_BYTES)
    first = position = 0
    for topic, until in groups:
        _check(topic, prefix)
        while first < until:
            last = int(np.searchsorted(ends, position + RUN_BYTES_MAX, "right"))
            last = min(last, first + RUN_RECORDS_MAX, until)
            stop = int(ends[last - 1])
            some = data[position:stop]
            yield EncodedBlock(encode_block_header(topic, some, last - first), some)
            first, position = last, stop


_check = lru_cache(maxsize=10_000)(check_written_topic)


def _prefixes(lengths: npt.NDArray[np.int32]) -> pa.Array:
    """The size of each record as the four bytes before it."""
    packed = pa.py_buffer(lengths.astype(">u4").tobytes())
    offsets = np.arange(0, (len(lengths) + 1) * 4, 4, dtype=np.int32)
    return pa.BinaryArray.from_buffers(
        pa.binary(), len(lengths), [None, pa.py_buffer(offsets), packed]
    )
