"""Arguments of an export: the topics and the location of the log. Rejects invalid values."""

import json
import re

from headrace.errors import OptionError
from headrace.reader.planning import SourceOptions
from headrace.spark.options import parse_source


def source_options(
    topics: tuple[str, ...],
    pattern: str,
    place: dict[str, str],
    *,
    batch_bytes: int,
    part_bytes: int,
    skip_lost: bool,
) -> SourceOptions:
    """Return the options of a streaming query; `place` is its `path`, or its `url` and `token`."""
    if topics and pattern:
        raise OptionError("topics and a pattern exclude each other: give one of them")
    if not any(place.values()):
        raise OptionError("say where the log is: give a server's address or a data directory")
    try:
        re.compile(pattern)
    except re.error as error:
        raise OptionError(f"the pattern is no regular expression: {error}") from None
    which = (
        {"subscribe": json.dumps(topics)} if topics else {"subscribePattern": pattern or "(?s:.*)"}
    )
    return parse_source(
        {
            **place,
            **which,
            "maxBytesPerTrigger": str(batch_bytes),
            "maxBytesPerPartition": str(part_bytes),
            # Tasks skip lost records. The driver then finds them missing and decides if that is an error.
            # With `skip_lost`, the same holds for damaged records.
            "failOnDataLoss": "false",
            "verifyChecksums": "false" if skip_lost else "true",
        },
        streaming=True,
    )
