"""A lake as an Iceberg table with its own catalogue: each commit counts once, despite other writers.

By default the library retries commits, and could commit a number twice; the table's properties turn retries
off. An application's last number is a property of the table. It is read from the object that makes the
commit, and set in the same commit. Each commit makes a snapshot, even without files, because the library
detects other writers only by snapshots.

The library does not fsync files of metadata, but the catalogue is durable at once. So each file is fsynced
before the catalogue names it.
"""

import io
import itertools
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.conversions import from_bytes
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, TableAlreadyExistsError
from pyiceberg.expressions import (
    AlwaysTrue,
    And,
    BooleanExpression,
    EqualTo,
    GreaterThanOrEqual,
    Reference,
)
from pyiceberg.expressions.literals import literal
from pyiceberg.io import InputFile, OutputFile
from pyiceberg.io.pyarrow import PyArrowFileIO, parquet_file_to_data_file
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.transforms import DayTransform, IdentityTransform
from pyiceberg.types import NestedField, PrimitiveType
from sqlalchemy.exc import SQLAlchemyError

from headrace.lake.files.writing import (
    DATED,
    Bounds,
    FileLayout,
    Values,
    WrittenFile,
    is_older,
    make_directory,
    replace,
    sync,
)
from headrace.lake.format import (
    DECODE_KEY,
    DECODED_KEY,
    FORMAT_KEY,
    DamagedTableError,
    LakeError,
    Oddity,
    Shape,
    check_format,
    in_a_sentence,
    not_ours,
    reads,
    writes,
)
from headrace.lake.manifests import HIDDEN


class SyncedIO(PyArrowFileIO):
    """File access for local files only. The library loads this class by its name."""

    def new_output(self, location: str) -> OutputFile:  # type: ignore[override]
        return _Output(location)


class _Output(OutputFile):
    def __init__(self, location: str) -> None:
        super().__init__(location)
        self._path = Path(location.removeprefix("file://"))

    def __len__(self) -> int:
        return self._path.stat().st_size

    def exists(self) -> bool:
        return self._path.exists()

    def to_input_file(self) -> InputFile:
        return SyncedIO().new_input(self.location)

    def create(self, overwrite: bool = False) -> "_Stream":
        make_directory(self._path.parent)
        return _Stream(self._path, "wb" if overwrite else "xb")


class _Stream(io.BufferedWriter):
    def __init__(self, path: Path, mode: str) -> None:
        super().__init__(io.FileIO(path, mode))
        self._path = path

    def close(self) -> None:
        if not self.closed:
            self.flush()
            os.fsync(self.fileno())
            super().close()
            sync(self._path.parent)


MARK = f"{HIDDEN}/catalog.db"
METADATA = "metadata"
HINT = f"{METADATA}/version-hint.text"

CATALOG = "headrace"
TABLE = "headrace.records"

_BATCH_KEY = "headrace.batch"
_LAST_KEY = "headrace.last."

_PROPERTIES = {
    "commit.retry.num-retries": "0",
    "commit.manifest-merge.enabled": "true",
    "write.metadata.delete-after-commit.enabled": "true",
}

_UUID = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_OURS = re.compile(
    rf"(t-[0-9a-f]{{16}}/)?{DATED}"
    rf"|{METADATA}/([0-9]{{5,}}-{_UUID}\.metadata\.json|{_UUID}-m[0-9]+\.avro|snap-[0-9]+-[0-9]+-{_UUID}\.avro"
    r"|version-hint\.text\.[0-9a-f]{12}\.tmp)"
)
"""Paths of files that Headrace or the library writes."""


