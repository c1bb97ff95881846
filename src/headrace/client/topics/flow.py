"""Keeps slow subscriptions from filling memory, and from holding up all else.

A subscription over its bound first stops the reading of the whole connection: that costs nothing
and suits a reader that is a little slower than the log. But acknowledgements, pongs and other
topics wait with it. So when publishes are unacknowledged, or the pause has lasted long enough, the
topic steps aside: it is detached, and attached again where it stopped once the application has
caught up.
"""

import asyncio

from headrace.client.link import Link
from headrace.client.subscription import Subscription
from headrace.session.client import ClientSession, Event


class Flow:
    """Every subscription over its bound is in exactly one of `_pausing` and `_aside`."""

    def __init__(self, link: Link[Event], session: ClientSession, pause_s: float) -> None:
        self._link = link
        self._session = session
        self._pause_s = pause_s
        self._pausing: set[Subscription] = set()
        self._aside: set[Subscription] = set()
        self._timer: asyncio.TimerHandle | None = None

    def over(self, subscription: Subscription) -> None:
        """A subscription has more than it may buffer."""
        if subscription in self._aside:
            return
        self._pausing.add(subscription)
        if self._session.unacknowledged:
            self.step_aside()
        elif self._timer is None:
            self._link.read(False)
            self._timer = asyncio.get_running_loop().call_later(self._pause_s, self.step_aside)

    def caught_up(self, subscription: Subscription) -> None:
        """A subscription has room again."""
        if subscription in self._aside:
            self._aside.discard(subscription)
            self._session.resume(subscription.topic)
            self._link.send_soon()
        else:
            self._pausing.discard(subscription)
            if not self._pausing:
                self._resume()

    def step_aside(self) -> None:
        """Read on at once, without the topics that pause the reading."""
        for subscription in self._pausing:
            self._session.pause(subscription.topic)
        self._aside |= self._pausing
        self._pausing.clear()
        self._resume()
        self._link.send_soon()

    def forget(self, subscription: Subscription) -> None:
        """The subscription has ended."""
        self._aside.discard(subscription)
        self._pausing.discard(subscription)
        if not self._pausing:
            self._resume()

    def disconnected(self) -> None:
        # The next connection starts reading: what is over its bound must not be on it.
        if self._pausing:
            self.step_aside()

    def stop(self) -> None:
        """The client is closing: hold nothing back any more."""
        self._aside.clear()
        self._pausing.clear()
        self._resume()

    def _resume(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._link.read(True)
