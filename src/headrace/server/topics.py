"""What connections of Figg and Wombat do with topics: publish, attach, detach. Knows no bytes."""

from headrace.broker.subscription import Encode, Subscription
from headrace.errors import StoreFailedError
from headrace.server.connection import Connection
from headrace.session.server import Attach, Detach, Publish, TopicSession


class TopicConnection(Connection):
    __slots__ = ()
    _session: TopicSession
    encode: Encode
    """How records go out in this protocol."""

    def _do(self, command: object, size: int) -> None:
        if isinstance(command, Publish):
            self._publish(command, size)
        elif isinstance(command, Attach):
            self._attach(command)
        elif isinstance(command, Detach):
            self._detach(command.topic)

    def _publish(self, command: Publish, size: int) -> None:
        records, unit = command
        self._shared.metrics.count("records_published_total", sum(map(len, records.values())))
        try:
            self._shared.broker.publish(records, lambda: self._stored(unit, size))
        except StoreFailedError:
            # Nothing is stored any more: without an acknowledgement the peer sends it again elsewhere.
            self._transport.abort()
            return
        self._under_way(size)

    def _attach(self, command: Attach) -> None:
        if self._subscriptions is None:
            self._subscriptions = {}
        if command.topic in self._subscriptions:
            self._drop(command.topic)
        elif len(self._subscriptions) >= self._shared.limits.topics_attached_max:
            self._refuse(self._session.refuse("topics_attached_max is reached"))
            return
        broker = self._shared.broker
        self._shared.metrics.count("subscriptions_total")
        self._session.attaching(command)
        # The broker answers through `attached`, which needs to know whose answer it is.
        self._subscriptions[command.topic] = broker.subscribe(
            self, command.topic, command.offset, type(self).encode, command.epoch
        )

    def _detach(self, topic: str) -> None:
        if self._subscriptions and topic in self._subscriptions:
            self._drop(topic)
        self._session.detached(topic)

    def attached(self, subscription: Subscription, offset: int, exact: bool) -> None:
        topic = subscription.topic
        self._session.attached(topic.name, topic.epoch, offset, exact)
        self._answer()
