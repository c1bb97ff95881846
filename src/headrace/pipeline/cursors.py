"""Cursors of a job on the server: they tell the server's retention how far the job has come."""

from headrace.lake.format import Positions
from headrace.model import Position
from headrace.reader.http_client import HttpClient
from headrace.reader.view import LogLocation

LAKE = "lake"
"""Reader whose cursor is the end of the lake in each topic."""

LAKE_START = "lake:start"
"""Reader whose cursor is the start of the lake in each topic."""

_POSITIONS_AT_ONCE = 1000


class JobCursors:
    """Client for cursors; sends only positions that have changed since it sent them last."""

    def __init__(self, place: LogLocation) -> None:
        self._http = HttpClient(place)
        self._told: dict[str, Positions] = {}

    def tell(self, reader: str, positions: Positions) -> None:
        """Move a reader's cursors. They are durable on the server when this returns."""
        told = self._told.setdefault(reader, {})
        new = [(name, at) for name, at in positions.items() if told.get(name) != at]
        for first in range(0, len(new), _POSITIONS_AT_ONCE):
            some = new[first : first + _POSITIONS_AT_ONCE]
            places = [{"topic": name, **at._asdict()} for name, at in some]
            self._http.json("POST", "/v1/cursors", {}, {"reader": reader, "positions": places})
            told.update(some)

    def read(self, reader: str) -> Positions:
        """Return a reader's cursors on the server, whoever moved them."""
        found: Positions = {}
        after = ""
        while True:
            asked = {"reader": reader, "after": after, "limit": _POSITIONS_AT_ONCE}
            page = self._http.json("GET", "/v1/cursors", asked)
            for one in page["cursors"]:
                found[one["topic"]] = Position(one["epoch"], one["offset"], one["ordinal"])
                after = one["topic"]
            if not page["more"]:
                return found

    def close(self) -> None:
        self._http.close()
