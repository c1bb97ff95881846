"""A stream's `groupId` belongs to one query at a time: finds another one that uses it, here or elsewhere.

On one machine a file is locked while a query runs; the lock ends with its process, however that ends. Queries
on other machines show by the cursor of the group, which `track` moves: it never lies ahead of what its own
query has read.
"""

import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from headrace.model import Position
from headrace.spark.http_client import HttpClient, ServerError
from headrace.spark.log_view import SourceError
from headrace.spark.options import SourceOptions

LOCK_WAIT_S = 10.0
"""How long the lock of a query is waited for that was stopped or killed just now."""

CHECK_S = 5.0
"""Time between looks at the cursor."""

_POLL_S = 0.1
_CURSORS_MAX = 100
"""Cursors that are looked at: one in the wrong place is enough."""


class GroupInUseError(SourceError):
    """Another query has the same groupId: give each query one of its own."""


class _Moved(NamedTuple):
    ordinal: int
    ms: int


class Group:
    """The group of one query, while it runs."""

    def __init__(self, options: SourceOptions) -> None:
        self._name = options.group
        self._lock = _lock(options)
        self._http = HttpClient(options.place, retry_s=0.0) if options.place.urls else None
        self._before = self._cursors()
        self._checked_s = time.monotonic()

    def check(self, read: Mapping[str, Position]) -> None:
        """Raise `GroupInUseError` if somebody has moved the cursor past what this query has read.

        A cursor that lay there when the query started is none of its business: it may begin anew.
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
        """None where nobody can say."""
        if self._http is None:
            return None
        asked = {"reader": f"group:{self._name}", "limit": _CURSORS_MAX}
        try:
            page = self._http.json("GET", "/v1/cursors", asked)
        except ServerError:
            return None  # the query itself says what is wrong with the server
        return {one["topic"]: _Moved(one["ordinal"], one["ms"]) for one in page["cursors"]}

    def close(self) -> None:
        os.close(self._lock)
        if self._http is not None:
            self._http.close()


def _lock(options: SourceOptions) -> int:
    """The open file of a group that reads these topics of this log. Another that reads others is no harm."""
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
