"""Arrow batches → blocks of records for an upload. Work per row is done by Arrow and numpy.

A block is records of one topic, no more than an index run may hold; its format is `log/blocks.py`'s.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headrace.errors import BadTopicNameError, PayloadTooLargeError
from headrace.log.blocks import encode_block
from headrace.log.index import RUN_BYTES_MAX, RUN_RECORDS_MAX
from headrace.model import PAYLOAD_BYTES_MAX, RECORD_HEADER_BYTES, check_publish_topic
from headrace.spark.sink_columns import SinkError

_JOINED_ROWS = 8 * RUN_RECORDS_MAX
"""Rows that are made records at once: however large, they fit into one array of Arrow's."""


def encode_batch(topics: pa.Array | str, payloads: pa.Array) -> Iterator[bytes]:
    """The rows as blocks, in their order within each topic."""
    if payloads.null_count:
        raise SinkError("a row has no payload: null cannot be written")
    if not len(payloads):
        return
    sizes = pc.binary_length(payloads)
    largest = pc.max(sizes).as_py()
    if largest > PAYLOAD_BYTES_MAX:
        raise PayloadTooLargeError(
            f"a row's payload has {largest} bytes, a record may have {PAYLOAD_BYTES_MAX}"
        )
    if isinstance(topics, str):
        yield from _blocks(topics, payloads, sizes)
        return
    if topics.null_count:
        raise SinkError("a row has no topic: null cannot be written to")
    names = pc.unique(topics)
    if len(names) == 1:
        yield from _blocks(names[0].as_py(), payloads, sizes)
        return
    # Stable: rows of a topic stay in their order.
    numbers = topics.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    order = np.argsort(numbers, kind="stable")
    ends = np.searchsorted(numbers[order], np.arange(len(names)), "right")
    payloads, sizes = payloads.take(pa.array(order)), sizes.take(pa.array(order))
    first = 0
    for name, end in zip(names.to_pylist(), ends.tolist(), strict=True):
        yield from _blocks(name, payloads[first:end], sizes[first:end])
        first = end


def _blocks(topic: str, payloads: pa.Array, sizes: pa.Array) -> Iterator[bytes]:
    try:
        check_publish_topic(topic)
    except BadTopicNameError as error:
        raise SinkError(str(error)) from None
    for first in range(0, len(payloads), _JOINED_ROWS):
        yield from _joined(
            topic, payloads.slice(first, _JOINED_ROWS), sizes.slice(first, _JOINED_ROWS)
        )


def _joined(topic: str, payloads: pa.Array, sizes: pa.Array) -> Iterator[bytes]:
    lengths = sizes.to_numpy(zero_copy_only=False)
    records = pc.binary_join_element_wise(_prefixes(lengths), payloads, b"")
    data = memoryview(records.buffers()[2]) if records.buffers()[2] is not None else memoryview(b"")
    ends = np.cumsum(lengths.astype(np.int64) + RECORD_HEADER_BYTES)
    begin = records.offset and int(np.frombuffer(records.buffers()[1], np.int32)[records.offset])
    first = position = 0
    while first < len(lengths):
        last = int(np.searchsorted(ends, position + RUN_BYTES_MAX, "right"))
        last = min(last, first + RUN_RECORDS_MAX)
        stop = int(ends[last - 1])
        yield encode_block(topic, bytes(data[begin + position : begin + stop]), last - first)
        first, position = last, stop


def _prefixes(lengths: npt.NDArray[np.int32]) -> pa.Array:
    """The size of each record as the four bytes before it."""
    packed = pa.py_buffer(lengths.astype(">u4").tobytes())
    offsets = np.arange(0, (len(lengths) + 1) * 4, 4, dtype=np.int32)
    return pa.BinaryArray.from_buffers(
        pa.binary(), len(lengths), [None, pa.py_buffer(offsets), packed]
    )