class IcebergLake:
    """Implementation of `table.Table` for Iceberg."""

    kind = "iceberg"
    layout = FileLayout(has_topic=True)
    _where = METADATA

    def __init__(self, lake: Path, catalog: SqlCatalog, shape: Shape) -> None:
        self._lake, self._catalog, self.shape = lake, catalog, shape

    @classmethod
    def open(cls, lake: Path) -> Self | None:
        """Open the table; None if there is none, or if its creation was interrupted."""
        if not (lake / MARK).exists():
            return None
        with in_a_sentence(lake, METADATA):
            catalog = _catalog(lake)
            table = _load(lake, catalog)
            return cls(lake, catalog, _shape(table)) if table is not None else None

    @classmethod
    def make(cls, lake: Path, shape: Shape) -> Self:
        make_directory(lake / HIDDEN)
        with in_a_sentence(lake, METADATA, writing=True), _catalogued(lake):
            catalog = _catalog(lake)
            catalog.create_namespace_if_not_exists(CATALOG)
            try:
                with catalog.create_table_transaction(
                    TABLE, shape.columns, location=_location(lake), properties=_PROPERTIES
                ) as table:
                    with table.update_spec() as spec:
                        spec.add_field("timestamp", DayTransform(), "date")
                        if shape.by_topic:
                            spec.add_field("topic", IdentityTransform(), "topic")
                    with table.update_sort_order() as order:
                        order.asc("topic", IdentityTransform()).asc("offset", IdentityTransform())
                    names = table.table_metadata.schema().name_mapping
                    table.set_properties(
                        {
                            **_metrics(shape),
                            # Columns in our files have names, but not the field ids of Iceberg.
                            "schema.name-mapping.default": names.model_dump_json(),
                            **shape.properties,
                        }
                    )
            except (TableAlreadyExistsError, CommitFailedException):
                pass  # another process has created it first
        made = cls(lake, catalog, shape)
        made.sync()
        return made

    @property
    @reads
    def id(self) -> str:
        return str(self._table().metadata.table_uuid)

    @reads
    def last(self, app: str) -> int | None:
        return _last(self._table(), app)

    @writes
    def commit(
        self,
        app: str,
        number: int,
        files: Sequence[WrittenFile],
        notes: Mapping[str, str],
        *,
        replaced: Collection[str] = (),
    ) -> bool:
        noted = {**notes} if replaced else {**notes, _BATCH_KEY: str(number)}
        while True:
            table = self._table()
            last = _last(table, app)
            if last is not None and last >= number:
                return False
            live = self._live(table) if replaced else {}
            if not live.keys() >= set(replaced):
                return False
            try:
                with _catalogued(self._lake), table.transaction() as change:
                    update = change.update_snapshot(snapshot_properties=noted)
                    with update.overwrite() if replaced else update.merge_append() as snapshot:
                        for path in replaced:
                            snapshot.delete_data_file(live[path])
                        for one in files:
                            snapshot.append_data_file(self._data_file(table, one))
                    change.set_properties({f"{_LAST_KEY}{app}": str(number)})
            except CommitFailedException:
                continue  # another commit came first: check again whether ours is still needed
            self.sync()
            return True

    @reads
    def notes(self, number: int) -> Mapping[str, str] | None:
        return dict(self.all_notes()).get(number)

    @reads
    def all_notes(self) -> list[tuple[int, Mapping[str, str]]]:
        summaries = [
            one.summary.additional_properties
            for one in reversed(self._table().metadata.snapshots)
            if one.summary is not None
        ]
        return [(int(one[_BATCH_KEY]), one) for one in summaries if _BATCH_KEY in one]

    @reads
    def files(self) -> dict[str, int]:
        return {path: file.file_size_in_bytes for path, file in self._live(self._table()).items()}

    @reads
    def files_of(self, topic: str, offset: int) -> list[str]:
        wanted = And(
            EqualTo(term=Reference("topic"), value=literal(topic)),
            GreaterThanOrEqual(term=Reference("offset"), value=literal(offset)),
        )
        return list(self._live(self._table(), wanted))

    @reads
    def bounds(self) -> dict[str, Bounds]:
        table = self._table()
        fields = [table.schema().find_field(name) for name in Values._fields]
        partition = [one.name for one in table.spec().fields]
        return {
            path: {
                **{
                    one.name: (
                        _value(one, file.lower_bounds),
                        _value(one, file.upper_bounds),
                    )
                    for one in fields
                },
                **{name: (file.partition[at],) * 2 for at, name in enumerate(partition)},
                "rows": (file.record_count,) * 2,
            }
            for path, file in self._live(table).items()
        }

    @reads
    def oddities(self) -> list[Oddity]:
        hint, table = self._hint(), self._table()
        names = [one.name for one in table.schema().fields]
        found = []
        if names != self.shape.columns.names or table.name_mapping() != table.schema().name_mapping:
            reason = f"the table has other columns: {', '.join(names)}"
            found.append(Oddity("damaged", METADATA, reason))
        if hint != _hint_of(table):
            named = (hint or b"").decode(errors="replace")
            is_state = hint is None or (self._lake / METADATA / f"{named}.metadata.json").exists()
            reason = (
                f"it does not name the newest state of the table, but {named!r}: readers without its "
                "catalogue miss rows; the next export or compaction repairs it"
            )
            found.append(Oddity("missing" if is_state else "damaged", HINT, reason))
        return found

    def shown(self, path: str) -> str:
        return path

    @writes
    def sweep(self, after_s: float, *, dry_run: bool) -> int:
        until = time.time() - after_s
        table = self._table()
        # A snapshot's files are needed until `after_s` seconds after the next snapshot.
        old = [
            one.snapshot_id
            for one, following in itertools.pairwise(table.metadata.snapshots)
            if following.timestamp_ms < until * 1000
        ]
        if old and not dry_run:
            try:
                table.maintenance.expire_snapshots().by_ids(old).commit()
            except CommitFailedException:
                return 0  # the next sweep does it
        named = set(self._named(table, without=set(old) if dry_run else set()))
        unnamed = [
            path
            for path in self._lake.rglob("*.*")
            if _OURS.fullmatch(name := str(path.relative_to(self._lake)))
            and name not in named
            and is_older(path, until)
        ]
        for path in unnamed if not dry_run else ():
            path.unlink(missing_ok=True)
        return len(unnamed)

    @writes
    def sync(self) -> None:
        """Update the hint for readers without a catalogue. Everything else is fsynced when it is written."""
        # Another process may have replaced a newer hint with an older one, so compare again after each write.
        while (newest := _hint_of(self._table())) != self._hint():
            replace(self._lake / HINT, newest)

    # Files of the table

    def _hint(self) -> bytes | None:
        try:
            return (self._lake / HINT).read_bytes()
        except FileNotFoundError:
            return None

    def _table(self) -> Table:
        found = _load(self._lake, self._catalog)
        if found is None:
            raise LakeError(f"{self._lake} is no longer a lake of Headrace: its table is gone")
        return found

    def _live(self, table: Table, wanted: BooleanExpression = AlwaysTrue()) -> dict[str, DataFile]:  # noqa: B008
        files = (one.file for one in table.scan(row_filter=wanted).plan_files())
        return {self._path(file.file_path): file for file in files}

    def _path(self, address: str) -> str:
        return address.removeprefix(f"{_location(self._lake)}/")

    def _data_file(self, table: Table, one: WrittenFile) -> DataFile:
        address = f"{_location(self._lake)}/{one.path}"
        return parquet_file_to_data_file(table.io, table.metadata, address)

    def _named(self, table: Table, without: Collection[int]) -> Iterator[str]:
        """Yield the paths of all files that the table needs, including those of its remaining snapshots."""
        yield self._path(table.metadata_location)
        for entry in table.metadata.metadata_log:
            yield self._path(entry.metadata_file)
        seen = set()
        for snapshot in table.metadata.snapshots:
            if snapshot.snapshot_id in without:
                continue
            yield self._path(snapshot.manifest_list)
            for manifest in snapshot.manifests(table.io):
                if manifest.manifest_path not in seen:
                    seen.add(manifest.manifest_path)
                    yield self._path(manifest.manifest_path)
                    for one in manifest.fetch_manifest_entry(table.io):
                        yield self._path(one.data_file.file_path)


