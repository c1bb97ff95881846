"""A lake as an Iceberg table of any catalogue: each commit counts once, despite other writers.

By default the library retries commits, and could commit a number twice; the table's properties turn retries
off. An application's last number is a property of the table. It is read from the object that makes the
commit, and set in the same commit. Each commit makes a snapshot, even without files, because the library
detects other writers only by snapshots. The library copies all snapshots at each commit, so a commit also
drops old ones.

A catalogue is durable at once. So each file of metadata is durable before the catalogue names it.
"""

import itertools
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any, Self

import pyarrow as pa
from pyiceberg.conversions import from_bytes
from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    TableAlreadyExistsError,
)
from pyiceberg.expressions import (
    AlwaysTrue,
    And,
    BooleanExpression,
    EqualTo,
    GreaterThanOrEqual,
    Reference,
)
from pyiceberg.expressions.literals import literal
from pyiceberg.io.pyarrow import parquet_file_to_data_file
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation, Snapshot
from pyiceberg.table.update.snapshot import ExpireSnapshots
from pyiceberg.transforms import DayTransform, IdentityTransform
from pyiceberg.types import NestedField, PrimitiveType

from headrace.errors import HeadraceError
from headrace.lake.files.writing import (
    DATED,
    Bounds,
    FileLayout,
    Values,
    WrittenFile,
)
from headrace.lake.format import (
    DECODE_KEY,
    DECODED_KEY,
    FORMAT_KEY,
    Committed,
    LakeError,
    Oddity,
    Shape,
    check_format,
    in_a_sentence,
    not_ours,
    reads,
    writes,
)
from headrace.lake.formats.catalogue import LAKE_KEY, LakeCatalog, location_of
from headrace.lake.storage.storage import Storage, directory_of, replace

METADATA = "metadata"
HINT = f"{METADATA}/version-hint.text"

SNAPSHOTS_MAX = 100
"""Number of newest snapshots that a commit keeps. Older ones stay while only they name replaced files."""

_LAST_KEY = "headrace.last."

_NAMED_IN_KEY = "headrace.named-in"
"""Entry in the summary of a snapshot that replaces files: ID of an earlier one that names all of them."""

_REFUSALS_MAX = 3
"""Number of times that a commit may fail in a row although nobody else has committed."""

_PROPERTIES = {
    "commit.retry.num-retries": "0",
    "commit.manifest-merge.enabled": "true",
    "write.metadata.delete-after-commit.enabled": "true",
}

_UUID = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_OURS = re.compile(
    rf"(t-[0-9a-f]{{16}}/)?{DATED}"
    rf"|{METADATA}/([0-9]{{5,}}-{_UUID}\.metadata\.json|{_UUID}-m[0-9]+\.avro|snap-[0-9]+-[0-9]+-{_UUID}\.avro)"
    rf"|{METADATA}/[^/]+\.[0-9a-f]{{12}}\.tmp"
)
"""Paths of files that Headrace or the library writes."""


