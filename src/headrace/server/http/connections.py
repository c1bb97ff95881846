"""HTTP connections as the limits of peers count them: in total, of each address, and of each principal.

They are counted apart from the connections of other protocols, so that a server that is full of clients
still answers its operator. When there is no room, a connection gives way to another address, unless a request
with credentials is being answered on it (`server/peers/newcomers.py`). Elsewhere: the counts
(`server/peers/tally.py`), and limits of requests (`requests.py`, `limits.py`).
"""

from collections.abc import Callable

from headrace.access.principals import Kind, Principal
from headrace.server.peers.newcomers import GAVE_WAY, Newcomers
from headrace.server.peers.tally import Tally, Who

TURNED_AWAY_MAX = 100
"""Connections above a limit that may stay until they are answered. Further ones are closed at once."""
RETRY_S = 1
"""Seconds after which a client that was turned away may try again."""


class HttpConnections:
    """All connections of the HTTP listener."""

    def __init__(
        self,
        tally: Tally,
        at_once_max: Callable[[], int],
        refused: Callable[[str, str], None],
        newcomers: Newcomers,
    ) -> None:
        """`refused` is called with the name of a peer, and with the reason why it was turned away."""
        self.tally = tally
        self.newcomers = newcomers
        self.at_once_max = at_once_max
        """Return the largest number of connections that are accepted in one iteration of the loop."""
        self.refused = refused
        self.turned_away = 0
        """Connections above a limit that are open."""


class CountedConnection:
    """One connection. It belongs to the principal of its last request."""

    __slots__ = ("_abort", "_all", "_peer", "_who", "why_refused")

    def __init__(self, all_: HttpConnections, peer: str, abort: Callable[[], None]) -> None:
        """`abort` ends the connection at once."""
        self._all = all_
        self._abort = abort
        self._peer = peer
        self._who = Who.of_address(peer.rpartition(":")[0])
        self.why_refused = all_.tally.refusal(self._who)
        """Reason why the connection is above a limit, and not counted; empty if it is counted."""
        if self.why_refused:
            all_.turned_away += 1
            all_.refused(peer, self.why_refused)
        else:
            if all_.tally.total >= all_.newcomers.places_max():
                all_.newcomers.make_room(self._who.address)
            all_.tally.add(self._who)
            self.answered()

    def give_way(self) -> None:
        self._all.refused(self._peer, GAVE_WAY)
        self._abort()

    def answered(self) -> None:
        """Note that no request is being answered any more: the connection may give way."""
        if not self.why_refused:
            self._all.newcomers.add(self, self._who.address)

    @property
    def has_no_room(self) -> bool:
        """True if the connection is closed at once, because too many are above a limit."""
        return bool(self.why_refused) and self._all.turned_away > TURNED_AWAY_MAX

    def identify(self, principal: Principal) -> str:
        """Count the connection under the principal of a request. Return why not; empty if it is counted."""
        if self.why_refused:
            return self.why_refused
        after = self._who.as_principal(principal)
        if after != self._who:
            self._move(after)
            if why := self._all.tally.excess(after):
                # The connection is about to end, and takes no room of the others until then.
                self._move(Who(after.address))
                self._all.refused(self._peer, why)
                return why
        if principal.kind is not Kind.ANONYMOUS or principal.grants:
            self._all.newcomers.leave(self)
        return ""

    def end(self) -> None:
        if self.why_refused:
            self._all.turned_away -= 1
        else:
            self._all.newcomers.leave(self)
            self._all.tally.add(self._who, -1)

    def _move(self, after: Who) -> None:
        self._all.tally.move(self._who, after, 1)
        self._who = after


def turned_away(why: str) -> str:
    """Return the sentence for a client that is turned away."""
    return f"{why}: connect again in a while"
