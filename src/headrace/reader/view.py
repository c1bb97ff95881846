"""A log as a reader outside of the server sees it: its location, its interface and its errors.

Two modules implement the interface: `files.py` reads a data directory, `server.py` asks a running server.
Both give the same rows. Nothing here knows Spark.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.errors import HeadraceError, OptionError
from headrace.model import Position, Span
from headrace.tls import TlsFiles
from headrace.tokens import token_in

T = TypeVar("T")

Rows = npt.NDArray[np.void]
"""Rows of an index; `decode.ROW` is their format."""


class LogLocation(NamedTuple):
    """Location of the log: either `path` or `urls`."""

    path: str = ""
    urls: tuple[str, ...] = ()
    token: str = ""
    token_file: str = ""
    """File with the token, in place of `token`."""
    tls: TlsFiles = TlsFiles()
    """Files for TLS with servers whose address begins with `https`."""
    insecure_token: bool = False
    """True: send the token also where others can read it."""

    @property
    def has_token(self) -> bool:
        return bool(self.token or self.token_file)

    def find_token(self) -> str:
        """Return the token to show now, or an empty string. Raises `OptionError` for a file without one."""
        return token_in(self.token_file) if self.token_file else self.token

    def __repr__(self) -> str:
        return f"LogLocation(path={self.path!r}, urls={self.urls!r})"  # never show the token

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the token instead of the name of its file: the machine of a task may not have the file."""
        return LogLocation, tuple(self._replace(token=self.find_token(), token_file=""))


def parse_place(
    url: str, token: str, ca: str = "", *, token_file: str = "", insecure_token: bool = False
) -> LogLocation:
    """Parse the address of one server, or of several separated by commas.

    `ca` is a file on every machine that asks the server. The environment names files that are not given.
    """
    urls = tuple(one.strip().rstrip("/") for one in url.split(","))
    for one in urls:
        if not re.fullmatch(r"https?://([^/?#@:\s\[\]]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?", one):
            raise OptionError(
                f"url must be http://host:port of a server's --http listener (port 8121 by default), not "
                f"{without_secret(one)!r}"
            )
    if not re.fullmatch(r"[!-~]*", token):
        raise OptionError("token must be one word of ASCII, as the server's configuration has it")
    is_encrypted = any(one.startswith("https:") for one in urls)
    if ca and not is_encrypted:
        raise OptionError("ca is for servers with TLS: write https:// in front of the address")
    tls = TlsFiles(ca).or_environment() if is_encrypted else TlsFiles()
    if token and token_file:
        raise OptionError("token and token_file exclude each other: give one of them")
    return LogLocation(
        urls=urls, token=token, token_file=token_file, tls=tls, insecure_token=insecure_token
    )


def without_secret(url: str) -> str:
    """Mask everything before an `@` in an address, because it may be a password."""
    return re.sub(r"//[^/]*@", "//…@", url)


class SourceError(HeadraceError):
    """The source cannot deliver the requested data. The message says why and what to change."""


class DataLossError(SourceError):
    """Requested records are no longer kept."""

    def __init__(self, message: str, rest: "LogRange | None" = None) -> None:
        super().__init__(message)
        self.rest = rest
        """The part of the requested range that can still be read."""


class TopicState(NamedTuple):
    """A topic with its start and end."""

    name: str
    start: Position
    end: Position
    is_kept: bool = True
    """True if the topic continues after a restart of its server.

    False for a topic of durability `memory`, which begins anew.
    """


class LogRange(NamedTuple):
    """Records of a topic from one position to another: the unit that a task reads."""

    topic: str
    start: Position
    end: Position
    files: tuple[int, ...] = ()
    """Numbers of the files that hold the records. Only the log that made this range understands them."""

    @property
    def bytes(self) -> int:
        return Span.between(self.start, self.end).bytes


class LogBlock(NamedTuple):
    """Consecutive whole runs without a gap, and their index rows. Checksums are not verified yet."""

    rows: Rows
    data: bytes | memoryview
    """Valid until the next block is requested: its memory may then be reused."""
    place: str
    """Origin of the data, for error messages."""


class DamagedRange(NamedTuple):
    """Range of offsets whose index rows are damaged, so its records cannot be read."""

    offset: int
    end: int
    place: str


class LogView(Protocol):
    def topics(self, names: Iterable[str] | None) -> dict[str, TopicState]:
        """Return the topics that exist: those with these names, or all."""

    def ended(self, names: Iterable[str]) -> dict[str, Position]:
        """Return the end positions of topics that no longer exist, where the end is known."""

    def wait(self, timeout_s: float) -> None:
        """Wait until topics may have changed since the last call of `topics`, or until the timeout."""

    def at_offset(self, topic: TopicState, offset: int) -> Position:
        """Return the nearest record boundary at or after `offset` that is kept."""

    def at_ordinal(self, topic: TopicState, ordinal: int) -> Position:
        """Return where the record with this ordinal begins."""

    def at_time(self, topic: TopicState, ms: int) -> Position:
        """Return where the first record at or after this time begins."""

    def split(self, whole: LogRange, bytes_max: int) -> Sequence[LogRange]:
        """Divide a range into parts that several tasks can read."""

    def expect(self, parts: Iterable[LogRange]) -> None:
        """Announce the parts that are read next, in this order.

        If each part costs a request, small parts are fetched together.
        """

    def read(self, part: LogRange) -> Iterator[LogBlock | DamagedRange]:
        """Yield the runs that hold a part's records; the first and last may contain other records too."""

    def rows(self, part: LogRange) -> Iterator[Rows | DamagedRange]:
        """Yield the index rows of the runs that hold a part's records, without their bytes."""

    def close(self) -> None:
        """Close what is open; the next call opens it again."""


def despite_loss(
    whole: LogRange,
    on_loss: Callable[[DataLossError], object],
    read: Callable[[LogRange], Iterable[T]],
) -> Iterator[T]:
    """Yield what `read` returns for a range; after a loss, unless `on_loss` raises, for its rest."""
    rest: LogRange | None = whole
    while rest is not None:
        try:
            yield from read(rest)
            return
        except DataLossError as loss:
            on_loss(loss)
            rest = loss.rest


def open_log(place: LogLocation) -> LogView:
    """Open the log at this location: a data directory or a running server."""
    # Imported here, because both modules import this one.
    if place.path:
        from headrace.reader.files import FileLog

        return FileLog(place.path)
    from headrace.reader.server import ServerLog

    return ServerLog(place)
