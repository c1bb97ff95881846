"""The endpoint of tickets: credentials for one WebSocket of a page. Elsewhere: `server/tickets.py`."""

import asyncio

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace.access.principals import Kind
from headrace.server.access import Access
from headrace.server.http.gate import rights
from headrace.server.tickets import TICKET_S


class TicketsApi:
    def __init__(self, access: Access) -> None:
        self._access = access

    def routes(self) -> list[Route]:
        return [Route("/v1/tickets", self.issue, methods=["POST"])]

    async def issue(self, request: Request) -> Response:
        """Everyone with credentials may get a ticket, which stands for the same credentials."""
        principal = rights(request).themselves()
        if principal.kind is Kind.ANONYMOUS:
            raise HTTPException(401, "a token is needed: Authorization: Bearer TOKEN")
        ticket = self._access.issue_ticket(principal, asyncio.get_running_loop().time())
        if ticket is None:
            raise HTTPException(429, "there are too many tickets: use them, or wait until they end")
        body = {"ticket": ticket, "expires_in_s": TICKET_S}
        return JSONResponse(body, 201, headers={"Cache-Control": "no-store"})
