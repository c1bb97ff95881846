"""Keeps the progress of streaming queries on the server, as cursors of named readers."""

import atexit
import contextlib
import json
import logging
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from headrace.errors import HeadraceError
from headrace.spark.http_client import HttpClient
from headrace.spark.offsets import decode_offset, group_of
from headrace.spark.options import parse_place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

_POSITIONS_AT_ONCE = 1000
_LAST_WORDS_MS = 10_000
_RETRY_S = 2.0
"""Short: the next batch brings the next attempt, and other listeners wait meanwhile."""


def track(spark: "SparkSession", url: str, token: str = "") -> StreamingQueryListener:
    """From now on, keep the progress of every query with a `groupId` on the server at `url`.

    The cursor of group NAME is called `group:NAME`. Returns the listener, for `spark.streams.removeListener`.
    """
    listener = _Tracker(url, token)
    spark.streams.addListener(listener)
    atexit.register(_wait_for_listeners, spark)
    return listener


def _wait_for_listeners(spark: "SparkSession") -> None:
    """A script may end with its query: what Spark has yet to say of the last batch is heard first."""
    # A session that is stopped has said it, and a client of Spark Connect has no such thing.
    with contextlib.suppress(Exception):
        bus = spark.sparkContext._jsc.sc().listenerBus()
        bus.waitUntilEmpty(_LAST_WORDS_MS)


class _Tracker(StreamingQueryListener):
    def __init__(self, url: str, token: str) -> None:
        self._place = parse_place(url, token)
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
                logger.warning("the progress of a query could not be kept: %s", error)

    def _send(self, reader: str, offset: dict[str, Any]) -> None:
        positions = [{"topic": name, **at._asdict()} for name, at in decode_offset(offset).items()]
        client = HttpClient(self._place, retry_s=_RETRY_S)
        try:
            for first in range(0, len(positions), _POSITIONS_AT_ONCE):
                some = positions[first : first + _POSITIONS_AT_ONCE]
                client.json("POST", "/v1/cursors", {}, {"reader": reader, "positions": some})
        finally:
            client.close()
