"""Progress of a streaming query: the offset in its checkpoint, and its cursors on the server.

Spark stores only the end of each batch, which is the start of the next. Therefore the offset also contains,
under `joined`, the start of each topic that the batch is the first to read. A repeated batch then reads the
same records again, even if the options or the log have changed.

`track` reports the progress to the server, as cursors of named readers. The `groupId` of a stream belongs to
one query at a time. On one machine, a file is locked while a query runs; the system releases the lock when
the process ends in any way. A query on another machine is detected by the cursor of the group: it is never
ahead of what its own query has read.
"""

import atexit
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql.streaming.listener import StreamingQueryListener

from headrace.errors import HeadraceError
from headrace.model import Position, present_name
from headrace.reader.http_client import HttpClient, ServerError
from headrace.reader.planning import Positions, SourceOptions
from headrace.reader.view import LogLocation, SourceError, parse_place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

FORMAT = 2
"""Current format. In format 1, reserved topics have the names `channel/…` and `logux/…` of earlier versions.
"""
_FORMATS = (1, 2)

Offset = dict[str, Any]


def encode_offset(
    positions: Positions, group: str, joined: Positions | None = None, *, initial: bool = False
) -> Offset:
    """Encode an offset with its topics sorted by name: Spark compares offsets as text."""
    offset: Offset = {"format": FORMAT, "group": group, "topics": _encode(positions)}
    if joined:
        offset["joined"] = _encode(joined)
    if initial:
        offset["initial"] = True
    return offset


def _encode(positions: Positions) -> dict[str, list[int]]:
    return {name: list(positions[name]) for name in sorted(positions)}


def decode_offset(offset: Mapping[str, Any]) -> Positions:
    if offset.get("format") not in _FORMATS:
        raise SourceError(
            f"the checkpoint holds an offset of format {offset.get('format')}, this version reads "
            f"{FORMAT}: start the query with a new checkpoint, or with the version that wrote it"
        )
    return _decode(offset, "topics")


def joined_in(offset: Mapping[str, Any]) -> Positions:
    """Return the topics that the batch is the first to read, with their start positions."""
    return _decode(offset, "joined")


def is_initial(offset: Mapping[str, Any]) -> bool:
    """True if the offset is the start of a query.

    No checkpoint contains such an offset, and Spark may ask for it again.
    """
    return bool(offset.get("initial"))


def _decode(offset: Mapping[str, Any], key: str) -> Positions:
    found = {name: Position(*position) for name, position in offset.get(key, {}).items()}
    if offset.get("format") == 1:
        return {present_name(name.encode()).decode(): at for name, at in found.items()}
    return found


def group_of(offset: Mapping[str, Any]) -> str:
    """Return the query's name as a reader; empty if it has none."""
    return str(offset.get("group", "")) if offset.get("format") in _FORMATS else ""


# Groups

LOCK_WAIT_S = 10.0
"""Time to wait for the lock of a query that was stopped or killed just now."""

CHECK_S = 5.0
"""Seconds between checks of the cursors."""

_POLL_S = 0.1
_CURSORS_MAX = 100
"""Number of cursors that are checked: one in the wrong place is enough to detect another query."""


class GroupInUseError(SourceError):
    """Another query has the same groupId: give each query its own."""


class _Moved(NamedTuple):
    ordinal: int
    ms: int


class Group:
    """The group of one running query."""

    def __init__(self, options: SourceOptions) -> None:
        self._name = options.group
        self._lock = _lock(options)
        self._http = HttpClient(options.place, retry_s=0.0) if options.place.urls else None
        self._before = self._cursors()
        self._checked_s = time.monotonic()

    def check(self, read: Mapping[str, Position]) -> None:
        """Raise `GroupInUseError` if another query has moved a cursor past what this query has read.

        A cursor that was already ahead when the query started is ignored: the query may have been restarted
        from the beginning.
        """
        now_s = time.monotonic()
        if now_s < self._checked_s + CHECK_S:
            return
        self._checked_s = now_s
        cursors = self._cursors()
        if self._before is None or cursors is None:
            self._before = cursors
            return
        for topic, found in cursors.items():
            at = read.get(topic)
            if at is not None and at.ordinal < found.ordinal and found != self._before.get(topic):
                raise GroupInUseError(
                    f"another query has the groupId {self._name!r}: it has moved the cursor in topic "
                    f"{topic!r} to ordinal {found.ordinal}, and this query is at {at.ordinal}. Give each "
                    "query a groupId of its own"
                )

    def _cursors(self) -> dict[str, _Moved] | None:
        """Return the group's cursor in each topic; None if the server cannot be asked."""
        if self._http is None:
            return None
        asked = {"reader": f"group:{self._name}", "limit": _CURSORS_MAX}
        try:
            page = self._http.json("GET", "/v1/cursors", asked)
        except ServerError:
            return None  # the query itself reports what is wrong with the server
        return {one["topic"]: _Moved(one["ordinal"], one["ms"]) for one in page["cursors"]}

    def close(self) -> None:
        os.close(self._lock)
        if self._http is not None:
            self._http.close()


