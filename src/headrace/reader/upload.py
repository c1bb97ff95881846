"""Upload of blocks as staged files, and the commit that makes the server append them once. No Spark."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple

from headrace.errors import SinkError
from headrace.reader.encode import EncodedBlock
from headrace.reader.http_client import HttpClient
from headrace.reader.selection import LogLocation

STAGED_BYTES = 16 << 20
"""Bytes collected in memory before an upload. Rows may arrive slowly, but uploads must be fast."""

COMMIT_RETRY_S = 120.0
"""Time for which a commit is retried. A server that restarts continues the commit by itself."""


class UploadDecision(NamedTuple):
    records: int
    """Number of records that were appended."""
    duplicate: bool
    """True if another attempt had already written the batch."""


def upload(place: LogLocation, blocks: Iterable[EncodedBlock]) -> list[str]:
    """Upload the blocks as staged files, in order, and return their ids. Runs in a task."""
    ids: list[str] = []
    uploading: Future[str] | None = None
    with (
        closing(HttpClient(place)) as client,
        # One upload runs at a time, while the next body is collected.
        ThreadPoolExecutor(1, "upload") as thread,
    ):
        for body in _bodies(blocks):
            if uploading is not None:
                ids.append(uploading.result())
            uploading = thread.submit(_upload, client, body)
        if uploading is not None:
            ids.append(uploading.result())
    return ids


def decide(place: LogLocation, producer: str, number: int, ids: Sequence[str]) -> UploadDecision:
    """Make the server append staged files, in order and once for this batch number. Runs in the driver."""
    body = {"producer": producer, "number": number, "staged": list(ids)}
    with closing(HttpClient(place, retry_s=COMMIT_RETRY_S)) as client:
        answer = client.json("POST", "/v1/batches", {}, body)
        asked_again = False
        while answer.get("pending"):
            # The batch is decided. The server continues even if no client asks.
            answer = client.json("POST", "/v1/batches", {}, body)
            asked_again = True
    if answer.get("damaged"):
        raise SinkError(
            f"batch {number} of producer {producer!r} is written, but {answer['damaged']} parts of it "
            "were damaged on the server's disk and are lost: the server's log names them"
        )
    return UploadDecision(answer["records"], answer["duplicate"] and not asked_again)


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


def _upload(client: HttpClient, body: bytes) -> str:
    answer: dict[str, str] = client.upload("/v1/staged", body)
    return answer["id"]
