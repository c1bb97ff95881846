"""The options of a client for topics. Options that all clients have are in `client/options.py`."""

from dataclasses import dataclass
from enum import Enum
from os import PathLike
from typing import Any, Final

from headrace.client.options import LinkOptions, LinkOptionsDict
from headrace.errors import ConfigError
from headrace.session.topics import window as client_window


class _Own(Enum):
    OF_PROTOCOL = "the protocol's own"


OF_PROTOCOL: Final = _Own.OF_PROTOCOL
"""Default of an option for which None has another meaning: use the protocol's default."""


@dataclass(frozen=True, kw_only=True)
class Options(LinkOptions):
    """The options of `connect` and `connect_blocking`. Times are seconds."""

    window_max: int = client_window.WINDOW_MAX
    """Largest number of unacknowledged publishes. Beyond it, `publish` waits and `publish_nowait` raises
    WindowFullError."""

    window_bytes_max: int = client_window.WINDOW_BYTES_MAX
    """The same limit in bytes; the last publish may exceed it."""

    receive_bytes_max: int = 8 * 1024 * 1024
    """Bytes that one subscription may buffer until the application takes them. Above this limit the client
    stops reading; nothing is lost."""

    receive_pause_s: float = 1.0
    """Seconds for which a slow subscription may keep the client from reading. After that only its own topic
    waits: it is detached, and attached again where it stopped once the application has caught up."""

    ping_interval_s: float | _Own | None = OF_PROTOCOL
    """Seconds between pings. Figg: 2; None: no pings, for servers that do not answer pings or disconnect
    because of them. Wombat: 5; its servers disconnect a client that is silent for longer than their
    `limits.silence_s`, 10 by default."""

    pings_unanswered_max: int | None = None
    """If this many pings are unanswered when the next one is due, the client gives up the connection. Figg:
    2, Wombat: 1."""

    resend_s: float | None = None
    """Seconds without acknowledgement after which a publish is resent on the same connection; it is stored
    once. Wombat only: 2."""

    lake: str | PathLike[str] | None = None
    """Directory of a lake to which the server's topics are exported: records that a topic no longer has are
    read from the lake instead. Needs the extra `headrace[lake]`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lake is not None and not isinstance(self.lake, str | PathLike):
            raise ConfigError(f"lake must be the path of a directory, not {self.lake!r}")
        self._check_numbers("window_max", "window_bytes_max", "receive_bytes_max")
        self._check_numbers("receive_pause_s", may_be_zero=True)
        self._check_numbers("pings_unanswered_max", "resend_s", may_be_none=True)
        if self.ping_interval_s is not OF_PROTOCOL:
            self._check_numbers("ping_interval_s", may_be_none=True)

    def for_session(self) -> dict[str, Any]:
        """Return the arguments of a session that the application has set; the others have defaults there."""
        names = ("window_max", "window_bytes_max", "pings_unanswered_max", "resend_s")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.ping_interval_s is not OF_PROTOCOL:
            given["ping_interval_s"] = self.ping_interval_s
        return given


class OptionsDict(LinkOptionsDict, total=False):
    """The same options as keyword arguments."""

    window_max: int
    window_bytes_max: int
    receive_bytes_max: int
    receive_pause_s: float
    ping_interval_s: float | None
    pings_unanswered_max: int | None
    resend_s: float | None
    lake: str | PathLike[str] | None
