"""The catalogue at the start of a server: opened, migrated from an earlier format, or rebuilt.

A catalogue that is missing or damaged anywhere is rebuilt from the index files, from its readable rows, and
from its backup.

Earlier versions gave ordinary topics names that are reserved now. Such a topic must be deleted with that
version before this one starts. All other old names are translated where they are read: catalogue rows in
`log/catalogue/catalogue.py`, journal entries in `log/apply/changes.py`, index headers in `log/read/index.py`,
staged blocks in `log/batch/blocks.py`.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from io import FileIO
from pathlib import Path

import msgspec
from crc32c import crc32c

from headrace.errors import DataDirectoryError
from headrace.log.apply.changes import names_in
from headrace.log.catalogue.catalogue import (
    BACKUP_NAME,
    FILE_NAME,
    Catalogue,
    DamagedCatalogueError,
)
from headrace.log.catalogue.pages import Pages
from headrace.log.catalogue.rows import (
    RENAMED_FORMAT,
    RESERVED,
    BatchRow,
    CursorRow,
    DirectoryMeta,
    MetaRow,
    NoteRow,
    ProducerRow,
    R,
    SegmentRow,
    TombstoneRow,
    TopicRow,
    present,
    row_key,
)
from headrace.log.commit import journal
from headrace.log.commit.journal import StagedFiles
from headrace.log.disk import ATTEMPTS_MAX, RETRY_S, Disk, load, read_patiently
from headrace.log.layout import Layout, SegmentFile
from headrace.log.read.index import (
    HEADER_BYTES,
    Header,
    Row,
    decode_header,
    decode_rows,
    is_old_header,
    name_in_header,
)
from headrace.log.recovery.frames import Frame, has_commits, read_frames
from headrace.model import Durability, present_name
from headrace.printing import quoted

logger = logging.getLogger(__name__)

_NEW_NAME = "catalogue.rebuilt.sqlite"


def open_catalogue(layout: Layout, disk: Disk, reports: list[str]) -> tuple[Catalogue, bool]:
    """Return the catalogue, and True if it had to be rebuilt."""
    path = layout.root / FILE_NAME
    reason = f"{path} is missing"
    if not path.exists():
        if _is_empty(layout):
            return Catalogue.create(layout.root), False
    else:
        for _ in range(ATTEMPTS_MAX):
            try:
                return _open_sound(layout), False
            except DamagedCatalogueError as error:
                # The disk may fail for a moment, and SQLite calls a page that it cannot read malformed.
                reason = str(error)
                time.sleep(RETRY_S)
    reports.append(f"the catalogue is rebuilt: {reason}")
    return rebuild_catalogue(layout, disk, reports), True


def _open_sound(layout: Layout) -> Catalogue:
    catalogue = Catalogue.open(layout.root)
    try:
        if catalogue.is_blank() and _is_empty(layout):
            catalogue.make()  # the very first start was interrupted before this
        catalogue.check()
        meta = catalogue.meta()
        renamed = 0
        if meta.format < RENAMED_FORMAT:
            names = catalogue.names_in_file()
            renamed = check_unreserved(layout, names, meta.applied, meta.generation)
        catalogue.migrate()
        log_renamed(renamed)
    except DataDirectoryError:
        catalogue.close()
        raise
    return catalogue


def _is_empty(layout: Layout) -> bool:
    return not any(map(has_commits, layout.journal_files())) and not any(layout.files())


def is_reserved(name: bytes) -> bool:
    """True if a topic of this name is a channel or a log of Logux."""
    return name.startswith(RESERVED)


def check_unreserved(
    layout: Layout, named: Mapping[int, bytes], applied: int, generation: int
) -> int:
    """Raise DataDirectoryError if an earlier version has left a topic with a name that is reserved now.

    Returns the number of topics whose name changes. `named` has topics by number, with their names in the
    files. Commits of the journal after `applied` create and destroy others.
    """
    names = dict(named)
    destroyed: set[int] = set()
    for path in layout.journal_files():
        for frame in read_frames(path, generation=generation):
            if not isinstance(frame, Frame) or frame.sequence <= applied:
                continue
            for entry in frame.entries:
                if entry.kind == journal.DESTROY:
                    destroyed.add(entry.topic_id)
                elif entry.kind in journal.PRESENT_KINDS:
                    # Read as an entry of the present kind, it keeps the name that is in the file.
                    kept = entry._replace(kind=journal.PRESENT_KINDS[entry.kind])
                    names |= {one.topic_id: one.name for one in names_in(kept)}
    living = {name for number, name in names.items() if number not in destroyed}
    found = sorted(name.decode() for name in living if is_reserved(name))
    if found:
        more = f" and {len(found) - 1} others" if len(found) > 1 else ""
        raise DataDirectoryError(
            f"the data directory {layout.root} has a topic {quoted(found[0])}{more}, and names that begin "
            "with '$channel/' or '$logux/' are reserved now: start the earlier version again, export such "
            "topics or publish their records under another name, delete them, and then start this version; "
            "nothing was changed"
        )
    return sum(present_name(name) != name for name in living)


def log_renamed(topics: int) -> None:
    if topics:
        logger.info(
            "%d topics are renamed: names that began with channel/ and logux/ begin with $channel/ and "
            "$logux/ from now on",
            topics,
        )


def rebuild_catalogue(layout: Layout, disk: Disk, reports: list[str]) -> Catalogue:
    """Build a new catalogue from index files, from the readable rows of the old one, and from its backup.

    The new catalogue says that topics must jump ahead: the real ends of topics are unknown, and names that
    are not found again may have been used. The whole journal, as far back as it goes, is applied to it.
    """
    found = _Found(layout)
    old = _Salvage(layout, renamed=found.renamed)
    topics = [
        row for topic_id in {*found.segments, *old.topics} if (row := _topic(topic_id, found, old))
    ]
    ordinary = found.ordinary | old.ordinary
    named = {row.id: row.name for row in topics if row.id in ordinary}
    topics = [row for row in topics if row.id not in ordinary]
    if not old.renamed:
        # The other topics have their present names already.
        check_unreserved(layout, named, 0, old.meta.generation)
        log_renamed(sum(is_reserved(row.name) for row in topics))
    # If a name has two lives, the earlier one was destroyed, and its files were not deleted in time.
    kept = {row.name: row for row in sorted(topics)}
    ids = {row.id for row in kept.values()}
    segments = [row for topic_id in ids for row in found.segments.get(topic_id, ())]
    reports += _set_aside_segments(layout, disk, {(row.topic_id, row.base) for row in segments})
    ends = [(row.end_offset, row.end_ordinal, row.epoch) for row in kept.values()]
    ends += [(row.end_offset, row.end_ordinal, row.epoch) for row in old.tombstones]
    ends += [(old.meta.floor_offset, old.meta.floor_ordinal, old.meta.floor_epoch)]
    floor_offset, floor_ordinal, floor_epoch = map(max, zip(*ends, strict=True))
    for suffix in ("", "-wal", "-shm"):
        disk.unlink(layout.root / f"{_NEW_NAME}{suffix}")
    catalogue = Catalogue.create(layout.root, name=_NEW_NAME)
    with catalogue.transaction():
        catalogue.put(kept.values())
        catalogue.put(segments)
        catalogue.put(old.cursors.values())
        catalogue.put(old.producers.values())
        catalogue.put(old.batches.values())
        catalogue.put(old.notes.values())
        catalogue.put_meta(
            DirectoryMeta(
                next_topic_id=max(
                    [old.meta.next_topic_id, *(number + 1 for number in found.ids | ids)]
                ),
                floor_offset=floor_offset,
                floor_ordinal=floor_ordinal,
                floor_epoch=floor_epoch,
                clean=False,
                jump_due=True,
                rebuilt_from=max(old.meta.applied, old.meta.rebuilt_from),
                generation=old.meta.generation,
            )
        )
    catalogue.close()
    _set_aside(layout.root / FILE_NAME, disk)
    disk.rename(layout.root / _NEW_NAME, layout.root / FILE_NAME)
    disk.sync_directory(layout.root)
    reports.append(
        f"{len(kept)} topics were recovered; cursors, producers, batches and notes are {old.origin}"
    )
    reports += [
        f"batch {row.number} of producer {quoted(row.producer.decode())} continues where the backup says: "
        "some of its records may be appended twice"
        for row in old.stale_batches
    ]
    return Catalogue.open(layout.root)


class _Salvage:
    """Valid rows of the damaged catalogue, and rows of its backup that the damaged catalogue lacks."""

    def __init__(self, layout: Layout, *, renamed: bool) -> None:
        self.renamed = renamed
        """True if the directory holds files from after the renaming of reserved topics."""
        self.ordinary: set[int] = set()
        """Topics to which an earlier version gave a now reserved name: since destroyed, or a conflict."""
        self.meta = DirectoryMeta()
        self.topics: dict[int, TopicRow] = {}
        """Topics of the damaged catalogue, by number."""
        self.backed_up: dict[int, TopicRow] = {}
        self.tombstones: list[TombstoneRow] = []
        self.cursors: dict[tuple[bytes, bytes], CursorRow] = {}
        self.producers: dict[tuple[bytes, bytes], ProducerRow] = {}
        self.notes: dict[bytes, NoteRow] = {}
        self.batches: dict[tuple[bytes, int], BatchRow] = {}
        stale: list[tuple[bytes, int]] = []
        origins = []
        files = ((FILE_NAME, "the damaged file"), (BACKUP_NAME, "the backup"))
        formats = [_format(layout, name) for name, _ in files]
        self.renamed |= any(format_ >= RENAMED_FORMAT for format_ in formats if format_)
        for (name, origin), format_ in reversed(list(zip(files, formats, strict=True))):
            if not (layout.root / name).exists():
                continue
            # If a file does not tell its format, the other file does: the backup is replaced before new
            # topics are made.
            is_old = (format_ or max(filter(None, formats), default=0)) < RENAMED_FORMAT
            is_old &= format_ is not None or not self.renamed
            with closing(_Old(layout.root, name, is_old=is_old)) as old:
                rows = {row.id: row for row in old.rows(TopicRow)}
                self.ordinary |= old.ordinary
                batches = {(row.producer, row.number): row for row in old.rows(BatchRow)}
                if name == BACKUP_NAME:
                    self.backed_up = rows
                    # A batch without staged files was appended since the backup was made.
                    batches = {key: row for key, row in batches.items() if _is_staged(layout, row)}
                    stale = [key for key, row in batches.items() if row.file < row.files]
                else:
                    self.topics = rows
                    stale = [key for key in stale if key not in batches]
                self.batches |= batches
                self.tombstones += old.rows(TombstoneRow)
                self.cursors |= {(row.name, row.reader): row for row in old.rows(CursorRow)}
                self.producers |= {(row.name, row.producer): row for row in old.rows(ProducerRow)}
                self.notes |= {row.key: row for row in old.rows(NoteRow)}
                self.meta = old.meta() or self.meta
                if old.has_rows:
                    origins.append(origin)
        self.origin = "from " + " and ".join(origins) if origins else "lost"
        self.stale_batches = [self.batches[key] for key in stale]
        """Batches that only the backup has, and that were not completely appended when it was made."""

    def destroyed(self, name: bytes, epoch: int) -> bool:
        return any(row.name == name and row.epoch >= epoch for row in self.tombstones)


def _format(layout: Layout, name: str) -> int | None:
    """Return the format of a catalogue that may be damaged; None if the format is not known."""
    if not (layout.root / name).exists():
        return None
    with closing(_Old(layout.root, name, is_old=False)) as old:
        meta = old.meta()
        return meta.format if meta is not None else None


class _Old:
    """A catalogue that may be damaged anywhere: read by SQLite, and page by page if that fails."""

    def __init__(self, root: Path, name: str, *, is_old: bool) -> None:
        self.has_rows = False
        self.ordinary: set[int] = set()
        self._is_old = is_old
        self._path = root / name
        self._pages: Pages | None = None
        self._catalogue: Catalogue | None = None
        with suppress(DamagedCatalogueError):
            self._catalogue = Catalogue.open(root, name=name)

    def close(self) -> None:
        if self._catalogue is not None:
            self._catalogue.close()

    def meta(self) -> DirectoryMeta | None:
        with suppress(msgspec.MsgspecError):
            for row in self.rows(MetaRow):
                return msgspec.msgpack.decode(row.value, type=DirectoryMeta)
        return None

    def rows(self, kind: type[R]) -> list[R]:
        """Return the rows of a kind with a correct checksum."""
        found: list[R] = []
        whole = False
        if self._catalogue is not None:
            found, whole = self._catalogue.salvage(kind)
        if not whole:
            if self._pages is None:
                self._pages = Pages(self._path)
            known = {row_key(row) for row in found}
            found += [row for row in self._pages.rows(kind) if row_key(row) not in known]
        self.has_rows |= bool(found)
        if self._is_old:
            if kind is TopicRow:
                self.ordinary |= {row[0] for row in found if is_reserved(row[1])}
            found = [present(row) for row in found]
        return found


def _is_staged(layout: Layout, row: BatchRow) -> bool:
    files = msgspec.msgpack.decode(row.staged, type=StagedFiles)
    return any(layout.staged_file(file.id.hex()).exists() for file in files)


class _Found:
    """The contents of the index files."""

    def __init__(self, layout: Layout) -> None:
        self.segments: dict[int, list[SegmentRow]] = defaultdict(list)
        self.headers: dict[int, Header] = {}
        self.ids: set[int] = set()
        self.renamed = False
        """True if an index file was written after reserved topics were renamed."""
        self.ordinary: set[int] = set()
        """Topics to which an earlier version gave a name that is reserved now."""
        for file in layout.files(".idx"):
            self.ids.add(file.topic_id)
            data = bytes(load(file.path).data)
            header, segment = _read_index(file, data)
            if header is not None:
                if not is_old_header(data):
                    self.renamed = True
                elif is_reserved(name_in_header(data)):
                    self.ordinary.add(file.topic_id)
                known = self.headers.setdefault(file.topic_id, header)
                if known.base < header.base:
                    self.headers[file.topic_id] = header
            if segment is not None:
                self.segments[file.topic_id].append(segment)
        for rows in self.segments.values():
            rows.sort()


def _topic(topic_id: int, found: _Found, old: _Salvage) -> TopicRow | None:
    """Return the row of a topic, or None if its name is lost or the topic was destroyed."""
    segments = found.segments.get(topic_id, [])
    salvaged = old.topics.get(topic_id)
    header = found.headers.get(topic_id)
    if salvaged is None and segments:
        salvaged = old.backed_up.get(topic_id)
    if salvaged is None:
        if header is None or not segments or old.destroyed(header.name.encode(), header.epoch):
            return None
        # The segments tell the topic's start and end.
        durability, ms = Durability.SYNCED.value.encode(), segments[0].first_ms
        name = header.name.encode()
        salvaged = TopicRow(topic_id, name, header.epoch, durability, 0, 0, 0, 0, ms)
    if not segments:
        return salvaged
    first, last = segments[0], segments[-1]
    start = max((salvaged.start_offset, salvaged.start_ordinal), (first.base, first.first_ordinal))
    end = max((salvaged.end_offset, salvaged.end_ordinal), (last.end, last.end_ordinal))
    return salvaged._replace(
        epoch=max(salvaged.epoch, header.epoch if header is not None else 0),
        start_offset=start[0],
        start_ordinal=start[1],
        end_offset=end[0],
        end_ordinal=end[1],
        last_ms=max(salvaged.last_ms, last.last_ms),
    )


def _set_aside(path: Path, disk: Disk) -> None:
    """Keep the old catalogue under another name too, until the new one replaces it.

    A start that is killed in between finds the old rows in their place.
    """
    kept = path.with_name(f"damaged-{int(time.time() * 1000)}-{path.name}")
    for suffix in ("-wal", "-shm"):
        # SQLite would take these files for parts of the new catalogue.
        old = path.with_name(path.name + suffix)
        if old.exists():
            disk.rename(old, kept.with_name(kept.name + suffix))
    if path.exists():
        try:
            disk.link(path, kept)
        except OSError:
            disk.rename(path, kept)  # the file system has no links


def _set_aside_segments(layout: Layout, disk: Disk, known: set[tuple[int, int]]) -> Iterator[str]:
    """Move unknown files to the quarantine: they may hold records that are not in the journal."""
    for file in layout.files():
        if (file.topic_id, file.base) not in known and file.size:
            disk.make_directory(layout.quarantine)
            disk.rename(file.path, layout.quarantine / file.path.name)
            yield f"{file.path.name} belongs to no known topic: kept in quarantine"


def _read_index(file: SegmentFile, data: bytes) -> tuple[Header | None, SegmentRow | None]:
    header = decode_header(data)
    rows = list(decode_rows(data[HEADER_BYTES:]))
    # The last rows may have been written before their records when the machine stopped.
    while rows and not _row_holds(file.path.with_suffix(".log"), file.base, rows[-1]):
        rows.pop()
    good = [row for row in rows if row is not None]
    if not good:
        return header, None
    first, last = good[0], good[-1]
    return header, SegmentRow(
        topic_id=file.topic_id,
        base=file.base,
        end=last.end,
        rows=len(rows),
        first_ordinal=header.first_ordinal if header else first.ordinal,
        end_ordinal=last.end_ordinal,
        first_ms=first.ms,
        last_ms=last.ms,
    )


def _row_holds(path: Path, base: int, row: Row | None) -> bool:
    if row is None or not path.exists():
        return False
    with FileIO(path) as file:
        data, _ = read_patiently(file.fileno(), row.length, row.offset - base)
        return crc32c(data) == row.crc
