"""Options of source and sink: names, meanings, checks. Knows no Spark and opens nothing."""

import datetime
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from headrace.errors import BadTopicNameError, OptionError
from headrace.model import check_topic_name
from headrace.payload.channel import BadMessageError, check_processor
from headrace.reader.planning import (
    EARLIEST,
    LATEST,
    PARTITION_BYTES,
    SourceOptions,
    TopicSelection,
    Where,
)
from headrace.reader.view import LogLocation, parse_place, without_secret

_NUMBER_MAX = (1 << 63) - 1
_1970 = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


_OTHERS = ""
"""Key for all topics that are not named. A topic cannot have this name."""


class SinkOptions(NamedTuple):
    place: LogLocation
    topic: str
    producer: str
    batch: int | None
    encode: str
    processor: str


_SOURCE = {
    "path": "a data directory",
    "url": "http://host:port of a running server's --http listener, or several with commas",
    "token": "an access token of that server",
    "ca": "a file, on every machine, with the authority of an https server's certificate",
    "insecureToken": "true to send the token also without TLS to another machine",
    "subscribe": "topics, with commas or as a JSON list",
    "subscribePattern": "a regular expression that whole names match",
    "startingOffsets": "earliest, latest, or JSON with an offset per topic",
    "endingOffsets": "the same, of batch reads",
    "startingTimestamp": "milliseconds since 1970, or ISO 8601",
    "endingTimestamp": "the same, of batch reads",
    "maxRowsPerTrigger": "rows of one micro-batch",
    "maxOffsetsPerTrigger": "the same under Kafka's name",
    "maxBytesPerTrigger": "bytes of one micro-batch",
    "minPartitions": "at least so many tasks",
    "maxBytesPerPartition": "bytes that one task reads",
    "failOnDataLoss": "true or false",
    "verifyChecksums": "true or false",
    "groupId": "the name under which a query's progress is kept on the server",
    "decode": "what payloads are: json, logux or channel",
}
_SINK = {
    "url": _SOURCE["url"],
    "token": _SOURCE["token"],
    "ca": _SOURCE["ca"],
    "insecureToken": _SOURCE["insecureToken"],
    "topic": "the topic of rows without a column `topic`",
    "producer": "who writes, so that a repeated batch is recognised",
    "batchId": "the number of a batch write of that producer",
    "encode": "what payloads become: json, logux or channel",
    "processor": "who sends rows without a column `processor`, with encode = channel",
}
# Spark adds these options by itself.
_OF_SPARK = frozenset({"checkpointlocation", "queryname"})


def parse_source(options: Mapping[str, str], *, streaming: bool) -> SourceOptions:
    given = _known(options, _SOURCE, "read")
    topics = _topics(given)
    if "maxrowspertrigger" in given and "maxoffsetspertrigger" in given:
        raise OptionError("maxRowsPerTrigger and maxOffsetsPerTrigger are the same: give one")
    for key in ("endingOffsets", "endingTimestamp"):
        if streaming and key.lower() in given:
            raise OptionError(f"{key} is for batch reads: a stream has no end")
    for key in ("maxRowsPerTrigger", "maxOffsetsPerTrigger", "maxBytesPerTrigger", "groupId"):
        if not streaming and key.lower() in given:
            raise OptionError(f"{key} is for streams: a batch read has no triggers")
    rows_key = "maxRowsPerTrigger" if "maxrowspertrigger" in given else "maxOffsetsPerTrigger"
    starting = _where(given, "starting", topics)
    ending = _where(given, "ending", topics)
    if not streaming and starting is not None and LATEST in _values(starting):
        raise OptionError("startingOffsets of a batch read cannot be latest: nothing would be read")
    if ending is not None and EARLIEST in _values(ending):
        raise OptionError("endingOffsets cannot be earliest: nothing would be read")
    _check_order(starting, ending)
    group = given.get("groupid", "")
    if "groupid" in given and not 0 < len(group.encode()) <= 200:
        raise OptionError("groupId must have 1 to 200 bytes")
    return SourceOptions(
        place=_place(given, path_allowed=True),
        topics=topics,
        starting=starting,
        ending=ending,
        rows_max=_number(given, rows_key),
        bytes_max=_number(given, "maxBytesPerTrigger"),
        partitions_min=_number(given, "minPartitions") or 1,
        partition_bytes=_number(given, "maxBytesPerPartition") or PARTITION_BYTES,
        fail_on_data_loss=_flag(given, "failOnDataLoss"),
        verify=_flag(given, "verifyChecksums"),
        group=group,
        decode=given.get("decode", ""),
    )


