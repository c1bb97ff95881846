"""What an export is told: which topics, and where they are. Refuses what makes no sense."""

import json
import re

from headrace.spark.options import OptionError, SourceOptions, parse_source


def source_options(
    topics: tuple[str, ...],
    pattern: str,
    place: dict[str, str],
    *,
    batch_bytes: int,
    part_bytes: int,
    skip_lost: bool,
) -> SourceOptions:
    """As a streaming query would have them: `place` is its `path`, or its `url` and `token`."""
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
            # What is gone is left out and found missing afterwards: then it is decided whether that is an
            # error. So is damage, where it is none.
            "failOnDataLoss": "false",
            "verifyChecksums": "false" if skip_lost else "true",
        },
        streaming=True,
    )
