"""Writer of one Parquet file with rows that arrive sorted: row groups, fsync, a name with the checksum."""

import re
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.lake.errors import writing
from headrace.lake.files.checksums import crc_of_file
from headrace.lake.files.durable import make_directory, sync

ROW_GROUP_ROWS = 131_072
ROW_GROUP_BYTES = 64 << 20
"""A row group is written when either limit is reached: readers load a whole row group at once."""

_NUMBERS = ("epoch", "offset", "ordinal", "timestamp")
_NAMED = re.compile(r"-([0-9a-f]{8})\.(?:parquet|data)$")

NAME = r"c?([0-9]{8,})-[0-9a-f]{12}-([0-9]{4,})(?:-[0-9a-f]{8})?\.(?:parquet|data)"
"""Names that jobs give to files, with batch and task; each is used once. Other files are left alone."""

DATED = rf"date=[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}/{NAME}"
"""The same, in the directory of its date."""


class SortedFile:
    def __init__(self, lake: Path, path: str, schema: pa.Schema) -> None:
        self._lake, self._path, self._schema = lake, path, schema
        make_directory((lake / path).parent)
        names = schema.names
        with writing(lake / path):
            self._writer = pq.ParquetWriter(
                lake / path,
                schema,
                compression="snappy",
                # Decoded columns are text, or small compared with the payload.
                use_dictionary=[name for name in names if name not in (*_NUMBERS, "payload")],
                column_encoding={
                    **dict.fromkeys(_NUMBERS, "DELTA_BINARY_PACKED"),
                    "payload": "PLAIN",
                },
                write_statistics=[name for name in names if name != "payload"],
                sorting_columns=[
                    pq.SortingColumn(names.index(name))
                    for name in ("topic", "offset")
                    if name in names
                ],
                store_schema=False,
                # The checksums of the log's bytes do not cover timestamps.
                write_page_checksum=True,
            )
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_rows = self._gathered_bytes = 0

    def add(self, rows: pa.RecordBatch, size: int) -> None:
        """Add rows of about `size` bytes."""
        self._gathered.append(rows.select(self._schema.names))
        self._gathered_rows += rows.num_rows
        self._gathered_bytes += size
        if self._gathered_rows >= ROW_GROUP_ROWS or self._gathered_bytes >= ROW_GROUP_BYTES:
            self._write_group()

    def finish(self, footer: Mapping[str, str]) -> str:
        """Complete the file, make it durable and return its path below the lake."""
        self._write_group()
        self._writer.add_key_value_metadata(dict(footer))
        with writing(self._lake / self._path):
            self._writer.close()
        path = self._lake / self._path
        sync(path)
        # The name allows a check of every byte, including the footer, even after the file was copied.
        self._path = named_after(self._path, crc_of_file(path))
        path = path.rename(self._lake / self._path)
        sync(path.parent)
        return self._path

    def _write_group(self) -> None:
        if self._gathered:
            table = pa.Table.from_batches(self._gathered, schema=self._schema)
            with writing(self._lake / self._path):
                self._writer.write_table(table, row_group_size=max(1, table.num_rows))
            self._gathered, self._gathered_rows, self._gathered_bytes = [], 0, 0


def named_after(path: str, crc: int) -> str:
    name, _, suffix = path.rpartition(".")
    return f"{name}-{crc:08x}.{suffix}"


def crc_in_name(path: str) -> int | None:
    """Return the checksum in a file's name; None if the name has none."""
    found = _NAMED.search(path)
    return int(found[1], 16) if found else None
