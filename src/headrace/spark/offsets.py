"""The offset of a streaming query, as stored in its checkpoint: a position per topic, and the group.

Spark stores only the end of each batch, which is the start of the next. Therefore the offset also contains,
under `joined`, the start of each topic that the batch is the first to read. A repeated batch then reads the
same records again, even if the options or the log have changed.
"""

from collections.abc import Mapping
from typing import Any

from headrace.model import Position, present_name
from headrace.reader.planning import Positions
from headrace.reader.view import SourceError

FORMAT = 2
"""Current format. In format 1, reserved topics have the names `channel/…` and `logux/…` of earlier versions.
"""
_FORMATS = (1, 2)

Offset = dict[str, Any]


def encode_offset(
    positions: Positions, group: str, joined: Positions | None = None, *, initial: bool = False
) -> Offset:
    """Encode an offset with its topics sorted by name: Spark compares offsets as text."""
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
    """Return the topics that the batch is the first to read, with their start positions."""
    return _decode(offset, "joined")


def is_initial(offset: Mapping[str, Any]) -> bool:
    """True if the offset is the start of a query.

    No checkpoint contains such an offset, and Spark may ask for it again.
    """
    return bool(offset.get("initial"))


def _decode(offset: Mapping[str, Any], key: str) -> Positions:
    found = {name: Position(*position) for name, position in offset.get(key, {}).items()}
    if offset.get("format") == 1:
        return {present_name(name.encode()).decode(): at for name, at in found.items()}
    return found


def group_of(offset: Mapping[str, Any]) -> str:
    """Return the query's name as a reader; empty if it has none."""
    return str(offset.get("group", "")) if offset.get("format") in _FORMATS else ""
