"""Staged uploads and batches over HTTP: `/v1/staged` and `/v1/batches`. Documented in `docs/http.md`.

Uploads are checked and written in threads, one piece at a time, while the next piece arrives.
"""

import asyncio
from collections.abc import Collection
from functools import partial
from typing import Annotated

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace.access.operations import Operation
from headrace.access.principals import Kind
from headrace.log.batch.staging import StagingUpload
from headrace.log.embedded import EmbeddedStore
from headrace.log.store import (
    BATCH_FILES_MAX,
    PRODUCER_BYTES_MAX,
    STAGED_FILE_BYTES_MAX,
    BatchAnswer,
    BatchRefusedError,
)
from headrace.server.access import asked_for
from headrace.server.http.gate import check, may, rights
from headrace.server.http.limits import HttpLimits
from headrace.server.http.requests import body, body_is_taken, check_length, too_long
from headrace.server.metrics.metrics import Metrics

BODY_SILENCE_S = 30.0
"""Longest time without data from a body that is being uploaded."""

UPLOADS_MAX = 64
"""Uploads that are read at the same time. Each takes a few MiB of memory. Further uploads wait."""

ANSWER_S = 10.0
"""Time that a request for a batch is held. A large batch takes longer: its client asks again meanwhile."""

BATCH_BODY_BYTES_MAX = 8 << 20

_PIECE_BYTES = 1 << 20
_IN_PARTS = ": send it in parts"
_STOPPING = "the server is stopping: ask again when it is back"

Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True):
    producer: str
    number: Number
    staged: Annotated[list[str], msgspec.Meta(max_length=BATCH_FILES_MAX)]


class _NotAllowedError(BatchRefusedError):
    """A batch has a topic that may not be written, or not be made. Nothing is decided."""

    def __init__(self, answer: HTTPException) -> None:
        super().__init__(answer.detail)
        self.answer = answer


