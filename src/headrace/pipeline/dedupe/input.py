"""Arguments of a deduplication: the key of rows and the window. Rejects invalid values."""

from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from headrace.errors import OptionError
from headrace.lake.deduped import RunNote
from headrace.lake.format import LakeError, Shape
from headrace.lake.manifests import Manifests
from headrace.lake.table import Table
from headrace.pipeline.dedupe.keys import Key, KeyKind
from headrace.pipeline.export.job import APP as EXPORT
from headrace.pipeline.json_path import parse_path
from headrace.pipeline.tasks import JobError
from headrace.reader.planning import TopicSelection

_WINDOW_S_MAX = 1e10


def key_of(column: str, json_path: str, *, payload: bool) -> Key:
    given = [
        *([Key(KeyKind.COLUMN, column)] if column else []),
        *([Key(KeyKind.JSON, json_path)] if json_path else []),
        *([Key(KeyKind.PAYLOAD)] if payload else []),
    ]
    if len(given) != 1:
        raise OptionError("say what rows are known by: a column, a JSON path, or the payload")
    if json_path:
        try:
            parse_path(json_path)
        except ValueError as error:
            raise OptionError(str(error)) from None
    return given[0]


def window_of(window_s: float | None) -> int | None:
    if window_s is None:
        return None
    if not 0.001 <= window_s <= _WINDOW_S_MAX:
        raise OptionError(
            f"a window has 0.001 to {_WINDOW_S_MAX:.0f} seconds, or none, not {window_s:g}"
        )
    return int(window_s * 1000)


def check_column(key: Key, shape: Shape, lake: Path) -> None:
    if key.kind is not KeyKind.COLUMN or key.name == "payload":
        return
    if key.name not in shape.decoded.names:
        names = ", ".join(["payload", *shape.decoded.names])
        raise LakeError(
            f"{lake} has no column {key.name!r} that rows can be known by: there is {names}"
        )
    kind = shape.decoded.field(key.name).type
    if pa.types.is_nested(kind):
        raise LakeError(f"column {key.name!r} holds other values: name one with a plain type")


def check_topics(topics: TopicSelection, lake: Path, table: Table) -> None:
    if not topics.names:
        return
    known = Manifests(lake).reach(table.last(EXPORT)).ends
    for name in topics.names:
        if name not in known:
            raise JobError(f"there is no topic {name!r} in {lake}")


class Settings(NamedTuple):
    """Settings that stay the same from run to run."""

    lake: str
    key: Key
    window_ms: int | None

    def check(self, directory: Path, last: RunNote | None) -> None:
        if last is None:
            return
        if last.lake != self.lake:
            raise LakeError(f"{directory} has the rows of another lake: name another directory")
        if (last.key, last.window_ms) != (self.key.text, self.window_ms):
            raise LakeError(
                f"{directory} was made by {last.key} within {_window_text(last.window_ms)}, not by "
                f"{self.key.text} within {_window_text(self.window_ms)}: name another directory"
            )


def _window_text(window_ms: int | None) -> str:
    return "all time" if window_ms is None else f"{window_ms / 1000:g} seconds"