def _check_order(starting: Where | None, ending: Where | None) -> None:
    if starting is None or ending is None:
        return
    if starting.ms is not None and ending.ms is not None and starting.ms > ending.ms:
        raise OptionError("startingTimestamp is after endingTimestamp: nothing would be read")
    for name, end in ending.topics.items():
        if 0 <= end < starting.topics.get(name, -1):
            raise OptionError(
                f"startingOffsets of {name!r} are after endingOffsets: nothing would be read"
            )


def parse_sink(options: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    given = _known(options, _SINK, "write")
    topic = given.get("topic", "")
    if "topic" in given:
        _checked(check_topic_name, topic, "topic")
    producer, batch = given.get("producer", ""), _number(given, "batchId", at_least=0)
    if streaming and batch is not None:
        raise OptionError("batchId is for batch writes: a stream numbers its batches itself")
    if not streaming and bool(producer) != (batch is not None):
        raise OptionError("producer and batchId belong together: give both, or neither")
    if "producer" in given and not 0 < len(producer.encode()) <= 255:
        raise OptionError("producer must have 1 to 255 bytes")
    encode, processor = given.get("encode", ""), given.get("processor", "")
    if "processor" in given and encode != "channel":
        raise OptionError("processor goes with encode = channel: others have none")
    if "processor" in given:
        _checked(check_processor, processor, "processor")
    return SinkOptions(
        place=_place(given, path_allowed=False),
        topic=topic,
        producer=producer,
        batch=batch,
        encode=encode,
        processor=processor,
    )


def _known(options: Mapping[str, str], valid: Mapping[str, str], verb: str) -> dict[str, str]:
    """Return the options by lower-case name, as Spark passes them; raise `OptionError` for an unknown one."""
    names = {name.lower() for name in valid} | _OF_SPARK
    unknown = [key for key in options if key.lower() not in names]
    if unknown:
        listed = ", ".join(valid)
        raise OptionError(
            f"unknown option {unknown[0]!r} to {verb} format headrace with; valid ones are: {listed}"
        )
    return {key.lower(): value for key, value in options.items()}


def _place(given: Mapping[str, str], *, path_allowed: bool) -> LogLocation:
    path, url = given.get("path", ""), given.get("url", "")
    if path_allowed and bool(path) == bool(url):
        raise OptionError("say where the log is: give one of path and url")
    if not path_allowed and not url:
        raise OptionError("say where to write: url is missing")
    for key in ("token", "ca", "insecureToken"):
        if path and key.lower() in given:
            raise OptionError(f"{key} goes with url: files ask for none")
    if re.match(r"(?!file:)\w+://", path):
        raise OptionError(f"path is a directory: give {without_secret(path)!r} as the option url")
    if path:
        return LogLocation(path=path.removeprefix("file://"))
    return parse_place(
        url,
        given.get("token", ""),
        given.get("ca", ""),
        insecure_token=_flag(given, "insecureToken", default=False),
    )


def _topics(given: Mapping[str, str]) -> TopicSelection:
    if ("subscribe" in given) == ("subscribepattern" in given):
        raise OptionError("say which topics: give one of subscribe and subscribePattern")
    if "subscribe" in given:
        return TopicSelection(_names(given["subscribe"].strip()))
    pattern = given["subscribepattern"]
    try:
        re.compile(pattern)
    except re.error as error:
        raise OptionError(f"subscribePattern is not a regular expression: {error}") from None
    return TopicSelection(pattern=pattern)


def _names(text: str) -> tuple[str, ...]:
    if text.startswith("["):
        try:
            names = json.loads(text)
        except ValueError as error:
            raise OptionError(
                f"subscribe begins as a JSON list, but is not valid JSON: {error}"
            ) from None
        if not all(isinstance(name, str) for name in names):
            raise OptionError("subscribe must be a list of topic names")
    else:
        names = [name.strip() for name in text.split(",")]
    for name in names:
        _checked(check_topic_name, name, "subscribe")
    if not names:
        raise OptionError("subscribe names no topic")
    return tuple(sorted(set(names)))


def _checked(check: Callable[[str], object], name: str, key: str) -> None:
    try:
        check(name)
    except (BadTopicNameError, BadMessageError) as error:
        raise OptionError(f"{key} makes no sense: {error}") from None


def _where(given: Mapping[str, str], side: str, topics: TopicSelection) -> Where | None:
    offsets, when = given.get(f"{side}offsets"), given.get(f"{side}timestamp")
    if offsets is not None and when is not None:
        raise OptionError(f"{side}Offsets and {side}Timestamp contradict each other: give one")
    if when is not None:
        return Where(ms=_time_ms(when, f"{side}Timestamp"))
    if offsets is None:
        return None
    key = f"{side}Offsets"
    text = offsets.strip()
    if not text.startswith("{"):
        return Where(everywhere=_offset(text, key))
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise OptionError(f"{key} begins as JSON, but is not valid: {error}") from None
    found = {name: _offset(value, key) for name, value in parsed.items()}
    others = found.pop(_OTHERS, None)
    for name in found:
        if not topics.matches(name):
            raise OptionError(f"{key} names topic {name!r}, which is not selected")
    return Where(others, found)


def _offset(value: object, key: str) -> int:
    if isinstance(value, str) and value.lower() in ("earliest", "latest"):
        return EARLIEST if value.lower() == "earliest" else LATEST
    if isinstance(value, int) and not isinstance(value, bool) and EARLIEST <= value <= _NUMBER_MAX:
        return value
    raise OptionError(
        f"{key} must be earliest, latest or JSON with an offset per topic, not {value!r}"
    )


def _values(where: Where) -> Iterable[int | None]:
    return (where.everywhere, *where.topics.values())


def _time_ms(text: str, key: str) -> int:
    text = text.strip()
    if _is_number(text) and int(text) <= _NUMBER_MAX:
        return int(text)
    try:
        moment = datetime.datetime.fromisoformat(text)
        passed = (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)) - _1970
        # Times have a resolution of one millisecond. A time between two milliseconds is rounded up.
        return max(0, -(-passed // datetime.timedelta(milliseconds=1)))
    except (ValueError, OverflowError):
        raise OptionError(
            f"{key} must be milliseconds since 1970 or ISO 8601, not {text[:40]!r}"
        ) from None


def _number(given: Mapping[str, str], key: str, at_least: int = 1) -> int | None:
    text = given.get(key.lower())
    if text is None:
        return None
    text = text.strip()
    if _is_number(text) and at_least <= int(text) <= _NUMBER_MAX:
        return int(text)
    raise OptionError(f"{key} must be a whole number of at least {at_least}, not {text[:40]!r}")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= len(str(_NUMBER_MAX))


def _flag(given: Mapping[str, str], key: str, *, default: bool = True) -> bool:
    text = given.get(key.lower(), str(default)).strip().lower()
    if text not in ("true", "false"):
        raise OptionError(f"{key} must be true or false, not {text!r}")
    return text == "true"
