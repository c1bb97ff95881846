"""New connections: a few are accepted in one iteration of the loop, so that those that are open are served.

Without a bound, the loop would accept all that wait, which after a restart may be every client, before it
reads again from anyone. The others wait in the kernel's queue meanwhile. A new connection resumes its
subscriptions right after that, so the bound holds for this work too.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

logger = logging.getLogger(__name__)

RETRY_S = 0.25
"""Time until a new attempt after the process or the system had no free file descriptor."""

_NO_DESCRIPTOR = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Admission:
    """Accepts the connections of one listening socket."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        make: Callable[[], asyncio.BaseProtocol],
        at_once_max: Callable[[], int],
    ) -> None:
        """`at_once_max` returns the largest number of connections that one iteration accepts."""
        self._loop = loop
        self._socket = sock
        self._make = make
        self._at_once_max = at_once_max
        self._opening: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_out = False
        """True after the last attempt found no free descriptor."""
        self._is_paused = False
        self._is_closed = False
        self._is_reading = False
        self._read()

    def close(self) -> None:
        """Accept nothing more, and close the listening socket."""
        self._is_closed = True
        self._read()
        if self._timer is not None:
            self._timer.cancel()
        self._socket.close()

    def pause(self) -> None:
        """Accept nothing until `resume`: new connections wait in the kernel's queue."""
        self._is_paused = True
        self._read()

    def resume(self) -> None:
        self._is_paused = False
        self._read()

    def _read(self) -> None:
        """Accept connections, or stop that, as the state says."""
        wanted = not (self._is_paused or self._is_closed or self._timer is not None)
        if wanted and not self._is_reading:
            self._loop.add_reader(self._socket.fileno(), self._accept)
        elif self._is_reading and not wanted:
            self._loop.remove_reader(self._socket.fileno())
        self._is_reading = wanted

    def _accept(self) -> None:
        for _ in range(self._at_once_max()):
            try:
                accepted, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTOR:
                    raise
                self._wait(error)
                return
            self._is_out = False
            accepted.setblocking(False)
            task = self._loop.create_task(self._open(accepted))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, accepted)
        except OSError:
            accepted.close()  # the peer is gone again

    def _wait(self, error: OSError) -> None:
        """Try again later: until a descriptor is free, the socket would be readable all the time."""
        if not self._is_out:
            self._is_out = True
            logger.warning("no new connection can be accepted: %s", error.strerror)
        self._timer = self._loop.call_later(RETRY_S, self._again)
        self._read()

    def _again(self) -> None:
        self._timer = None
        self._read()