def _catalog(lake: Path) -> SqlCatalog:
    with _catalogued(lake):
        return SqlCatalog(
            CATALOG,
            uri=f"sqlite:///{lake / MARK}",
            warehouse=_location(lake),
            **{"py-io-impl": "headrace.lake.formats.iceberg.SyncedIO"},
        )


def _load(lake: Path, catalog: SqlCatalog) -> Table | None:
    try:
        with _catalogued(lake):
            found = catalog.load_table(TABLE)
    except NoSuchTableError:
        return None
    except FileNotFoundError as error:
        reason = f"{error}; a table that was moved must be moved back to its first location"
        raise DamagedTableError(lake, METADATA, reason) from None
    finally:
        catalog.engine.dispose()  # the engine would keep the file open
    if found.location() != _location(lake):
        raise LakeError(
            f"{lake} is a copy of an Iceberg table, or was moved: its metadata names files in "
            f"{found.location().removeprefix('file://')}; use that, or move it back there"
        )
    return found


def _catalogued(lake: Path) -> AbstractContextManager[None]:
    return in_a_sentence(lake, MARK, SQLAlchemyError)


def _location(lake: Path) -> str:
    return f"file://{lake.absolute()}"


def _shape(table: Table) -> Shape:
    place = Path(table.location().removeprefix("file://"))
    number, decode, decoded = map(table.properties.get, (FORMAT_KEY, DECODE_KEY, DECODED_KEY))
    if number is None or not number.isdigit():
        raise not_ours(place, "an Iceberg table of others")
    check_format(int(number), str(place))
    return Shape.stored(any(one.name == "topic" for one in table.spec().fields), decode, decoded)


def _metrics(shape: Shape) -> dict[str, str]:
    """Make the library store the statistics that our files have, without warnings about the others."""
    names = [
        field.name
        for field in shape.columns
        if field.name != "payload" and not pa.types.is_nested(field.type)
    ]
    return {
        "write.metadata.metrics.default": "none",
        **{f"write.metadata.metrics.column.{name}": "truncate(16)" for name in names},
    }


def _value(field: NestedField, found: Mapping[int, bytes] | None) -> Any:
    data = (found or {}).get(field.field_id)
    if data is None or not isinstance(field.field_type, PrimitiveType):
        return None
    return from_bytes(field.field_type, data)


def _hint_of(table: Table) -> bytes:
    """Return the content of the hint for readers without a catalogue."""
    return Path(table.metadata_location).name.removesuffix(".metadata.json").encode()


def _last(table: Table, app: str) -> int | None:
    found = table.properties.get(f"{_LAST_KEY}{app}")
    return None if found is None else int(found)
