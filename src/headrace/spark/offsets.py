"""The offset of a streaming query, as its checkpoint keeps it: a position per topic, and its group."""

from collections.abc import Mapping
from typing import Any

from headrace.model import Position
from headrace.spark.log_view import SourceError
from headrace.spark.planning import Positions

FORMAT = 1

Offset = dict[str, Any]


def encode_offset(positions: Mapping[str, Position], group: str) -> Offset:
    """Keys are in the order of their names: Spark compares offsets as text."""
    topics = {name: list(positions[name]) for name in sorted(positions)}
    return {"format": FORMAT, "group": group, "topics": topics}


def decode_offset(offset: Mapping[str, Any]) -> Positions:
    if offset.get("format") != FORMAT:
        raise SourceError(
            f"the checkpoint holds an offset of format {offset.get('format')}, this version reads "
            f"{FORMAT}: start the query with a new checkpoint, or with the version that wrote it"
        )
    return {name: Position(*position) for name, position in offset["topics"].items()}


def group_of(offset: Mapping[str, Any]) -> str:
    """The query's name as a reader; empty when it has none."""
    return str(offset.get("group", "")) if offset.get("format") == FORMAT else ""
