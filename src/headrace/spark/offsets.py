"""The offset of a streaming query, as its checkpoint keeps it: a position per topic, and its group.

Spark keeps only where a batch ends, which is where the next begins. So a topic that a batch is the first to
read has its beginning there too, under `joined`: a batch that is repeated reads what it read before, whatever
the options and the log have become.
"""

from collections.abc import Mapping
from typing import Any

from headrace.model import Position, present_name
from headrace.spark.log_view import SourceError
from headrace.spark.planning import Positions

FORMAT = 2
"""With 1, reserved topics are named `channel/…` and `logux/…`, as earlier versions did."""
_FORMATS = (1, 2)

Offset = dict[str, Any]


def encode_offset(
    positions: Positions, group: str, joined: Positions | None = None, *, initial: bool = False
) -> Offset:
    """Keys are in the order of their names: Spark compares offsets as text."""
    offset: Offset = {"format": FORMAT, "group": group, "topics": _encode(positions)}
    if joined:
        offset["joined"] = _encode(joined)
    if initial:
        offset["initial"] = True
    return offset


def _encode(positions: Positions) -> dict[str, list[int]]:
    return {name: list(positions[name]) for name in sorted(positions)}


def decode_offset(offset: Mapping[str, Any]) -> Positions:
    if offset.get("format") not in _FORMATS:
        raise SourceError(
            f"the checkpoint holds an offset of format {offset.get('format')}, this version reads "
            f"{FORMAT}: start the query with a new checkpoint, or with the version that wrote it"
        )
    return _decode(offset, "topics")


def joined_in(offset: Mapping[str, Any]) -> Positions:
    """Topics that the batch is the first to read, and where they begin."""
    return _decode(offset, "joined")


def is_initial(offset: Mapping[str, Any]) -> bool:
    """Whether it is where a query begins: no checkpoint has it, and Spark may ask for it again."""
    return bool(offset.get("initial"))


def _decode(offset: Mapping[str, Any], key: str) -> Positions:
    found = {name: Position(*position) for name, position in offset.get(key, {}).items()}
    if offset.get("format") == 1:
        return {present_name(name.encode()).decode(): at for name, at in found.items()}
    return found


def group_of(offset: Mapping[str, Any]) -> str:
    """The query's name as a reader; empty when it has none."""
    return str(offset.get("group", "")) if offset.get("format") in _FORMATS else ""
