"""Keep a session connected: dial, reconnect, move frames and pass time. Independent of the protocol.

`LinkOptions` are the options that all clients share: how they connect, reconnect and close.
"""

import asyncio
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from os import PathLike
from ssl import SSLContext
from time import monotonic
from typing import Any, Generic, TypedDict

from headrace.client.token import NoTokenError, Token, TokenSource, check_token, exposure
from headrace.client.transport import CLOSED_BY_SERVER, WRITE_BYTES_MAX, MakeConnection, Transport
from headrace.errors import ConfigError
from headrace.session.client import Broken, ConnectionState, E, Finished, LinkedSession
from headrace.tls import TlsFiles

Backoff = Callable[[int], float]
"""Return the seconds to wait after the failed attempt with this number. Attempts count from 0. They start
over once a server has answered, unless the client had to leave that server at once. An application may pass
its own function."""

_DOUBLINGS_MAX = 32


def exponential(first_s: float = 0.1, max_s: float = 10.0, jitter: float = 0.5) -> Backoff:
    """Return a backoff that doubles from `first_s` to `max_s`.

    A random part of each wait, at most the share `jitter`, is cut off, so that the clients of a restarted
    server do not all reconnect at the same time.
    """

    def backoff(attempt: int) -> float:
        wait_s = min(first_s * 2.0 ** min(attempt, _DOUBLINGS_MAX), max_s)
        return wait_s * (1.0 - jitter * random.random())  # not a secret: it only spreads load

    return backoff


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """The options of every client. Times are seconds."""

    connect_timeout_s: float | None = 10.0
    """Seconds that entering the client waits for its first connection, or until its channel is joined. None:
    it does not wait, and everything is sent later."""

    attempt_timeout_s: float = 5.0
    """Seconds that one attempt to connect may take."""

    backoff: Backoff | None = None
    """Function from an attempt's number to the seconds before the next attempt. None: exponential, 0.1 to
    10 s, of which a random part, at most half, is cut off; with Wombat, nothing is cut off."""

    flush_timeout_s: float = 5.0
    """Seconds that closing waits for the server to have everything; 0: it does not wait."""

    ca: str | PathLike[str] | None = None
    """File in PEM with the authorities that a server's certificate may come from, for URLs that begin with
    `figgs`, `wombats`, `loguxs` or `channels`. None: the system's authorities."""

    cert: str | PathLike[str] | None = None
    """File in PEM with the client's own certificate, for servers that know clients by theirs."""

    key: str | PathLike[str] | None = None
    """File in PEM with the key of that certificate. None: the key is in the same file."""

    ssl: SSLContext | None = None
    """TLS context in place of `ca`, `cert` and `key`, for other requirements."""

    def tls_context(self, url: str, *, is_encrypted: bool) -> SSLContext | None:
        """Return the context for a URL; None without TLS. Raises `ConfigError`."""
        files = TlsFiles(*(os.fspath(one or "") for one in (self.ca, self.cert, self.key)))
        if not is_encrypted and (self.ssl is not None or any(files)):
            scheme, _, rest = url.partition("://")
            raise ConfigError(
                f"{url} is not encrypted: `ssl`, `ca`, `cert` and `key` are for {scheme}s://{rest}"
            )
        if self.ssl is not None and any(files):
            raise ConfigError(
                "`ssl` takes the place of `ca`, `cert` and `key`: give one or the other"
            )
        return (self.ssl or files.context()) if is_encrypted else None

    token: Any = field(default=None, repr=False)
    """Token to show to the server, or a function that returns one and may be asynchronous. The function is
    called for each connection, and before the token expires. None: the client shows nothing."""

    insecure_token: bool = False
    """True: send the token also without TLS to an address that is not of this machine, where others can read
    it."""

    def __post_init__(self) -> None:
        self._check_token()
        if not isinstance(self.insecure_token, bool):
            raise ConfigError(f"insecure_token must be True or False, not {self.insecure_token!r}")
        self._check_function("backoff")
        if self.ssl is not None and not isinstance(self.ssl, SSLContext):
            raise ConfigError(f"ssl must be an ssl.SSLContext, not {self.ssl!r}")
        self._check_numbers("attempt_timeout_s")
        self._check_numbers("connect_timeout_s", may_be_none=True)
        self._check_numbers("flush_timeout_s", may_be_zero=True)

    def _check_token(self) -> None:
        check_token(self.token)

    @property
    def shown_token(self) -> Token | None:
        """The token that the link handles."""
        found: Token | None = self.token
        return found

    def _check_function(self, name: str) -> None:
        value = getattr(self, name)
        if value is not None and not callable(value):
            raise ConfigError(f"{name} must be a function, not {value!r}")

    def _check_numbers(
        self, *names: str, may_be_none: bool = False, may_be_zero: bool = False
    ) -> None:
        for name in names:
            value = getattr(self, name)
            if value is None and may_be_none:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{name} must be a number, not {value!r}")
            if not (value > 0 or (value == 0 and may_be_zero)):
                raise ConfigError(f"{name} must be above 0, not {value!r}")


