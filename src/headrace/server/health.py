"""Whether the server takes publishes: what load balancers ask, on every HTTP listener."""

from headrace.log.store import Store


def health(store: Store) -> tuple[int, dict[str, str]]:
    """The status and body of an answer to `/healthz`."""
    reason = store.held_back
    return (503, {"status": reason}) if reason else (200, {"status": "ok"})
