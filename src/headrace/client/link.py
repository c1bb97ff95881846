"""Keep a session connected: dial, reconnect, move frames and pass time. Independent of the protocol."""

import asyncio
from collections.abc import Callable, Sequence
from math import inf
from time import monotonic
from typing import Generic

from headrace.client.options import Backoff
from headrace.client.transport.connection import (
    CLOSED_BY_SERVER,
    WRITE_BYTES_MAX,
    MakeConnection,
    Transport,
)
from headrace.session.client import Broken, ConnectionState, E, Finished, LinkedSession

WELL_S = 10.0
"""After a connection that lasted this many seconds, the backoff starts over, however the connection ended."""

CLOSE_TIMEOUT_S = 1.0
"""Seconds that a closing connection may take to send its last bytes."""


class Link(Generic[E]):
    """Run the connections of one client, one after the other."""

    def __init__(
        self,
        session: LinkedSession[E],
        make_connection: MakeConnection,
        *,
        backoff: Backoff,
        attempt_timeout_s: float,
        handle: Callable[[list[E]], None],
        changed: Callable[[ConnectionState], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.reading = True
        self.last_error = ""
        """Reason why the last attempt or connection ended; empty while connected."""
        self.session = session
        self._make_connection = make_connection
        self._backoff = backoff
        self._attempt_timeout_s = attempt_timeout_s
        self._handle = handle
        self._changed = changed
        self._failed = failed
        self._connection: Transport | None = None
        self._reached = self._heard = self._left = False
        """For this connection. `_reached`: the session is connected. `_heard`: the server has sent data.
        `_left`: we have ended the connection."""
        self._found_at = 0.0
        self._parting = ""
        """Reason why we are closing the connection; empty if we are not."""
        self._attempt = 0
        self._send_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._task = self.loop.create_task(self._run())
        self._task.add_done_callback(self._ended)

    def send_soon(self) -> None:
        """Send the session's pending frames, once for all calls in this step of the event loop."""
        if not self._send_scheduled and self._connection is not None:
            self._send_scheduled = True
            self.loop.call_soon(self._send)

    def read(self, reading: bool) -> None:
        """Resume or pause reading. While reading is paused, TCP holds the peer back."""
        if reading == self.reading:
            return
        self.reading = reading
        if self._connection is not None:
            self._connection.read(reading)

    def take(self, events: list[E]) -> None:
        """Handle events that the session returned, and send its pending frames."""
        if not self._reached and self.session.state is ConnectionState.CONNECTED:
            self._found()
        if events:
            self._handle(events)
            self._end(events[-1])
        self._send()

    async def stop(self, abort: bool) -> None:
        """End for good. Without `abort`, pending bytes are sent first."""
        connection = self._connection
        if not abort:
            self._send()  # for example the position that a reader has handled
        self._task.cancel()
        await asyncio.wait([self._task])
        if connection is not None and not connection.lost.done():
            if not abort:
                if not connection.closing:
                    connection.close()
                await asyncio.wait([connection.lost], timeout=CLOSE_TIMEOUT_S)
            connection.drop()
        await asyncio.sleep(0)  # the transport closes its socket in the loop's next step

    async def _run(self) -> None:
        while True:
            self.session.connecting()
            self._changed(self.session.state)
            self._reached = self._heard = self._left = False
            self.last_error = await self._connect_once()
            if self.session.state in (ConnectionState.CONNECTING, ConnectionState.CONNECTED):
                self._disconnected()
            if self.session.state is ConnectionState.REFUSED:
                return
            if self._was_well():
                self._attempt = 0
            wait_s = self._backoff(self._attempt)
            self._attempt += 1
            await asyncio.sleep(wait_s)

    async def _connect_once(self) -> str:
        """Connect and stay connected; return the reason why the attempt or connection ended."""
        connection = self._make_connection(self)
        timeout_s = self._attempt_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await connection.dial()
        except OSError as error:
            connection.drop()
            if str(error):
                return str(error)
            timed_out = isinstance(error, TimeoutError)
            return f"no answer within {timeout_s:g} s" if timed_out else CLOSED_BY_SERVER
        except BaseException:
            connection.drop()
            raise
        reason = await asyncio.shield(connection.lost)
        return self._parting or reason

    def _was_well(self) -> bool:
        """Return True if the backoff starts over with the next attempt.

        The backoff continues if the server was not reached. It also continues if a connection of at most
        `WELL_S` was ended by us, or ended before the server sent anything.
        """
        if not self._reached:
            return False
        return (self._heard and not self._left) or monotonic() - self._found_at > WELL_S

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            if self._connection is not None:
                self._connection.drop()
            self._failed(error)

    def _send(self) -> None:
        self._send_scheduled = False
        connection = self._connection
        if connection is None or connection.closing:
            return
        while not connection.writing_paused:
            frames = self.session.data_to_send(WRITE_BYTES_MAX, monotonic())
            if not frames:
                break
            connection.write(frames)
        self._schedule_tick()

    def _tick(self) -> None:
        self._timer = None
        self.take(self.session.tick(monotonic(), self.reading))

    def _schedule_tick(self) -> None:
        """Schedule the session's next tick. An earlier tick that is scheduled stays: it will check again."""
        tick_at = self.session.tick_at
        if tick_at == inf:
            return
        if self._timer is not None:
            if self._timer_at <= tick_at:
                return
            self._timer.cancel()
        # The loop's clock is not used: on uvloop it counts milliseconds, too coarse for the latency.
        self._timer_at = tick_at
        self._timer = self.loop.call_later(max(0.0, tick_at - monotonic()), self._tick)

    def _end(self, last: E) -> None:
        """End the connection if the last event is `Broken` or `Finished`."""
        connection = self._connection
        if connection is None:
            return
        if isinstance(last, Broken):
            self._left = True
            connection.drop(last.reason)
        elif isinstance(last, Finished):
            self._left = True
            self._parting = last.reason
            self._send()
            connection.close()
            timer = self.loop.call_later(CLOSE_TIMEOUT_S, connection.drop)
            connection.lost.add_done_callback(lambda _: timer.cancel())

    # Reports of the connection

    def opened(self, connection: Transport) -> None:
        self._connection = connection
        self._parting = ""
        self.reading = True
        self.session.opened(monotonic())
        self.take([])

    def received(self, chunks: Sequence[bytes]) -> None:
        self._heard = True
        self.take(self.session.receive_data(chunks, monotonic()))

    def writable(self) -> None:
        self._send()

    def closed(self, reason: str) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and connection.was_hung_up:
            self._handle(self.session.hung_up(reason, monotonic()))
        if not self._task.done():  # else `stop` has ended it, or the task failed
            self.last_error = self._parting or reason
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._disconnected()

    def _found(self) -> None:
        self._reached = True
        self._found_at = monotonic()
        self.last_error = ""
        self._changed(self.session.state)

    def _disconnected(self) -> None:
        self.session.disconnected()
        self._changed(self.session.state)
