"""Keep slow subscriptions from filling memory and from blocking everything else.

A subscription over its limit first pauses reading on the whole connection: that costs nothing and suits a
reader that is a little slower than the log. But acknowledgements, pongs and other topics wait too. So if
publishes are unacknowledged, or the pause has lasted long enough, the topic steps aside: the client detaches
it, and attaches it again where it stopped once the application has caught up.
"""

import asyncio

from headrace.client.link import Link
from headrace.client.topics.subscription import Subscription
from headrace.session.topics.client import ClientSession
from headrace.session.topics.events import Event


class Flow:
    """Flow control. Every subscription over its limit is in exactly one of `_pausing` and `_aside`."""

    def __init__(self, link: Link[Event], session: ClientSession, pause_s: float) -> None:
        self._link = link
        self._session = session
        self._pause_s = pause_s
        self._pausing: set[Subscription] = set()
        self._aside: set[Subscription] = set()
        self._timer: asyncio.TimerHandle | None = None

    def over(self, subscription: Subscription) -> None:
        """Called when a subscription buffers more than it may."""
        if subscription in self._aside:
            return
        self._pausing.add(subscription)
        if self._session.unacknowledged:
            self.step_aside()
        elif self._timer is None:
            self._link.read(False)
            self._timer = asyncio.get_running_loop().call_later(self._pause_s, self.step_aside)

    def caught_up(self, subscription: Subscription) -> None:
        """Called when a subscription has room again."""
        if subscription in self._aside:
            self._aside.discard(subscription)
            self._session.resume(subscription.topic)
            self._link.send_soon()
        else:
            self._pausing.discard(subscription)
            if not self._pausing:
                self._resume()

    def step_aside(self) -> None:
        """Resume reading at once, without the topics that have paused it."""
        for subscription in self._pausing:
            self._session.pause(subscription.topic)
        self._aside |= self._pausing
        self._pausing.clear()
        self._resume()
        self._link.send_soon()

    def forget(self, subscription: Subscription) -> None:
        """Forget a subscription that has ended."""
        self._aside.discard(subscription)
        self._pausing.discard(subscription)
        if not self._pausing:
            self._resume()

    def disconnected(self) -> None:
        # The next connection starts with reading: topics over their limit must not be attached to it.
        if self._pausing:
            self.step_aside()

    def stop(self) -> None:
        """Resume reading because the client is closing."""
        self._aside.clear()
        self._pausing.clear()
        self._resume()

    def _resume(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._link.read(True)
