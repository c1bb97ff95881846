"""Records that wait for room in the transport of one connection. Decides how much is written when.

Live records wait in a queue. Of a subscription that resumes only the name waits: its records are read from
the log once there is room. So a bounded amount of records is ahead of an answer. Elsewhere: answers, which
are written at once (`connection.py`).
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from headrace.broker.broker import BrokerSubscription, Slice, SubscriptionState
from headrace.server.peers.connections import Connections

_PUMP_BYTES = 1 << 20
_PUMP_ITEMS = 500
_PUMP_S = 0.005
"""Bytes, items and time that are spent on one connection before the others have their turn."""


class Receiver(Protocol):
    """The part of a connection that is known here."""

    def write(self, data: bytes) -> None: ...

    def wants_more(self, subscription: BrokerSubscription) -> bool:
        """False if the subscription has to wait until `ready` is called for it."""

    def pulled(self, subscription: BrokerSubscription) -> None:
        """Called when the data up to the subscription's position was pulled and is about to be written."""


class Output:
    __slots__ = (
        "_is_scheduled",
        "_pulling",
        "_queue",
        "_queued_bytes",
        "_receiver",
        "_shared",
        "is_writable",
    )

    def __init__(self, shared: Connections, receiver: Receiver) -> None:
        self._shared = shared
        self._receiver: Receiver | None = receiver
        """None after `close`, so that a lost connection and its output do not keep each other in memory."""
        self._queue: deque[tuple[BrokerSubscription, bytes]] | None = None
        self._queued_bytes = 0
        self._pulling: dict[BrokerSubscription, None] | None = None
        """Subscriptions with records to read from the log."""
        self._is_scheduled = False
        """True if `_pump` is scheduled."""
        self.is_writable = True
        """True while the transport has room."""

    def deliver(self, subscription: BrokerSubscription, slices: Sequence[Slice]) -> bool:
        """Write or queue live records. Return False if there is no room for more."""
        receiver = self._receiver
        if receiver is None:
            return False
        for piece in slices:
            if self.is_writable and not self._queue:
                receiver.write(piece.data)
            else:
                if not self._shared.has_room_for_output(self._queued_bytes):
                    return False
                if self._queue is None:
                    self._queue = deque()
                self._queue.append((subscription, piece.data))
                self._queued_bytes += len(piece.data)
                self._shared.output_bytes += len(piece.data)
            subscription.offset, subscription.ordinal = piece.end, piece.end_ordinal
        return True

    def ready(self, subscription: BrokerSubscription) -> None:
        """Read records of the subscription from the log when there is room."""
        if self._pulling is None:
            self._pulling = {}
        self._pulling[subscription] = None
        self._pump_soon()

    def forget(self, subscription: BrokerSubscription) -> None:
        """Read no further records of the subscription. Its queued records are skipped if it is closed."""
        if self._pulling:
            self._pulling.pop(subscription, None)

    def pause(self) -> None:
        """Write nothing until `resume`: the transport is full."""
        self.is_writable = False

    def resume(self) -> None:
        """Continue writing: the transport has room again."""
        self.is_writable = True
        if self._queue or self._pulling:
            self._pump_soon()

    def close(self) -> None:
        """Drop everything: the connection is lost."""
        self._shared.output_bytes -= self._queued_bytes
        self._queued_bytes = 0
        self._receiver = self._queue = self._pulling = None
        self.is_writable = False

    def _pump_soon(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._shared.turns.later(self._pump)

    def _pump(self) -> None:
        """Write waiting data while there is room: queued live records first, because they came first."""
        self._is_scheduled = False
        receiver = self._receiver
        if receiver is None:
            return
        written = 0
        until = time.monotonic() + _PUMP_S
        for _ in range(_PUMP_ITEMS):
            if not self.is_writable or written > _PUMP_BYTES or time.monotonic() > until:
                break
            if self._queue:
                subscription, data = self._queue.popleft()
                self._queued_bytes -= len(data)
                self._shared.output_bytes -= len(data)
                if subscription.state is SubscriptionState.CLOSED:
                    continue
            elif self._pulling:
                subscription = next(iter(self._pulling))
                del self._pulling[subscription]
                data = self._shared.broker.pull(subscription)
                receiver.pulled(subscription)
                resumes = data and subscription.state is SubscriptionState.RESUMING
                if resumes and receiver.wants_more(subscription):
                    self._pulling[subscription] = None
            else:
                return
            if data:
                receiver.write(data)
                written += len(data)
        if self.is_writable:
            self._pump_soon()
