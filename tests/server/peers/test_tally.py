"""Counts of what peers have open: the reasons for refusals. Elsewhere: limits of real connections."""

from headrace.config.settings import Limits, PeerLimits
from headrace.server.metrics.metrics import Metrics
from headrace.server.peers.tally import PeerRules, Tally, Who


def test_a_refusal_shows_no_control_characters_of_a_name() -> None:
    """The common name of a certificate may hold any characters, and a reason reaches logs and answers."""
    rules = PeerRules(Limits(peer=(PeerLimits(of="principal", connections_max=1),)))
    tally = Tally("connections_max", lambda: rules, lambda: 0, Metrics())
    who = Who("192.0.2.1", "cert:\x1b[31m\r\nSet-Cookie: forged\u202e")
    tally.add(who)
    assert tally.refusal(who).isprintable()
    tally.add(who)
    assert tally.excess(who).isprintable()
    plain = Who("192.0.2.1", "token:shipper")
    tally.add(plain)
    assert tally.refusal(plain) == "connections_max of token:shipper is reached"
