"""The limits of peers, as endpoints of the HTTP API apply them: an answer with status 429 and `Retry-After`.

Elsewhere: what is counted (`server/peers/tally.py`, `server/peers/throttle.py`), and limits of the requests
themselves (`requests.py`).
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from starlette.exceptions import HTTPException
from starlette.requests import Request

from headrace.server.http.gate import rights
from headrace.server.peers.connections import Connections
from headrace.server.peers.tally import Who
from headrace.server.peers.throttle import Cost

WAITING_RETRY_S = 1


class OverLimitError(HTTPException):
    """A request is over a limit. The same request may succeed later."""

    def __init__(self, error: str, retry_after_s: int) -> None:
        super().__init__(429, error, headers={"Retry-After": str(retry_after_s)})


class HttpLimits:
    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def charge(self, request: Request, records: int, size: int, topics: Collection[str]) -> None:
        """Charge a publish. Raises OverLimitError if it has to wait for a rate or a quota."""
        throttle = self._connections.throttle
        if not throttle.is_active:
            return
        retry_after_s = throttle.retry_after_s(who_of(request), Cost(records, size, topics))
        if retry_after_s:
            raise OverLimitError(
                f"a rate or a quota is reached: send this again in {retry_after_s} s", retry_after_s
            )

    def charge_topics(self, request: Request, topics: Collection[str]) -> OverLimitError | None:
        """Charge the topics that a batch makes. Return an error if it has to wait for their rate."""
        throttle = self._connections.throttle
        if not throttle.is_active:
            return None
        retry_after_s = throttle.retry_after_s(who_of(request), Cost(0, 0, topics), quotas=False)
        if not retry_after_s:
            return None
        text = f"the rate of new topics is reached: send this again in {retry_after_s} s"
        return OverLimitError(text, retry_after_s)

    def charge_more(self, request: Request, records: int, size: int) -> None:
        """Charge what has come already: later publishes have to wait for it."""
        if self._connections.throttle.is_active:
            self._connections.throttle.charge(who_of(request), Cost(records, size, ()))

    @contextmanager
    def waiting(self, request: Request) -> Iterator[None]:
        """Count a request that waits for news. Raises OverLimitError if too many wait."""
        who, tally = who_of(request), self._connections.waiting
        if why := tally.refusal(who):
            raise OverLimitError(f"{why}: ask again in a while", WAITING_RETRY_S)
        tally.add(who)
        try:
            yield
        finally:
            tally.add(who, -1)

    def why_not_created(self, names: Collection[str]) -> str:
        """Return the reason why these topics may not be created; empty if they may, or exist."""
        return self._connections.why_not_created(names)

    def promise(self, names: Collection[str]) -> Collection[str]:
        """Count topics that a batch creates later. Return those that `keep` is called with then."""
        return self._connections.promise(names)

    def keep(self, promised: Collection[str]) -> None:
        self._connections.keep(promised)


def who_of(request: Request) -> Who:
    """Return the keys that a request is counted under."""
    return Who.of(request.client.host if request.client else "", rights(request).principal)
