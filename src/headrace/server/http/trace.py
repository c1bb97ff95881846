"""The endpoint of traces: lines of JSON for as long as the reader stays."""

from collections.abc import AsyncIterator

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from headrace.access.operations import Operation
from headrace.server.http.gate import check_server, record
from headrace.server.trace.tracing import TRACES_MAX, Filter, Trace, Tracing

_LINES = "application/x-ndjson"


class TraceApi:
    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def routes(self) -> list[Route]:
        return [Route("/v1/trace", self.trace, methods=["GET"])]

    async def trace(self, request: Request) -> Response:
        check_server(request, Operation.ADMIN)  # a trace shows messages of every peer
        query = request.query_params
        topic, peer = query.get("topic"), query.get("peer")
        if not topic and not peer:
            raise HTTPException(400, "name whom to follow: ?topic=NAME or ?peer=NAME")
        payloads = query.get("payloads", "false")
        if payloads not in ("true", "false"):
            raise HTTPException(400, "payloads must be true or false")
        if self._tracing.is_full:
            raise HTTPException(
                503, f"{TRACES_MAX} traces are running already, or the server stops"
            )
        wanted = Filter(topic or None, peer or None, payloads=payloads == "true")
        record(request, "trace.begin", topic=topic, peer=peer, payloads=wanted.payloads)
        return StreamingResponse(self._stream(wanted), media_type=_LINES)

    async def _stream(self, wanted: Filter) -> AsyncIterator[bytes]:
        trace: Trace = self._tracing.begin(wanted)
        try:
            # The reader knows by this line that it misses nothing from now on.
            trace.put({"kind": "trace"})
            async for lines in trace.lines():
                yield lines
        finally:
            self._tracing.end(trace)
