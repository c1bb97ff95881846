"""What a connection answers the broker where its protocol has nothing to do. Elsewhere: deliveries."""

from headrace.broker.broker import BrokerSubscription


class QuietSink:
    """The optional part of the broker's `Sink`, and of the receiver of an `Output`."""

    __slots__ = ()

    def live(self, subscription: BrokerSubscription) -> None:
        """Do nothing: most protocols do not announce it."""

    def overtaken(self, subscription: BrokerSubscription) -> None:
        """Do nothing: frames carry their offset, so the peer sees which records are missing."""

    def wants_more(self, subscription: BrokerSubscription) -> bool:
        return True

    def pulled(self, subscription: BrokerSubscription) -> None:
        """Do nothing: most protocols need not know how far the log was read."""
