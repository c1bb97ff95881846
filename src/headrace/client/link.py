"""Keeps a session connected: dials and dials again, moves bytes and time. Knows no protocol."""

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import cast

from headrace.client.options import Options
from headrace.session.client import Broken, ClientSession, ConnectionState, Event

WRITE_BYTES_MAX = 256 * 1024
"""Handed to the transport at once. What is still in the session can be overtaken by a ping."""

CLOSE_TIMEOUT_S = 1.0
"""How long a closed connection may take to get its last bytes out."""

Dial = Callable[[Callable[[], asyncio.Protocol]], Awaitable[None]]
"""Opens a transport to the server for the protocol that the given function makes."""


class Link:
    """Runs the connections of one client, one after the other."""

    def __init__(
        self,
        session: ClientSession,
        dial: Dial,
        options: Options,
        *,
        handle: Callable[[list[Event]], None],
        changed: Callable[[ConnectionState], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.reading = True
        self.last_error = ""
        """Why the last attempt or connection ended; empty while connected."""
        self._session = session
        self._dial = dial
        self._options = options
        self._handle = handle
        self._changed = changed
        self._failed = failed
        self._connection: _Connection | None = None
        self._attempt = 0
        self._send_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
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

    async def stop(self, abort: bool) -> None:
        """End for good. Without `abort`, what the transport holds is sent first."""
        connection = self._connection
        self._task.cancel()
        await asyncio.wait([self._task])
        if connection is not None and not connection.lost.done():
            if not abort:
                connection.transport.close()
                await asyncio.wait([connection.lost], timeout=CLOSE_TIMEOUT_S)
            connection.drop()
        await asyncio.sleep(0)  # the transport closes its socket in the next step

    async def _run(self) -> None:
        while True:
            self._session.connecting()
            self._changed(self._session.state)
            self.last_error = await self._connect_once()
            if self._session.state is not ConnectionState.DISCONNECTED:
                self._disconnected()
            wait_s = self._options.backoff(self._attempt)
            self._attempt += 1
            await asyncio.sleep(wait_s)

    async def _connect_once(self) -> str:
        """Connect and stay so; returns why that ended."""
        connection = _Connection(self)
        timeout_s = self._options.attempt_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._dial(lambda: connection)
        except OSError as error:
            connection.drop()
            return str(error) or f"no answer within {timeout_s:g} s"
        except BaseException:
            connection.drop()
            raise
        return await asyncio.shield(connection.lost)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            if self._connection is not None:
                self._connection.drop()
            self._failed(error)

    def _send(self) -> None:
        self._send_scheduled = False
        connection = self._connection
        if connection is None or connection.transport.is_closing():
            return
        while not connection.writing_paused:
            data = self._session.data_to_send(WRITE_BYTES_MAX)
            if not data:
                return
            connection.transport.write(data)

    def _tick(self) -> None:
        self._take(self._session.tick(monotonic(), self.reading))
        if self._connection is not None:
            self._send()
            self._schedule_tick()

    def _schedule_tick(self) -> None:
        # Not by the loop's clock, which on uvloop counts milliseconds: too coarse for the latency.
        wait_s = self._session.ping_at - monotonic()
        self._timer = self.loop.call_later(max(0.0, wait_s), self._tick)

    def _take(self, events: list[Event]) -> None:
        if not events:
            return
        self._handle(events)
        last = events[-1]
        if isinstance(last, Broken) and self._connection is not None:
            self._connection.drop(last.reason)

    # What the connection says.

    def opened(self, connection: "_Connection") -> None:
        self._connection = connection
        self.reading = True
        self._session.opened(monotonic())
        self._send()
        self._schedule_tick()

    def received(self, data: bytes) -> None:
        before = self._session.state
        events = self._session.receive_data(data, monotonic())
        if self._session.state is not before:
            self._reached()
        self._take(events)
        self._send()

    def writable(self) -> None:
        self._send()

    def closed(self, reason: str) -> None:
        self._connection = None
        if not self._task.done():  # else it was us who ended it
            self.last_error = reason
        if self._timer is not None:
            self._timer.cancel()
        self._disconnected()

    def _reached(self) -> None:
        # Not when a connection opens: a peer that hangs up or speaks otherwise is backed off from.
        self._attempt = 0
        self.last_error = ""
        self._changed(self._session.state)

    def _disconnected(self) -> None:
        self._session.disconnected()
        self._changed(self._session.state)


class _Connection(asyncio.Protocol):
    """One attempt and the connection it may become."""

    transport: asyncio.Transport

    def __init__(self, link: Link) -> None:
        self._link = link
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.writing_paused = False
        self._open = False
        self._dropped = False

    def drop(self, reason: str = "") -> None:
        """Close without sending what is left."""
        self._dropped = True
        if self._open:
            self._leave(reason)
            self.transport.abort()
        self._settle(reason)

    def read(self, reading: bool) -> None:
        if reading:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        if self._dropped:  # given up while the connection was being made
            self.transport.abort()
            return
        self.transport.set_write_buffer_limits(high=WRITE_BYTES_MAX // 4)
        self._open = True
        self._link.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._open:
            self._link.received(data)

    def pause_writing(self) -> None:
        self.writing_paused = True

    def resume_writing(self) -> None:
        self.writing_paused = False
        if self._open:
            self._link.writable()

    def connection_lost(self, error: Exception | None) -> None:
        reason = str(error or "") or "the server closed the connection"
        self._leave(reason)
        self._settle(reason)

    def _settle(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)

    def _leave(self, reason: str) -> None:
        if self._open:
            self._open = False
            self._link.closed(reason)
