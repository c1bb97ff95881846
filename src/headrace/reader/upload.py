"""Blocks of records → staged files on the server, and the decision that has them appended once. No Spark."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple

from headrace.spark.encode import EncodedBlock
from headrace.spark.http_client import HttpClient
from headrace.spark.options import Place
from headrace.spark.sink_columns import SinkError

STAGED_BYTES = 16 << 20
"""How much is gathered in memory before it is uploaded: rows may come slowly, uploads must not."""

COMMIT_RETRY_S = 120.0
"""How long a commit is tried again: a server that restarts goes on with it by itself."""


class Decided(NamedTuple):
    records: int
    """That were appended."""
    duplicate: bool
    """Whether the batch was written before, by someone else."""


def upload(place: Place, blocks: Iterable[EncodedBlock]) -> list[str]:
    """In a task: the blocks as staged files, in their order."""
    ids: list[str] = []
    uploading: Future[str] | None = None
    with (
        closing(HttpClient(place)) as client,
        # One at a time, while the next is gathered.
        ThreadPoolExecutor(1, "upload") as thread,
    ):
        for body in _bodies(blocks):
            if uploading is not None:
                ids.append(uploading.result())
            uploading = thread.submit(_upload, client, body)
        if uploading is not None:
            ids.append(uploading.result())
    return ids


def decide(place: Place, producer: str, number: int, ids: Sequence[str]) -> Decided:
    """In the driver: have staged files appended, in their order and once for this number."""
    body = {"producer": producer, "number": number, "staged": list(ids)}
    with closing(HttpClient(place, retry_s=COMMIT_RETRY_S)) as client:
        answer = client.json("POST", "/v1/batches", {}, body)
        asked_again = False
        while answer.get("pending"):
            # It is decided, and goes on whether or not anyone asks.
            answer = client.json("POST", "/v1/batches", {}, body)
            asked_again = True
    if answer.get("damaged"):
        raise SinkError(
            f"batch {number} of producer {producer!r} is written, but {answer['damaged']} parts of it "
            "were damaged on the server's disk and are lost: the server's log names them"
        )
    return Decided(answer["records"], answer["duplicate"] and not asked_again)


def _bodies(blocks: Iterable[EncodedBlock]) -> Iterator[bytes]:
    """What is sent at once."""
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
