"""Lakes made without a log, as an export would make them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.lake.files.writing import RecordRows, WrittenFile


def make_lake(lake: Path, files: Iterable[Iterable[RecordRows]]) -> None:
    """Make a lake of one batch, with a file for each group of rows. Rows of a topic begin at offset 0."""
    from headrace.lake.files.writing import Writer
    from headrace.lake.format import File, Manifest, Shape
    from headrace.lake.manifests import Manifests
    from headrace.lake.storage.storage import storage_of
    from headrace.lake.table import make_table
    from headrace.model import Position
    from headrace.pipeline.job import EXPORT_APP as APP

    storage = storage_of(lake)
    table = make_table(storage, "delta", Shape())
    written: list[WrittenFile] = []
    for number, some in enumerate(files):
        writer = Writer(storage, f"00000000-{number:012x}-{number:04}", Shape())
        for rows in some:
            writer.add(rows)
        written += writer.finish()
    ranges = tuple(
        one._replace(file=place) for place, file in enumerate(written) for one in file.ranges
    )
    manifest = Manifest(
        number=0,
        start={one.topic: Position(one.epoch, 0, 0) for one in ranges},
        end={one.topic: Position(one.epoch, one.end, one.end_ordinal) for one in ranges},
        files=tuple(File(one.path, one.bytes, one.rows) for one in written),
        ranges=ranges,
    )
    Manifests(storage).write(manifest)
    table.commit(APP, 0, written, manifest.crc)
