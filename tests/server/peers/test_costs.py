"""What the commands of a connection cost at rates and quotas. Elsewhere: the limits (`test_throttle.py`)."""

from headrace.server.logux.connection import LoguxConnection
from headrace.session.logux.server5 import Subscribe
from tests.session.logux.test_server5 import Peer


def test_a_reader_of_logux_waits_for_no_quota() -> None:
    """Its requests come in the same messages as events, and wait only behind events of its own."""
    connection = LoguxConnection.__new__(LoguxConnection)
    connection.topic = "$logux/main"
    peer = Peer()
    peer.connect()
    asked = [{"type": "logux/subscribe", "channel": "a"}, {"id": 1, "time": 1}]
    commands = peer.say("sync", 1, *asked)
    assert any(isinstance(one, Subscribe) for one in commands)
    assert [connection._cost(one, 100) for one in commands] == [None] * len(commands)
    [added] = peer.say("sync", 2, {"type": "add"}, {"id": 2, "time": 2})
    cost = connection._cost(added, 100)
    assert cost is not None and (cost.records, cost.topics) == (1, ("$logux/main",))