class IcebergLake:
    """Implementation of `table.Table` for Iceberg."""

    kind = "iceberg"
    layout = FileLayout(has_topic=True)
    _where = METADATA

    def __init__(self, catalog: LakeCatalog, shape: Shape) -> None:
        self._catalog, self.shape = catalog, shape
        self._storage = catalog.storage
        self._named_before: tuple[int, Set[str]] | None = None
        """Snapshot before the first replacement by this object, and its files."""

    @classmethod
    def open(cls, storage: Storage) -> Self | None:
        """Open the table; None if there is none, or if its creation was interrupted."""
        with in_a_sentence(storage, METADATA):
            catalog = LakeCatalog.find(storage)
            if catalog is None or (table := catalog.load()) is None:
                return None
            return cls(catalog, _shape(table))

    @classmethod
    def make(cls, storage: Storage, shape: Shape) -> None:
        storage.prepare()
        with in_a_sentence(storage, METADATA, writing=True):
            catalog = LakeCatalog.given(storage) if storage.catalog else LakeCatalog.own(storage)
            with catalog.errors():
                _create(catalog, shape)
            if not catalog.is_own:
                catalog.make_mark(catalog.load())

    @property
    @reads
    def id(self) -> str:
        return str(self._table().metadata.table_uuid)

    @reads
    def last(self, app: str) -> Committed | None:
        return _last(self._table(), app)

    @writes
    def commit(
        self,
        app: str,
        number: int,
        files: Sequence[WrittenFile],
        token: int,
        *,
        replaced: Collection[str] = (),
    ) -> bool:
        wanted = Committed(number, token)
        refusals, seen = 0, ""
        while True:
            table = self._table()
            last = _last(table, app)
            if last is not None and last.number >= number:
                # An attempt whose outcome was unknown may have succeeded.
                self.sync()
                return last == wanted
            live = self._live(table) if replaced else {}
            if not live.keys() >= set(replaced):
                return False
            refusals = refusals + 1 if table.metadata_location == seen else 0
            seen = table.metadata_location
            before = self._before_replacing(table, live, replaced) if replaced else None
            try:
                with table.transaction() as change:
                    old = _needless(table.metadata)
                    if old and not refusals:  # some catalogues may keep all snapshots
                        ExpireSnapshots(change).by_ids(old).commit()
                    update = change.update_snapshot(
                        {} if before is None else {_NAMED_IN_KEY: str(before[0])}
                    )
                    with update.overwrite() if replaced else update.merge_append() as snapshot:
                        for path in replaced:
                            snapshot.delete_data_file(live[path])
                        for one in files:
                            snapshot.append_data_file(self._data_file(table, one))
                    numbers = wanted.numbers(app).items()
                    change.set_properties({f"{_LAST_KEY}{key}": str(one) for key, one in numbers})
            except HeadraceError:
                raise
            except Exception:
                # Either another commit came first, or the outcome is unknown: look again.
                if refusals == _REFUSALS_MAX:
                    with self._catalog.errors():
                        raise
                continue
            self._named_before = before or self._named_before
            self.sync()
            return True

    def _before_replacing(
        self, table: Table, live: Collection[str], replaced: Collection[str]
    ) -> tuple[int, Set[str]]:
        """Return a snapshot of the table that names all files which are about to be replaced, and its files.

        For all replacements of one compaction it is the same if possible, so that few snapshots stay.
        """
        before = self._named_before
        if (
            before is not None
            and before[1] >= set(replaced)
            and table.snapshot_by_id(before[0]) is not None
        ):
            return before
        newest = table.current_snapshot()
        assert newest is not None  # it names the files that are replaced
        return newest.snapshot_id, frozenset(live)

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
        if self._newest_hint(table) not in (None, hint):
            named = (hint or b"").decode(errors="replace")
            is_state = hint is None or self._storage.has(f"{METADATA}/{named}.metadata.json")
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
                with self._catalog.errors():
                    table.maintenance.expire_snapshots().by_ids(old).commit()
            except CommitFailedException:
                return 0  # the next sweep does it
        named = set(self._named(table, without=set(old) if dry_run else set()))
        unnamed = [
            one.path
            for one in self._storage.list()
            if _OURS.fullmatch(one.path) and one.path not in named and one.modified_s < until
        ]
        if not dry_run:
            self._storage.delete(unnamed)
        return len(unnamed)

    @writes
    def sync(self) -> None:
        """Update the hint for readers without a catalogue. Everything else is fsynced when it is written."""
        # Another process may have replaced a newer hint with an older one, so compare again after each write.
        while (newest := self._newest_hint(self._table())) not in (None, self._hint()):
            replace(directory_of(self._storage, "a hint") / HINT, newest)

    # Files of the table

    def _hint(self) -> bytes | None:
        try:
            return self._storage.read(HINT)
        except FileNotFoundError:
            return None

    def _newest_hint(self, table: Table) -> bytes | None:
        """Return the content of the hint; None if readers cannot find the table without its catalogue."""
        directory, _, name = table.metadata_location.rpartition("/")
        if directory != f"file://{self._storage.address}/{METADATA}":
            return None
        return name.removesuffix(".metadata.json").encode()

    def _table(self) -> Table:
        found = self._catalog.load()
        if found is None:
            raise LakeError(
                f"{self._storage.address} is no longer a lake of Headrace: its table is gone"
            )
        return found

    def _live(self, table: Table, wanted: BooleanExpression = AlwaysTrue()) -> dict[str, DataFile]:  # noqa: B008
        files = (one.file for one in table.scan(row_filter=wanted).plan_files())
        return {self._path(file.file_path): file for file in files}

    def _path(self, address: str) -> str:
        return address.removeprefix(f"{location_of(self._storage)}/")

    def _data_file(self, table: Table, one: WrittenFile) -> DataFile:
        address = f"{location_of(self._storage)}/{one.path}"
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


def _create(catalog: LakeCatalog, shape: Shape) -> None:
    """Create a table, unless another process has created it."""
    if catalog.catalog.table_exists(catalog.table):
        return
    namespace = catalog.table.rpartition(".")[0]
    if not catalog.catalog.namespace_exists(namespace):
        catalog.catalog.create_namespace_if_not_exists(namespace)
    try:
        with catalog.catalog.create_table_transaction(
            catalog.table, shape.columns, location=catalog.location, properties=_PROPERTIES
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
                    LAKE_KEY: location_of(catalog.storage),
                    **shape.properties,
                }
            )
    except (TableAlreadyExistsError, CommitFailedException, CommitStateUnknownException):
        pass  # another process has created it first, or the outcome is unknown


def _shape(table: Table) -> Shape:
    place = table.location().removeprefix("file://")
    number, decode, decoded = map(table.properties.get, (FORMAT_KEY, DECODE_KEY, DECODED_KEY))
    if number is None or not number.isdigit():
        raise not_ours(place, "an Iceberg table of others")
    check_format(int(number), place)
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


def _needless(metadata: TableMetadata) -> list[int]:
    """Return old snapshots whose files are all named by newer ones, or by older ones that stay.

    A file that a compaction has replaced stays named until a sweep finds the replacement old enough.
    """
    ids = {str(one.snapshot_id) for one in metadata.snapshots}
    following = {one.parent_snapshot_id: one for one in metadata.snapshots}
    referred = {one.snapshot_id for one in metadata.refs.values()}
    return [
        one.snapshot_id
        for one in metadata.snapshots[: 1 - SNAPSHOTS_MAX]  # the commit makes one more
        if one.snapshot_id not in referred
        and one.snapshot_id in following
        and _names_nothing_more(one, following[one.snapshot_id], ids)
    ]


def _names_nothing_more(one: Snapshot, following: Snapshot, ids: Set[str]) -> bool:
    """True if no file of a snapshot is unknown to the following one and to older ones that stay."""
    summary = following.summary
    if summary is None:
        return False
    if summary.operation is Operation.APPEND:
        return True
    return summary.get(_NAMED_IN_KEY, "") in ids - {str(one.snapshot_id)}


def _last(table: Table, app: str) -> Committed | None:
    return Committed.find(app, lambda name: table.properties.get(f"{_LAST_KEY}{name}"))
