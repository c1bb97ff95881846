"""What all jobs are told: which topics, and a directory to write to. Refuses what makes no sense."""

import re
import uuid
from collections.abc import Iterable
from pathlib import Path

from headrace.lake.format import LakeError
from headrace.lake.manifests import HIDDEN
from headrace.lake.syncing import make_directory
from headrace.spark.options import OptionError, Topics


def topics_of(topics: Iterable[str], pattern: str) -> Topics:
    """Those that are named, those of a pattern, or all."""
    names = tuple(dict.fromkeys(topics))
    if names and pattern:
        raise OptionError("topics and a pattern exclude each other: give one of them")
    try:
        re.compile(pattern)
    except re.error as error:
        raise OptionError(f"the pattern is no regular expression: {error}") from None
    return Topics(names) if names else Topics(pattern=pattern or "(?s:.*)")


def make_writable(directory: Path) -> None:
    """The directory is there, and something can be written to it."""
    try:
        make_directory(directory / HIDDEN)
        made = directory / HIDDEN / f"probe-{uuid.uuid4().hex}"
        made.touch()
        made.unlink()
    except OSError as error:
        raise LakeError(f"{directory} cannot be written to: {error.strerror}") from None


def check_apart(lake: Path, into: Path) -> None:
    """A table beside a lake is not a part of it: whoever takes all files of one would take those of both."""
    one, other = lake.resolve(), into.resolve()
    if one == other:
        raise LakeError(f"{into} is the lake itself: name another directory")
    if one in other.parents or other in one.parents:
        raise LakeError(f"{into} and the lake {lake} lie in each other: name another directory")