class BatchesApi:
    def __init__(self, store: EmbeddedStore, metrics: Metrics, limits: HttpLimits) -> None:
        self._store = store
        self._limits = limits
        self._metrics = metrics
        self._slots = asyncio.Semaphore(UPLOADS_MAX)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/staged", self.stage, methods=["POST"]),
            Route("/v1/batches", self.decide, methods=["POST"]),
        ]

    async def stage(self, request: Request) -> Response:
        if not rights(request).has(Operation.BATCHES):
            raise HTTPException(403, "the credentials have no grant for batches of any producer")
        check_length(request, STAGED_FILE_BYTES_MAX, _IN_PARTS)
        self._limits.charge(request, 1, 1, ())
        async with self._slots:
            upload = self._store.staging.begin()
            try:
                await self._receive(request, upload)
            except BaseException as error:
                self._store.staging.drop(upload)
                if isinstance(error, OSError):
                    text = f"the upload cannot be written: {error.strerror}"
                    raise HTTPException(500, text) from None
                if isinstance(error, asyncio.CancelledError):
                    raise HTTPException(503, _STOPPING) from None
                raise
            finally:
                self._limits.charge_more(request, upload.records, upload.size)
            self._store.staging.keep(upload)
        return JSONResponse({"id": upload.id, "records": upload.records, "bytes": upload.size})

    async def _receive(self, request: Request, upload: StagingUpload) -> None:
        """Read the body. One piece is written while the next one arrives."""
        loop = asyncio.get_running_loop()
        writing: asyncio.Future[None] = loop.create_future()
        writing.set_result(None)
        gathered: list[bytes] = []
        size = 0
        try:
            more = True
            while more:
                chunk, more = await _next_chunk(request)
                self._store.staging.reserve(upload, len(chunk))
                if upload.size > STAGED_FILE_BYTES_MAX:
                    raise too_long(STAGED_FILE_BYTES_MAX, _IN_PARTS)
                gathered.append(chunk)
                size += len(chunk)
                if size >= _PIECE_BYTES or not more:
                    await writing
                    self._check_topics(request, upload)
                    writing = loop.run_in_executor(None, upload.feed, *gathered)
                    gathered, size = [], 0
            await writing
            self._check_topics(request, upload)
            writing = loop.run_in_executor(None, upload.finish)
            await writing
        finally:
            # The write may outlive a failed connection. No task awaits its result then.
            writing.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _check_topics(self, request: Request, upload: StagingUpload) -> None:
        for topic in upload.take_topics():
            missing = self._missing_right(request, topic)
            if missing is not None:
                check(request, missing, topic)

    def _judge(
        self, request: Request, promised: list[str], topics: Collection[str]
    ) -> BatchRefusedError | None:
        """Return the reason why a request may not write these topics. They may come from other requests.

        Adds the topics that the batch creates to `promised`.
        """
        for topic in topics:
            missing = self._missing_right(request, topic)
            if missing is not None:
                return _NotAllowedError(_forbidden(request, missing, topic))
        if why := self._limits.why_not_created(topics):
            text = f"{why}: the batch would make further topics; its uploads are kept"
            return _NotAllowedError(HTTPException(507, text))
        late = self._limits.charge_topics(request, topics)
        if late is not None:
            return _NotAllowedError(late)
        promised.extend(self._limits.promise(topics))
        return None

    def _missing_right(self, request: Request, topic: str) -> Operation | None:
        if not may(request, Operation.PUBLISH, topic):
            return Operation.PUBLISH
        if not self._store.look(topic).exists and not may(request, Operation.CREATE, topic):
            return Operation.CREATE
        return None

    async def decide(self, request: Request) -> Response:
        asked = _decode(await body(request, BATCH_BODY_BYTES_MAX))
        check(request, Operation.BATCHES, asked.producer)
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[BatchAnswer | BatchRefusedError | None] = loop.create_future()

        def answer(given: BatchAnswer | BatchRefusedError | None) -> None:
            if not answered.done():
                answered.set_result(given)

        promised: list[str] = []
        judge = partial(self._judge, request, promised)
        over = partial(self._limits.keep, promised)
        try:
            self._store.batches.decide(
                asked.producer, asked.number, asked.staged, answer, judge, over
            )
        except _NotAllowedError as error:
            raise error.answer from None
        named = {"producer": asked.producer, "number": asked.number}
        try:
            async with asyncio.timeout(ANSWER_S):
                given = await answered
        except TimeoutError:
            self._store.batches.withdraw(answer)
            return JSONResponse({**named, "pending": True}, 202)
        if given is None:
            raise HTTPException(503, _STOPPING)
        if isinstance(given, _NotAllowedError):
            raise given.answer
        if isinstance(given, BatchRefusedError):
            raise given
        if given.duplicate:
            self._metrics.count("duplicates_refused_total")
        return JSONResponse({**named, **given._asdict()})


def _forbidden(request: Request, missing: Operation, topic: str) -> HTTPException:
    """Return the answer to a peer that may not write a topic. Somebody else may have uploaded its name."""
    may_know = any(
        may(request, one, topic)
        for one in (Operation.PUBLISH, Operation.INSPECT, Operation.SUBSCRIBE)
    )
    named = asked_for(missing, topic) if may_know else f"{missing} of a topic of the batch"
    if rights(request).principal.kind is Kind.ANONYMOUS:
        return HTTPException(401, f"a token is needed for {named}; the uploads are kept")
    return HTTPException(403, f"the credentials have no grant for {named}; the uploads are kept")


def _decode(data: bytes) -> BatchRequest:
    try:
        asked = msgspec.json.decode(data, type=BatchRequest)
        size = len(asked.producer.encode())
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise HTTPException(400, f"the body is not a batch: {error}") from None
    if not 1 <= size <= PRODUCER_BYTES_MAX:
        raise HTTPException(
            400, f"a producer's name has 1 to {PRODUCER_BYTES_MAX} bytes of UTF-8, not {size}"
        )
    if len(set(asked.staged)) != len(asked.staged):
        raise HTTPException(400, "a staged file is named twice")
    return asked


async def _next_chunk(request: Request) -> tuple[bytes, bool]:
    """Return the next part of the body, and True if more follows."""
    try:
        async with asyncio.timeout(BODY_SILENCE_S):
            message = await request.receive()
    except TimeoutError:
        raise HTTPException(408, f"nothing of the body came for {BODY_SILENCE_S:g} s") from None
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    body_is_taken(request.scope)  # the chunk goes to disk
    return message.get("body", b""), message.get("more_body", False)
