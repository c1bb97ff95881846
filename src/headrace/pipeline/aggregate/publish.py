"""Sends states to the server, as snapshots of channels with the offset that they cover. One task per file."""

from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from headrace.lake.states import read_states
from headrace.model import CHANNEL_PREFIX
from headrace.reader.http_client import HttpClient, ServerError
from headrace.reader.view import LogLocation

_COLUMNS = ("topic", "offset", "state", "is_json", "complete", "error")
_OF_A_CHANNEL = frozenset({400, 404, 409, 413})
"""Statuses that refuse one channel; the server may accept the others."""


class PublishWork(NamedTuple):
    place: LogLocation
    into: str
    file: str
    rows: int
    """Number of states to publish, from the start of the file."""


class Published(NamedTuple):
    published: int
    refused: int
    first_refusal: str


def publish(work: PublishWork) -> Published:
    """Publish states. Repeating it does no harm: a snapshot never replaces one with a later offset."""
    published = refused = 0
    first = ""
    with closing(HttpClient(work.place)) as http:
        for row in islice(read_states(Path(work.into, work.file), _COLUMNS), work.rows):
            if not row["topic"].startswith(CHANNEL_PREFIX):
                continue
            name = row["topic"].removeprefix(CHANNEL_PREFIX)
            reason = _unfit(row["complete"], row["error"])
            if not reason:
                reason = _upload(http, name, row["offset"], row["state"], row["is_json"])
            if reason:
                refused += 1
                first = first or f"channel {name!r}: {reason}"
            else:
                published += 1
    return Published(published, refused, first)


def _unfit(complete: bool, error: str | None) -> str:
    """Return the reason why a state must not be published, or an empty string.

    The server deletes messages that a snapshot covers, so the snapshot must include all of them.
    """
    if error is not None:
        return error
    return "" if complete else "its first records are in neither lake nor log"


def _upload(http: HttpClient, name: str, offset: int, state: bytes, is_json: bool) -> str:
    kind = "application/json" if is_json else "application/octet-stream"
    try:
        http.send("PUT", "/v1/channel/snapshot", {"name": name, "offset": offset}, state, kind)
    except ServerError as error:
        if error.status not in _OF_A_CHANNEL:
            raise
        return str(error)
    return ""
