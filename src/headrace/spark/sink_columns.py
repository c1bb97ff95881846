"""What a frame must have to be written, and what its rows become: topics and payloads."""

from typing import NamedTuple

import pyarrow as pa
from pyspark.sql.types import BinaryType, StringType, StructType

from headrace.errors import BadTopicNameError, HeadraceError
from headrace.log.blocks import check_block_topic
from headrace.model import CHANNEL_PREFIX, LOGUX_PREFIX, check_publish_topic
from headrace.spark.columns import TYPES, check_type
from headrace.spark.envelopes import Stamps, envelope_of
from headrace.spark.options import OptionError, SinkOptions

POSITIONS = frozenset(TYPES) - {"topic", "payload"}
"""Columns of the source that say where a record was: what is written gets places of its own."""


class SinkError(HeadraceError, ValueError):
    """A row cannot be written: the message says why."""


class Written(NamedTuple):
    """Which columns are written."""

    topic: str
    """The topic of all rows; empty when each names its own."""
    encode: str
    members: tuple[str, ...]
    """The columns that go into an envelope."""
    processor: str = ""
    """Who sends all rows; empty when each says it, or none has such."""

    @property
    def prefix(self) -> str:
        """The name space of all topics that are written to; empty for ordinary ones."""
        return envelope_of(self.encode).prefix if self.encode else ""

    def rows(self, batch: pa.RecordBatch, stamps: Stamps) -> tuple[pa.Array | str, pa.Array]:
        """Topics and payloads of a batch."""
        if self.encode:
            if self.processor:
                names = pa.repeat(pa.scalar(self.processor), batch.num_rows)
                batch = batch.append_column("processor", names)
            payloads = envelope_of(self.encode).encode(batch.select(list(self.members)), stamps)
        else:
            payloads = batch.column("payload").cast(pa.binary())
        return self.topic or batch.column("topic").cast(pa.string()), payloads


def check_written_topic(topic: str, prefix: str) -> None:
    """Raise SinkError for a topic that rows of this envelope, or of none, cannot be written to."""
    try:
        if prefix and topic.startswith(prefix):
            check_block_topic(topic)
        elif prefix:
            raise SinkError(
                f"this encode writes to topics that begin with {prefix!r}, not to {topic!r}"
            )
        elif topic.startswith(LOGUX_PREFIX):
            raise SinkError(
                f"topic {topic!r} is a log of Logux: give encode = logux to write events to it"
            )
        elif topic.startswith(CHANNEL_PREFIX):
            raise SinkError(
                f"topic {topic!r} is a channel: give encode = channel to write messages to it"
            )
        else:
            check_publish_topic(topic)
    except BadTopicNameError as error:
        raise SinkError(str(error)) from None


def written_columns(schema: StructType, options: SinkOptions) -> Written:
    fields = {field.name: field.dataType for field in schema.fields}
    if "topic" in fields and options.topic:
        raise OptionError(
            "the option topic and the column topic contradict each other: leave out one, for instance "
            "with .drop('topic')"
        )
    if "topic" not in fields and not options.topic:
        raise OptionError("say where to write: give the option topic, or a column topic")
    if "topic" in fields and not isinstance(fields["topic"], StringType):
        raise OptionError(f"the column topic must be string, not {fields['topic'].simpleString()}")
    if options.topic:
        _check_option(options)
    if options.encode:
        envelope = envelope_of(options.encode)
        others = {name: kind for name, kind in fields.items() if name != "topic"}
        for name, kind in others.items():
            check_type(name, kind)
        if not others:
            raise OptionError(f"encode = {options.encode} needs a column beside topic to encode")
        if options.processor and "processor" in others:
            raise OptionError(
                "the option processor and the column processor contradict each other: leave out one, for "
                "instance with .drop('processor')"
            )
        if options.processor:
            others["processor"] = StringType()
        members = envelope.members(others)
        return Written(options.topic, options.encode, members, options.processor)
    if "payload" not in fields:
        raise OptionError(
            "there is no column payload to write; with encode = json all columns become one"
        )
    if not isinstance(fields["payload"], BinaryType | StringType):
        raise OptionError(
            f"the column payload must be binary or string, not {fields['payload'].simpleString()}"
        )
    unwritten = [name for name in fields if name not in POSITIONS | {"topic", "payload"}]
    if unwritten:
        raise OptionError(
            f"the column {unwritten[0]!r} would not be written: select topic and payload, or give "
            "encode = json to make payloads of all columns"
        )
    return Written(options.topic, "", ())


def _check_option(options: SinkOptions) -> None:
    prefix = envelope_of(options.encode).prefix if options.encode else ""
    try:
        check_written_topic(options.topic, prefix)
    except SinkError as error:
        raise OptionError(f"topic makes no sense: {error}") from None