def check_json(name: str, value: Any) -> None:
    """Raise ConfigError unless the value reaches a server unchanged."""
    # Imported on first use: most clients do not need the codec of Logux.
    from headrace.wire.logux import messages as logux

    try:
        received = logux.unpack(logux.pack([value], binary=True), binary=True)
    except (logux.BadLoguxMessageError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} must be a JSON value: {error}") from None
    if received != [value]:
        raise ConfigError(f"{name} must be a JSON value, not {value!r}")


class LinkOptionsDict(TypedDict, total=False):
    """The same options as keyword arguments."""

    connect_timeout_s: float | None
    attempt_timeout_s: float
    backoff: Backoff | None
    flush_timeout_s: float
    ca: str | PathLike[str] | None
    cert: str | PathLike[str] | None
    key: str | PathLike[str] | None
    ssl: SSLContext | None
    token: Any
    insecure_token: bool


WELL_S = 10.0
"""After a connection that lasted this many seconds, the backoff starts over, however the connection ended."""

RENEW_RETRY_S = 1.0
"""Seconds until a function that has given no token is asked again."""

CLOSE_TIMEOUT_S = 1.0
"""Seconds that a closing connection may take to send its last bytes."""


class Link(Generic[E]):
    """Run the connections of one client, one after the other."""

    def __init__(
        self,
        session: LinkedSession[E],
        make_connection: MakeConnection,
        options: LinkOptions,
        *,
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
        self._backoff = options.backoff or exponential()
        self._attempt_timeout_s = options.attempt_timeout_s
        self._token = TokenSource(options.shown_token)
        self._insecure_token = options.insecure_token
        self._renewing: asyncio.Task[None] | None = None
        self._handle = handle
        self._changed = changed
        self._failed = failed
        self._connection: Transport | None = None
        self._reached_at: float | None = None
        """Time since which the session is connected; None before."""
        self._heard = self._left = False
        """For this connection. `_heard`: the server has sent data. `_left`: we have ended the connection."""
        self._explained = ""
        """Reason for the end of the last connection, as the session explains it."""
        self._parting = ""
        """Reason why we are closing the connection; empty if we are not."""
        self._attempt = 0
        self._send_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._task = self.loop.create_task(self._run())
        self._task.add_done_callback(self._ended)

    def send_soon(self) -> None:
        """Call `send`, once for all calls in this step of the event loop."""
        if not self._send_scheduled and self._connection is not None:
            self._send_scheduled = True
            self.loop.call_soon(self.send)

    def send(self) -> None:
        """Send the session's pending frames while the connection takes them."""
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

    def read(self, reading: bool) -> None:
        """Resume or pause reading. While reading is paused, TCP holds the peer back."""
        if reading == self.reading:
            return
        self.reading = reading
        if self._connection is not None:
            self._connection.read(reading)

    def take(self, events: list[E]) -> None:
        """Handle events that the session returned, and send its pending frames."""
        if self._reached_at is None and self.session.state is ConnectionState.CONNECTED:
            self._reached_at = monotonic()
            self.last_error = ""
            self._changed(self.session.state)
        if events:
            self._handle(events)
            self._end(events[-1])
        self.send()

    async def stop(self, abort: bool) -> None:
        """End for good. Without `abort`, pending bytes are sent first."""
        connection = self._connection
        if not abort:
            self.send()  # for example the position that a reader has handled
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
            self._reached_at = None
            self._heard = self._left = False
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
        timeout_s = self._attempt_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                self.session.token = await self._token.get()
        except NoTokenError as error:
            return str(error)
        except TimeoutError:
            return f"the function for the token has returned nothing within {timeout_s:g} s"
        self.session.token_changes = self._token.changes
        connection = self._make_connection(self)
        try:
            async with asyncio.timeout(timeout_s):
                await connection.dial()
        except BaseException as error:
            connection.drop()
            if not isinstance(error, OSError):
                raise
            silence = f"no answer within {timeout_s:g} s"
            return str(error) or (silence if isinstance(error, TimeoutError) else CLOSED_BY_SERVER)
        reason = await asyncio.shield(connection.lost)
        return self._parting or self._explained or reason

    def _was_well(self) -> bool:
        """Return True if the backoff starts over with the next attempt.

        The backoff continues if the server was not reached. It also continues if a connection of at most
        `WELL_S` was ended by us, or ended before the server sent anything.
        """
        if self._reached_at is None:
            return False
        return (self._heard and not self._left) or monotonic() - self._reached_at > WELL_S

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            if self._connection is not None:
                self._connection.drop()
            self._failed(error)

    def _tick(self) -> None:
        self._timer = None
        now = monotonic()
        if now >= self._renew_at:
            self.session.renew_at = inf
            self._renewing = self.loop.create_task(self._renew())
        self.take(self.session.tick(now, self.reading))

    @property
    def _renew_at(self) -> float:
        """Time to ask the application for a new token; inf if it has only one."""
        return self.session.renew_at if self._token.changes else inf

    async def _renew(self) -> None:
        connection = self._connection
        try:
            token = await self._token.get()
        except NoTokenError:
            # The present token is still valid. If it expires, the next connection reports the reason.
            token = None
        if self._connection is not connection or connection is None:
            return
        if token is None:
            self.session.renew_at = monotonic() + RENEW_RETRY_S
        else:
            self.session.renew(token, monotonic())
        self.send()
        self._schedule_tick()

    def _schedule_tick(self) -> None:
        """Schedule the session's next tick. An earlier tick that is scheduled stays: it will check again."""
        tick_at = min(self.session.tick_at, self._renew_at)
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
            self.send()
            connection.close()
            timer = self.loop.call_later(CLOSE_TIMEOUT_S, connection.drop)
            connection.lost.add_done_callback(lambda _: timer.cancel())

    # Reports of the connection

    def opened(self, connection: Transport) -> None:
        self._connection = connection
        self._parting = self._explained = ""
        self.reading = True
        if reason := self._exposure_of_token(connection):
            self._left = True
            self._handle(self.session.refuse(reason))
            # uvloop does not close the socket of a transport that is aborted before it is announced.
            self.loop.call_soon(connection.drop, reason)
            return
        self.session.opened(monotonic())
        self.take([])

    def _exposure_of_token(self, connection: Transport) -> str:
        """Return why others could read the token on this connection; empty if they could not."""
        if self.session.token is None or self._insecure_token:
            return ""
        return exposure(connection.transport)

    def received(self, chunks: Sequence[bytes]) -> None:
        if self.session.is_refused:
            return
        self._heard = True
        self.take(self.session.receive_data(chunks, monotonic()))

    def closed(self, reason: str) -> None:
        reason = self._explained = self.session.explain(reason)
        connection, self._connection = self._connection, None
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None
        if connection is not None and connection.was_hung_up:
            self._handle(self.session.hung_up(reason, monotonic()))
        if not self._task.done():  # else `stop` has ended it, or the task failed
            self.last_error = self._parting or reason
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._disconnected()

    def _disconnected(self) -> None:
        self.session.disconnected()
        self._changed(self.session.state)
