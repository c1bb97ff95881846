"""Keeps a session connected: dials and dials again, moves frames and time. Knows no protocol."""

import asyncio
from collections.abc import Callable, Sequence
from math import inf
from time import monotonic
from typing import Generic

from headrace.client.backoff import Backoff
from headrace.client.connection import (
    CLOSED_BY_SERVER,
    WRITE_BYTES_MAX,
    Connection,
    MakeConnection,
)
from headrace.session.client import Broken, ConnectionState, E, Finished, LinkedSession

WELL_S = 10.0
"""A connection that lasted so long was a good one, however it ended."""

CLOSE_TIMEOUT_S = 1.0
"""How long a closed connection may take to get its last bytes out."""


class Link(Generic[E]):
    """Runs the connections of one client, one after the other."""

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
        """Why the last attempt or connection ended; empty while connected."""
        self._session = session
        self._make_connection = make_connection
        self._backoff = backoff
        self._attempt_timeout_s = attempt_timeout_s
        self._handle = handle
        self._changed = changed
        self._failed = failed
        self._connection: Connection | None = None
        self._reached = self._heard = self._left = False
        """Whether we count as connected, whether the server has said anything, whether it was us who left."""
        self._found_at = 0.0
        self._parting = ""
        """Why we are closing the connection."""
        self._attempt = 0
        self._send_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._task = self.loop.create_task(self._run())
        self._task.add_done_callback(self._ended)

    def send_soon(self) -> None:
        """Send what the session has, once for all that happens in this step of the loop."""
        if not self._send_scheduled and self._connection is not None:
            self._send_scheduled = True
            self.loop.call_soon(self._send)

    def read(self, reading: bool) -> None:
        """Go on reading, or stop: the peer is then held back by TCP."""
        if reading == self.reading:
            return
        self.reading = reading
        if self._connection is not None:
            self._connection.read(reading)

    def take(self, events: list[E]) -> None:
        """What came of something that the session was told; what it says to that is sent."""
        if not self._reached and self._session.state is ConnectionState.CONNECTED:
            self._found()
        if events:
            self._handle(events)
            self._end(events[-1])
        self._send()

    async def stop(self, abort: bool) -> None:
        """End for good. Without `abort`, what the transport holds is sent first."""
        connection = self._connection
        if not abort:
            self._send()  # what a reader has handled, say
        self._task.cancel()
        await asyncio.wait([self._task])
        if connection is not None and not connection.lost.done():
            if not abort:
                connection.close()
                await asyncio.wait([connection.lost], timeout=CLOSE_TIMEOUT_S)
            connection.drop()
        await asyncio.sleep(0)  # the transport closes its socket in the next step

    async def _run(self) -> None:
        while True:
            self._session.connecting()
            self._changed(self._session.state)
            self._reached = self._heard = self._left = False
            self.last_error = await self._connect_once()
            if self._session.state in (ConnectionState.CONNECTING, ConnectionState.CONNECTED):
                self._disconnected()
            if self._session.state is ConnectionState.REFUSED:
                return
            if self._was_well():
                self._attempt = 0
            wait_s = self._backoff(self._attempt)
            self._attempt += 1
            await asyncio.sleep(wait_s)

    async def _connect_once(self) -> str:
        """Connect and stay so; returns why that ended."""
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
        """Whether the next attempt is a first one.

        A peer that we had to leave at once, or that left without a word, is backed off from.
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
            frames = self._session.data_to_send(WRITE_BYTES_MAX, monotonic())
            if not frames:
                break
            connection.write(frames)
        self._schedule_tick()

    def _tick(self) -> None:
        self._timer = None
        self.take(self._session.tick(monotonic(), self.reading))

    def _schedule_tick(self) -> None:
        """Let a tick come when it is due, unless one comes earlier and will look again."""
        tick_at = self._session.tick_at
        if tick_at == inf:
            return
        if self._timer is not None:
            if self._timer_at <= tick_at:
                return
            self._timer.cancel()
        # Not by the loop's clock, which on uvloop counts milliseconds: too coarse for the latency.
        self._timer_at = tick_at
        self._timer = self.loop.call_later(max(0.0, tick_at - monotonic()), self._tick)

    def _end(self, last: E) -> None:
        """End the connection, if that is what the last event says."""
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

    # What the connection says.

    def opened(self, connection: Connection) -> None:
        self._connection = connection
        self._parting = ""
        self.reading = True
        self._session.opened(monotonic())
        self.take([])

    def received(self, chunks: Sequence[bytes]) -> None:
        self._heard = True
        self.take(self._session.receive_data(chunks, monotonic()))

    def writable(self) -> None:
        self._send()

    def closed(self, reason: str) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and connection.was_hung_up:
            self._handle(self._session.hung_up(reason, monotonic()))
        if not self._task.done():  # else it was us who ended it
            self.last_error = self._parting or reason
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._disconnected()

    def _found(self) -> None:
        self._reached = True
        self._found_at = monotonic()
        self.last_error = ""
        self._changed(self._session.state)

    def _disconnected(self) -> None:
        self._session.disconnected()
        self._changed(self._session.state)
