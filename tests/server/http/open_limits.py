"""Limits for endpoints that are tested without a server: only requests that wait are limited."""

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

from headrace.config.settings import Limits, PeerLimits
from headrace.server.http.connections import HttpConnections
from headrace.server.http.limits import HttpLimits
from headrace.server.metrics.metrics import Metrics
from headrace.server.peers.tally import PeerRules, Tally
from tests.fakes.places import Places


def open_limits(waiting_max: int = 1000) -> HttpLimits:
    def why_not_created(names: Collection[str]) -> str:
        return ""

    rules = PeerRules(Limits())
    tally = Tally("waiting_max", lambda: rules, lambda: waiting_max, Metrics())
    connections: Any = SimpleNamespace(
        throttle=SimpleNamespace(is_active=False),
        waiting=tally,
        why_not_created=why_not_created,
        promise=lambda names: (),
        keep=lambda promised: None,
    )
    return HttpLimits(connections)


def open_connections(
    connections_max: int = 100,
    peers: tuple[PeerLimits, ...] = (),
    turned_away: list[str] | None = None,
    places: Places | None = None,
) -> HttpConnections:
    """Return counts of connections, which note the reasons of those that are turned away."""
    noted = [] if turned_away is None else turned_away
    rules = PeerRules(Limits(peer=peers))
    newcomers = (places or Places(connections_max)).newcomers
    tally = Tally(
        "connections_max", lambda: rules, lambda: connections_max, Metrics(), newcomers.has_room
    )
    return HttpConnections(tally, lambda: 32, lambda peer, why: noted.append(why), newcomers)
