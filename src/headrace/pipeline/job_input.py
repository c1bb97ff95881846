"""Checks of arguments that all jobs share: topics, and a directory to write to."""

import re
import uuid
from collections.abc import Iterable
from pathlib import Path

from headrace.errors import OptionError
from headrace.lake.files.durable import make_directory
from headrace.lake.format import LakeError
from headrace.lake.manifests import HIDDEN
from headrace.reader.planning import TopicSelection


def topics_of(topics: Iterable[str], pattern: str) -> TopicSelection:
    """Return a selection of the named topics, of the topics that match the pattern, or of all topics."""
    names = tuple(dict.fromkeys(topics))
    if names and pattern:
        raise OptionError("topics and a pattern exclude each other: give one of them")
    try:
        re.compile(pattern)
    except re.error as error:
        raise OptionError(f"the pattern is no regular expression: {error}") from None
    return TopicSelection(names) if names else TopicSelection(pattern=pattern or "(?s:.*)")


def make_writable(directory: Path) -> None:
    """Make the directory, and check that files can be written to it."""
    try:
        make_directory(directory / HIDDEN)
        made = directory / HIDDEN / f"probe-{uuid.uuid4().hex}"
        made.touch()
        made.unlink()
    except OSError as error:
        raise LakeError(f"{directory} cannot be written to: {error.strerror}") from None


def check_apart(lake: Path, into: Path) -> None:
    """Raise LakeError if one directory is in the other: readers of all its files would get both tables."""
    one, other = lake.resolve(), into.resolve()
    if one == other:
        raise LakeError(f"{into} is the lake itself: name another directory")
    if one in other.parents or other in one.parents:
        raise LakeError(f"{into} and the lake {lake} lie in each other: name another directory")
