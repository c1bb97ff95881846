"""Read records from the lake that the log of a topic no longer has. Does not need Spark.

A gap takes the place of the missed messages in a subscription. When the subscription reaches the gap, a
thread reads it, some thousands of records at a time. Records that the lake does not have either are reported
as missed. A lake stores offsets. Over Wombat its records get serials of the form `@OFFSET`, from which a
Headrace server resumes.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike, fspath

from headrace.errors import ConfigError, HeadraceError
from headrace.model import RECORD_HEADER_BYTES
from headrace.printing import quoted
from headrace.session.topics.events import Missed, Place, missed

logger = logging.getLogger(__name__)

Batch = Sequence[tuple[Place, bytes]]
"""Messages: for each, the place just past it and its payload."""

Rows = list[tuple[int, bytes]]
"""Records of a lake: for each, the offset just past it and its payload."""


ReadLake = Callable[[str, int], Iterator[Rows]]
"""Function of a topic and an offset that returns the records from there on, in order."""


def open_lake(
    place: str | PathLike[str],
    options: Mapping[str, str] | None = None,
    catalog: Mapping[str, str] | None = None,
) -> ReadLake:
    """Return a function that reads the lake at a place; raise ConfigError if it cannot be read."""
    try:
        from headrace.lake.files.reading import read_topic
        from headrace.lake.storage.storage import storage_of
        from headrace.lake.table import open_table

        storage = storage_of(fspath(place), options, catalog)
        open_table(storage)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"reading from a lake needs: pip install 'headrace[lake]' ({error})"
        ) from None
    except HeadraceError as error:
        raise ConfigError(str(error)) from None
    # The table is opened anew for each gap, because exports continue meanwhile.
    return lambda topic, offset: read_topic(storage, open_table(storage), topic, offset)


class LakeGap:
    """Offsets of a topic that the log no longer has, from `begin` to `end`."""

    def __init__(
        self,
        read_lake: ReadLake,
        topic: str,
        begin: int,
        end: int,
        *,
        has_serials: bool,
        tell: Callable[[Missed], None],
    ) -> None:
        self._read_lake = read_lake
        self._topic = topic
        self._at = begin
        self._end = end
        self._has_serials = has_serials
        self._tell = tell
        self._records: Iterator[Rows] | None = None
        self._reading: asyncio.Future[Rows | None] | None = None

    async def next(self) -> Batch:
        """Return the next records of the gap; empty at its end. If it is cancelled, nothing is lost."""
        while self._at < self._end:
            if self._reading is None:
                self._reading = asyncio.ensure_future(asyncio.to_thread(self._read))
            found = await asyncio.shield(self._reading)
            self._reading = None
            if found is None:
                self._miss(self._end)
            elif batch := self._mine(found):
                return batch
        return []

    def _read(self) -> Rows | None:
        try:
            if self._records is None:
                self._records = self._read_lake(self._topic, self._at)
            return next(self._records, None)
        except Exception as error:  # errors of files, of Arrow, of the table's library
            logger.error("topic %s cannot be read from the lake: %s", quoted(self._topic), error)
            return None

    def _mine(self, found: Rows) -> Batch:
        """Return the records that belong to the gap; report offsets between them as missed."""
        batch: list[tuple[Place, bytes]] = []
        for end, payload in found:
            begin = end - RECORD_HEADER_BYTES - len(payload)
            if begin < self._at:
                continue
            if end > self._end:
                self._miss(self._end)
                break
            self._miss(begin)
            batch.append((self._place(end), payload))
            self._at = end
        return batch

    def _miss(self, until: int) -> None:
        if until > self._at:
            self._tell(missed(self._topic, self._place(self._at), self._place(until)))
            self._at = until

    def _place(self, offset: int) -> Place:
        return f"@{offset}" if self._has_serials else offset
