"""Streaming reads: where a query begins, where each micro-batch ends, and which records are lost.

The checkpoint holds a position with epoch for each topic. Topics that are created later join at their
beginning. A topic that is destroyed and made again continues at the old end, so lost records are counted by
ordinals. The query is told of every lost record, unless the user has chosen to ignore data loss.
"""

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from headrace.model import Span
from headrace.printing import quoted
from headrace.reader.planning import (
    LATEST,
    Positions,
    SourceOptions,
    Where,
    check_positions,
    earlier,
    find_topics,
    gone_error,
    kept,
    limit_bytes,
    limit_rows,
    locate,
    parts_of,
    ranges_between,
)
from headrace.reader.view import DataLossError, LogView, TopicState, open_log
from headrace.spark.columns import PartReader, ReadPartition
from headrace.spark.progress import (
    Group,
    Offset,
    decode_offset,
    encode_offset,
    is_initial,
    joined_in,
)

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.5
"""Time to wait in `latestOffset` before reporting nothing new: Spark asks again at once."""


BEHIND_S = 10.0
"""Time that a batch waits for files to reach its end: they are a few seconds behind the server."""


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream.format("headrace")`."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._parts = PartReader(options, schema)
        self._log: LogView | None = None
        self._group: Group | None = None
        """Set by the first access to the log. Readers in tasks do not set it."""
        self._initial: Offset | None = None
        self._states: dict[str, TopicState] = {}
        self._idle: tuple[Offset, dict[str, TopicState]] | None = None
        """The last start offset without new records, and the topics then. Spark asks for it repeatedly."""
        self._unknown: set[str] = set()
        """Destroyed topics whose end is unknown. The user was already warned about them."""
        self._until: dict[str, TopicState] | None = None

    # Calls from Spark in the driver

    def initialOffset(self) -> Offset:
        # Spark asks twice for the first batch, and both answers must be equal.
        if self._initial is None:
            where = self._options.starting or Where(LATEST)
            states = find_topics(self._open(), self._options.topics)
            missing = [name for name in self._options.topics.names or () if name not in states]
            if missing:
                logger.warning(
                    "there is no topic %s yet: the query waits for it", quoted(missing[0])
                )
            found = {
                name: locate(
                    log=self._open(),
                    state=state,
                    where=where,
                    options=self._options,
                    otherwise=LATEST,
                )
                for name, state in states.items()
            }
            self._states = states
            self._initial = encode_offset(found, self._options.group, initial=True)
        return self._initial

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        if self._idle is not None and self._idle[0] == start:
            self._open().wait(IDLE_WAIT_S)
        states = find_topics(self._open(), self._options.topics)
        if self._idle == (start, states):
            return start
        begun = decode_offset(start)
        if self._group is not None:
            self._group.check(begun)
        new = [n for n in states if n not in begun and (self._until is None or n in self._until)]
        begins = begun | {name: states[name].start for name in new}
        ends = self._ends(begins, states, limit)
        joined = {name: begins[name] for name in (begins if is_initial(start) else new)}
        if joined or ends != begun:
            return encode_offset(ends, self._options.group, joined)
        if self._until is None:
            self._idle = start, states
        return start

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.rows_max is not None:
            return ReadMaxRows(self._options.rows_max)
        if self._options.bytes_max is not None:
            return ReadMaxBytes(self._options.bytes_max)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> Offset | None:
        if not self._states:
            return None
        ends = {name: state.end for name, state in self._states.items()}
        return encode_offset(ends, self._options.group)

    def prepareForTriggerAvailableNow(self) -> None:
        self._until = find_topics(self._open(), self._options.topics)

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        ends = decode_offset(end)
        # The first batch records where the query began. The options may give another start now.
        begun = {} if is_initial(start) else decode_offset(start)
        begun |= joined_in(end)
        wanted = {
            name: begun[name]
            for name, at in ends.items()
            if name in begun and begun[name].ordinal < at.ordinal
        }
        states = self._states_at(wanted, ends)
        begun = self._checked(wanted, states, ends)
        ranges = ranges_between(
            begun, {name: earlier(ends[name], states[name].end) for name in begun}
        )
        return [ReadPartition(task) for task in parts_of(self._open(), ranges, self._options)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._parts.read(partition)

    def commit(self, end: Offset) -> None:
        """Do nothing: the checkpoint holds the progress, and `track` reports it to the server."""

    def stop(self) -> None:
        if self._log is not None:
            self._log.close()
        if self._group is not None:
            self._group.close()
            self._group = None

    # Ends of micro-batches

    def _ends(self, start: Positions, states: dict[str, TopicState], limit: ReadLimit) -> Positions:
        missing = {name: at for name, at in start.items() if name not in states}
        over = self._check_missing(missing) if missing else ()
        self._states = states
        if self._until is not None:
            states = _until(states, self._until)
        states = {name: state for name, state in states.items() if name in start}
        begun = self._checked({name: start[name] for name in states}, states)
        ends = {name: state.end for name, state in states.items()}
        rows_max, bytes_max = self._options.rows_max, self._options.bytes_max
        if isinstance(limit, ReadAllAvailable):
            rows_max = bytes_max = None
        if rows_max is not None:
            ends |= limit_rows(self._open(), begun, states, rows_max)
        if bytes_max is not None:
            by_bytes = limit_bytes(self._open(), begun, states, bytes_max)
            ends = {name: earlier(ends[name], by_bytes.get(name, ends[name])) for name in ends}
        if all(ends[name].ordinal == start[name].ordinal for name in ends):
            ends = {}  # a new epoch without new records needs no batch
        return {name: at for name, at in start.items() if name not in over} | ends

    def _states_at(self, wanted: Positions, ends: Positions) -> dict[str, TopicState]:
        """Wait until the topics reach the end of a planned batch, or for BEHIND_S, and return them."""
        log = self._open()
        until_s = time.monotonic() + BEHIND_S
        while True:
            states = find_topics(log, self._options.topics)
            behind = [n for n in wanted if n in states and states[n].end.ordinal < ends[n].ordinal]
            if self._options.place.path:
                # Files are behind the server: a new topic appears in them when the journal is applied.
                behind += [n for n in wanted if n not in states]
            if not behind or time.monotonic() > until_s:
                return states
            log.wait(IDLE_WAIT_S)

    # Lost records

    def _checked(
        self, start: Positions, states: Mapping[str, TopicState], ends: Positions | None = None
    ) -> Positions:
        """Return the positions, moved to the oldest kept record if they are lost.

        Raise `DataLossError` for lost records if `failOnDataLoss` is set.
        """
        try:
            check_positions(start, states, ends)
        except DataLossError as loss:
            if self._options.fail_on_data_loss:
                raise
            logger.warning("%s", loss)
        log = self._open()
        return {name: kept(log, states[name], at) for name, at in start.items() if name in states}

    def _check_missing(self, missing: Positions) -> Collection[str]:
        """Report records that were lost because their topic was destroyed before the query read them.

        Return the topics that have certainly ended. If such a topic is made again, it begins after everything
        that was read.
        """
        ended = self._open().ended(missing)
        gone: dict[str, int] = {}
        for name, position in missing.items():
            last = ended.get(name) or (self._states[name].end if name in self._states else None)
            if last is None and name not in self._unknown:
                self._unknown.add(name)
                logger.warning(
                    "topic %s no longer exists: records after ordinal %d, if there were any, are lost",
                    quoted(name),
                    position.ordinal,
                )
            elif last is not None and last.ordinal > position.ordinal:
                gone[name] = Span.between(position, last).records
        if gone and self._options.fail_on_data_loss:
            raise DataLossError(gone_error(gone, "it was destroyed"))
        if gone:
            logger.warning("%s", gone_error(gone, "it was destroyed"))
        return ended

    def _open(self) -> LogView:
        if self._log is None:
            if self._options.group and self._group is None:
                self._group = Group(self._options)
            self._log = open_log(self._options.place)
        return self._log


def _until(
    states: Mapping[str, TopicState], until: Mapping[str, TopicState]
) -> dict[str, TopicState]:
    """Return the topics, cut at the ends that they had when the query began."""
    return {
        name: state._replace(end=earlier(state.end, until[name].end))
        for name, state in states.items()
        if name in until
    }
