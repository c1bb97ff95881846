"""Readiness for a service manager: datagrams to `NOTIFY_SOCKET`, if it is set, as in sd_notify(3)."""

import logging
import socket
import time
from collections.abc import MutableMapping

logger = logging.getLogger(__name__)

READY = "READY=1"
STOPPING = "STOPPING=1"


def reloading() -> str:
    """The server is about to read its settings again; READY follows in any case."""
    return f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}"


class ServiceManager:
    """The service manager that started the server, or nobody."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """Take the address out of `environ`: child processes have nothing to say to it."""
        path = environ.pop("NOTIFY_SOCKET", "")
        self._address = f"\0{path[1:]}" if path.startswith("@") else path

    def tell(self, state: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.sendto(state.encode(), self._address)
        except OSError as error:
            logger.warning("the service manager was not told %s: %s", state, error.strerror)
