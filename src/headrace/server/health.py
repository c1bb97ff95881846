"""Whether the server takes publishes: what load balancers ask, on every HTTP listener."""

from headrace.log.store import Store
from headrace.server.clock import SteadyClock


class Health:
    def __init__(self, store: Store, clock: SteadyClock) -> None:
        self._store = store
        self._clock = clock

    def answer(self) -> tuple[int, dict[str, str]]:
        """The status and body of an answer to `/healthz`."""
        reason = self._store.held_back
        body = {"status": reason or "ok"}
        if self._clock.trouble:
            body["clock"] = self._clock.trouble  # publishes are taken all the same
        return 503 if reason else 200, body
