"""The options of a client: every option with its meaning, unit and default."""

from dataclasses import dataclass, fields, replace
from enum import Enum
from os import PathLike
from ssl import SSLContext
from typing import Final, TypedDict

from headrace.client.backoff import Backoff
from headrace.errors import ConfigError
from headrace.session.topics import window as client_window


class _Own(Enum):
    OF_PROTOCOL = "the protocol's own"


OF_PROTOCOL: Final = _Own.OF_PROTOCOL
"""Default of an option for which None has another meaning: use the protocol's default."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Settings whose defaults depend on the protocol. Times are seconds."""

    backoff: Backoff
    ping_interval_s: float | None
    """None: no pings."""
    pings_unanswered_max: int
    resend_s: float | None
    """None: the protocol does not resend on the same connection."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `connect` and `connect_blocking`. Times are seconds.

    `pace` replaces None by the protocol's default where None means that default.
    """

    connect_timeout_s: float | None = 10.0
    """Seconds that entering the client waits for its first connection. None: it does not wait, and publishes
    and subscriptions are sent once a server is connected."""

    attempt_timeout_s: float = 5.0
    """Seconds that one attempt to connect may take."""

    backoff: Backoff | None = None
    """Function from an attempt's number to the seconds before the next attempt. Figg and Wombat: exponential,
    0.1 to 10 s; with Figg, a random part of each wait, at most half, is cut off."""

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

    flush_timeout_s: float = 5.0
    """Seconds that closing waits for acknowledgements; 0: it does not wait."""

    ssl: SSLContext | None = None
    """TLS context that verifies a `wombats://` server; None: its name and the system's authorities."""

    lake: str | PathLike[str] | None = None
    """Directory of a lake to which the server's topics are exported: records that a topic no longer has are
    read from the lake instead. Needs the extra `headrace[lake]`."""

    def __post_init__(self) -> None:
        if self.backoff is not None and not callable(self.backoff):
            raise ConfigError(f"backoff must be a function of the attempt, not {self.backoff!r}")
        if self.lake is not None and not isinstance(self.lake, str | PathLike):
            raise ConfigError(f"lake must be the path of a directory, not {self.lake!r}")
        if self.ssl is not None and not isinstance(self.ssl, SSLContext):
            raise ConfigError(f"ssl must be an ssl.SSLContext, not {self.ssl!r}")
        for option in fields(self):
            name, value = option.name, getattr(self, option.name)
            is_number = name not in ("backoff", "ssl", "lake")
            may_be = (None, OF_PROTOCOL) if name == "ping_interval_s" else (None,)
            if is_number and not (value in may_be and name in _MAY_BE_NONE):
                check_number(name, value, may_be_zero=name in _MAY_BE_ZERO)

    def pace(self, own: Pace) -> Pace:
        """Return the settings of the application, with the protocol's defaults for the rest."""
        if self.resend_s is not None and own.resend_s is None:
            raise ConfigError("resend_s is for wombat:// only: other protocols do not send again")
        names = [option.name for option in fields(Pace) if option.name != "ping_interval_s"]
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.ping_interval_s is not OF_PROTOCOL:
            given["ping_interval_s"] = self.ping_interval_s
        return replace(own, **given)


def check_number(name: str, value: object, *, may_be_zero: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number, not {value!r}")
    if not (value > 0 or (value == 0 and may_be_zero)):
        raise ConfigError(f"{name} must be above 0, not {value!r}")


_MAY_BE_ZERO = ("receive_pause_s", "flush_timeout_s")
_MAY_BE_NONE = ("connect_timeout_s", "ping_interval_s", "pings_unanswered_max", "resend_s")


class OptionsDict(TypedDict, total=False):
    """The same options as keyword arguments."""

    connect_timeout_s: float | None
    attempt_timeout_s: float
    backoff: Backoff | None
    window_max: int
    window_bytes_max: int
    receive_bytes_max: int
    receive_pause_s: float
    ping_interval_s: float | None
    pings_unanswered_max: int | None
    resend_s: float | None
    flush_timeout_s: float
    ssl: SSLContext | None
    lake: str | PathLike[str] | None
