"""Tells the server how far a job has come, as cursors of named readers: what its retention waits for."""

from headrace.lake.format import Positions
from headrace.model import Position
from headrace.spark.http_client import HttpClient
from headrace.spark.options import Place

LAKE = "lake"
"""The reader whose cursor is where the lake ends in a topic."""

LAKE_START = "lake:start"
"""And where it begins."""

_POSITIONS_AT_ONCE = 1000


class Cursors:
    """Sends what has changed since it was sent last."""

    def __init__(self, place: Place) -> None:
        self._http = HttpClient(place)
        self._told: dict[str, Positions] = {}

    def tell(self, reader: str, positions: Positions) -> None:
        """Durable on the server when this returns."""
        told = self._told.setdefault(reader, {})
        new = [(name, at) for name, at in positions.items() if told.get(name) != at]
        for first in range(0, len(new), _POSITIONS_AT_ONCE):
            some = new[first : first + _POSITIONS_AT_ONCE]
            places = [{"topic": name, **at._asdict()} for name, at in some]
            self._http.json("POST", "/v1/cursors", {}, {"reader": reader, "positions": places})
            told.update(some)

    def read(self, reader: str) -> Positions:
        """What the server was told last, by whomever."""
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
