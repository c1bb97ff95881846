"""The selection of records to read: the log's location, topics, start, end, and the division of the work."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from headrace.errors import OptionError


class LogLocation(NamedTuple):
    """Location of the log: either `path` or `urls`."""

    path: str = ""
    urls: tuple[str, ...] = ()
    token: str = ""

    def __repr__(self) -> str:
        return f"Place(path={self.path!r}, urls={self.urls!r})"  # never show the token


def parse_place(url: str, token: str) -> LogLocation:
    """Parse the address of one server, or of several separated by commas."""
    urls = tuple(one.strip().rstrip("/") for one in url.split(","))
    for one in urls:
        if not re.fullmatch(r"https?://([^/?#@:\s\[\]]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?", one):
            raise OptionError(
                f"url must be http://host:port of a server's --http listener (port 8121 by default), not "
                f"{without_secret(one)!r}"
            )
    if not re.fullmatch(r"[!-~]*", token):
        raise OptionError("token must be one word of ASCII, as the server's configuration has it")
    return LogLocation(urls=urls, token=token)


def without_secret(url: str) -> str:
    """Mask everything before an `@` in an address, because it may be a password."""
    return re.sub(r"//[^/]*@", "//…@", url)


PARTITION_BYTES = 64 << 20
"""Maximum bytes that a task reads, unless `maxBytesPerPartition` says otherwise."""

EARLIEST, LATEST = -2, -1
"""The numbers that Kafka uses for these positions where an offset is expected."""


class Where(NamedTuple):
    """Start or end of a read, as the user gave it."""

    everywhere: int | None = None
    """An offset, EARLIEST or LATEST, for topics that `topics` does not name."""
    topics: Mapping[str, int] = {}
    ms: int | None = None


class TopicSelection(NamedTuple):
    """The topics to read: a list of names, or a pattern."""

    names: tuple[str, ...] | None = None
    pattern: str = ""

    def matches(self, name: str) -> bool:
        if self.names is not None:
            return name in self.names
        return re.fullmatch(self.pattern, name) is not None


class SourceOptions(NamedTuple):
    place: LogLocation
    topics: TopicSelection
    starting: Where | None
    ending: Where | None
    rows_max: int | None
    bytes_max: int | None
    partitions_min: int
    partition_bytes: int
    fail_on_data_loss: bool
    verify: bool
    group: str
    decode: str
