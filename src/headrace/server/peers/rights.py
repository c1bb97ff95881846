"""The principal of one connection and its rights. Remembers the decisions about its topics.

Elsewhere: the decisions themselves (`server/access.py`), and refusals, which each protocol has of its own.
"""

from headrace.access.operations import Name, Operation
from headrace.access.principals import Kind, Principal
from headrace.log.store import Store
from headrace.server.access import Access

PUBLISHABLE_MAX = 10_000
"""Topics of one connection for which the decision of access control is remembered."""


class PeerRights:
    __slots__ = ("_access", "_store", "principal", "publishable")

    def __init__(self, access: Access, store: Store) -> None:
        self._access = access
        self._store = store
        self.principal = access.anonymous
        """Principal of the peer: by its handshake, its certificate, or a message that it sends later."""
        self.publishable: dict[str, bool] = {}
        """Topics that the peer may publish to; the value is True if the peer may also create the topic."""

    def identify(self, principal: Principal) -> None:
        self.principal = principal
        self.publishable.clear()

    @property
    def are_none(self) -> bool:
        """True if the peer may do nothing before it has shown its credentials."""
        access = self._access
        is_anonymous = self.principal.kind is Kind.ANONYMOUS
        return access.is_on and is_anonymous and not access.anonymous.grants

    def is_granted(self, operation: Operation, name: Name) -> bool:
        return self._access.decide(self.principal, operation, name)

    def may_publish(self, topic: str) -> bool:
        """Return True if the peer may publish to a topic now. Each topic is asked for once."""
        may_create = self.publishable.get(topic)
        if may_create is None:
            if not self.is_granted(Operation.PUBLISH, topic):
                return False
            if len(self.publishable) >= PUBLISHABLE_MAX:
                self.publishable.clear()
            may_create = self.is_granted(Operation.CREATE, topic)
            self.publishable[topic] = may_create
        return may_create or self._store.look(topic).exists