def _lock(options: SourceOptions) -> int:
    """Lock the file of this group, log and topics, and return its descriptor.

    Queries of the same group that read other topics do not conflict.
    """
    key = repr((options.place.path, sorted(options.place.urls), options.topics, options.group))
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    path = Path(tempfile.gettempdir(), f"headrace-group-{os.getuid()}-{name}.lock")
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(path, flags, 0o600)
    until_s = time.monotonic() + LOCK_WAIT_S
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(file, 0)
            os.pwrite(file, str(os.getpid()).encode(), 0)
            return file
        if time.monotonic() > until_s:
            owner = os.pread(file, 32, 0).decode("ascii", "replace")
            os.close(file)
            raise GroupInUseError(
                f"another query on this machine has the groupId {options.group!r} and reads the same topics "
                f"(process {owner}): give each query a groupId of its own"
            )
        time.sleep(_POLL_S)


# Reports to the server

_POSITIONS_AT_ONCE = 1000
_LAST_WORDS_MS = 10_000
_RETRY_S = 2.0
"""Short, because the next batch is another attempt and other listeners have to wait."""


def track(
    spark: "SparkSession", url: str, token: str = "", ca: str = "", *, insecure_token: bool = False
) -> StreamingQueryListener:
    """From now on, store the progress of every query with a `groupId` on the server at `url`.

    The cursor of group NAME is called `group:NAME`. Return the listener, for `spark.streams.removeListener`.
    With `insecure_token`, the token is also sent without TLS to another machine.
    """
    listener = _Tracker(parse_place(url, token, ca, insecure_token=insecure_token))
    spark.streams.addListener(listener)
    atexit.register(_wait_for_listeners, spark)
    return listener


def _wait_for_listeners(spark: "SparkSession") -> None:
    """Wait for the events of the last batch, because a script may end together with its query."""
    from headrace.spark.session import java_context

    # A stopped session has delivered its events, and a client of Spark Connect has no listener bus.
    with contextlib.suppress(Exception):
        java_context(spark).listenerBus().waitUntilEmpty(_LAST_WORDS_MS)


class _Tracker(StreamingQueryListener):
    def __init__(self, place: LogLocation) -> None:
        self._place = place
        self._sent: dict[str, object] = {}

    def onQueryStarted(self, event: Any) -> None: ...

    def onQueryTerminated(self, event: Any) -> None: ...

    def onQueryIdle(self, event: Any) -> None: ...

    def onQueryProgress(self, event: Any) -> None:
        for source in event.progress.sources:
            try:
                offset = json.loads(source.endOffset)
                group = group_of(offset) if isinstance(offset, dict) else ""
                if group and self._sent.get(group) != offset:
                    self._send(f"group:{group}", offset)
                    self._sent[group] = offset
            except (HeadraceError, ValueError, TypeError) as error:
                logger.warning("the progress of a query could not be stored: %s", error)

    def _send(self, reader: str, offset: dict[str, Any]) -> None:
        positions = [{"topic": name, **at._asdict()} for name, at in decode_offset(offset).items()]
        with contextlib.closing(HttpClient(self._place, retry_s=_RETRY_S)) as client:
            for first in range(0, len(positions), _POSITIONS_AT_ONCE):
                some = positions[first : first + _POSITIONS_AT_ONCE]
                client.json("POST", "/v1/cursors", {}, {"reader": reader, "positions": some})
