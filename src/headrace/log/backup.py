"""Backup of a data directory, also while a server runs on it, and restore.

Theory of operation. The backup needs no help of the server. It waits until the applier has moved every commit
that was in the journal at the beginning into segments. Then it copies the files that the catalogue names.
Segments only grow, so most are copied without holding anything. A last pass copies the growth and the
catalogue inside one read transaction: the backup is the state at this moment. The journal is not copied,
because the catalogue says that all of the journal is applied.

    marker ─▶ wait for the applier ─▶ copy ─▶ growth and catalogue ─▶ manifest ─▶ marker removed

The catalogue of a backup says that a jump is due: the first server that starts on the backup, or on a copy of
it, continues far ahead with new epochs. So a client's position after the backup never means other records.
`restore` makes the jump longer the older the backup is: of two restores of one backup, the later is ahead.

A directory with the marker is unfinished: servers do not start on it, and `restore` refuses it.

A restore may be given the directory that it replaces. Then everything that the log has deleted since the
backup was made stays deleted: destroyed topics, trimmed records, and dropped cursors and notes.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.config.settings import TopicRule
from headrace.errors import DataDirectoryError
from headrace.log.catalogue.catalogue import FILE_NAME, Catalogue, open_unchanged
from headrace.log.catalogue.rows import (
    CursorRow,
    NoteRow,
    SegmentRow,
    TombstoneRow,
    TopicRow,
    row_key,
)
from headrace.log.commit import journal
from headrace.log.commit.journal import StagedFiles
from headrace.log.disk import Disk, read_patiently
from headrace.log.layout import LOCK_NAME, TOKENS_NAME, UNFINISHED_NAME, Layout
from headrace.log.read.index import row_position
from headrace.log.recovery.recovery import mark_clean, recover
from headrace.log.recovery.scan import JournalScan
from headrace.log.saved_time import TIME_NAME

Progress = Callable[[int, int], None]
"""Called with the number of copied bytes, and the total."""

MANIFEST_NAME = "backup.json"
_FORMAT = 1

_MARKER = b"A backup or restore is written here, or was interrupted.\n"

_JUMPS_MAX = 1 << 20
"""Two years of minutes: after this number of jumps, offsets are still exact as double-precision numbers."""

_STALLED_S = 60.0
"""Seconds without any progress of the applier after which the backup fails."""
_POLL_S = 0.05

_BLOCK_BYTES = 1 << 20

_LARGE_BYTES = 1 << 20
"""Files of this size are synced one by one, so that a server on the same disk never waits for all of them."""

_GROWTH_BYTES = 64 << 20
"""The last pass begins when fewer bytes than this are missing."""
_PASSES_MAX = 5
_ATTEMPTS_MAX = 20
"""Largest number of last passes: a pass is repeated if retention deleted files meanwhile."""

_disk = Disk()


class BackupError(DataDirectoryError):
    """The backup or restore is not possible: the message says what to change."""


class BackupManifest(msgspec.Struct, frozen=True):
    """Description of a finished backup, stored in it."""

    format: int
    version: str
    """Version of the program that made the backup."""
    made_ms: int
    commit: int
    """Last commit of the journal that the backup holds."""
    topics: int
    segments: int
    records: int
    bytes: int


class Revoked(NamedTuple):
    """Number of things that a restore left out, because the log has deleted them since the backup."""

    topics: int
    """Number of destroyed topics; `trimmed` counts topics too."""
    trimmed: int
    cursors: int
    notes: int


def back_up(
    source: Path,
    target: Path,
    rule: Callable[[str], TopicRule],
    version: str,
    progress: Progress | None = None,
) -> BackupManifest:
    """Make `target` a backup of the data directory `source`, whether or not a server runs there.

    The backup holds at least everything that was acknowledged before the call. `rule` matters only if the
    last server was killed: then the backup applies that server's journal to the copy.
    """
    layout, copy = Layout(source), Layout(target)
    if target.resolve().is_relative_to(source.resolve()):
        raise BackupError(
            f"{target} lies in the data directory {source}: name a directory outside of it"
        )
    if (source / UNFINISHED_NAME).exists():
        raise BackupError(
            f"{source} is unfinished: a backup or restore was interrupted there; run it again"
        )
    with open_unchanged(source) as view:
        view.meta()  # raises unless this version knows the format, before anything is locked or made
    # The catalogue is opened again: while this process has the lock, no other process changes it.
    with (
        _lock_if_free(layout) as is_free,
        open_unchanged(source) as view,
        _unfinished(target),
    ):
        copy.make(_disk)
        is_clean = is_free and view.meta().clean
        if not is_free:
            _wait_until_applied(layout, view)
        elif not is_clean:
            sizes = {
                path.relative_to(source): path.stat().st_size for path in layout.journal_files()
            }
            FileCopy(source, target, None).take(sizes)
        _copy_small(source, target)
        _copy_named(view, layout, copy, progress)
        if is_free and not is_clean:
            recover(copy, _disk, rule, boot_id=journal.boot_id())
            mark_clean(copy, _disk)
            for path in copy.journal_files():
                _disk.unlink(path)
        return _seal(copy, version)


def restore(
    source: Path,
    target: Path,
    progress: Progress | None = None,
    old: Path | None = None,
) -> tuple[BackupManifest, Revoked | None]:
    """Make `target` a data directory with the content of a backup.

    `old` is the directory from which the backup was made: whatever it has deleted since is not restored.
    """
    manifest = read_manifest(source)
    layout, copy = Layout(source), Layout(target)
    revoked = None
    with (
        open_unchanged(source) as view,
        open_unchanged(old) if old is not None else nullcontext() as given_up,
    ):
        if given_up is not None:
            _check_comparable(given_up, view)
        if not view.meta().jump_due:
            raise BackupError(
                f"{source} is no longer a backup: a server was started on it; restore another backup"
            )
        with _unfinished(target):
            copy.make(_disk)
            _copy_small(source, target)
            if old is not None and (old / TOKENS_NAME).exists():
                # A token that was revoked since the backup stays revoked.
                _disk.write_file(copy.tokens, [(old / TOKENS_NAME).read_bytes()])
            _copy_named(view, layout, copy, progress)
            if given_up is not None:
                revoked = _revoke(copy, given_up)
            _set_meta(copy, restored_jumps=_jumps(manifest))
    return manifest, revoked


def _jumps(manifest: BackupManifest) -> int:
    """Return one jump per minute since the backup was made, plus one: no two restores continue alike."""
    minutes = (int(time.time() * 1000) - manifest.made_ms) // 60_000
    return 1 + min(max(0, minutes), _JUMPS_MAX)


def read_manifest(directory: Path) -> BackupManifest:
    """Return the manifest of a finished backup; raise `BackupError` for anything else."""
    if not directory.is_dir():
        raise BackupError(f"there is no directory {directory}")
    if (directory / UNFINISHED_NAME).exists():
        raise BackupError(
            f"{directory} is unfinished: the backup was interrupted; restore another backup"
        )
    path = directory / MANIFEST_NAME
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=BackupManifest)
    except FileNotFoundError:
        raise BackupError(
            f"{directory} is not a backup: it has no {MANIFEST_NAME}; `headrace backup` makes one"
        ) from None
    except msgspec.MsgspecError as error:
        raise BackupError(f"{path} is damaged: {error}; restore another backup") from None
    if manifest.format != _FORMAT:
        raise BackupError(
            f"the backup {directory} has format {manifest.format}, and this version reads only format "
            f"{_FORMAT}: restore it with Headrace {manifest.version}"
        )
    return manifest


@contextmanager
def _lock_if_free(layout: Layout) -> Iterator[bool]:
    """Lock a directory that no server uses while it is copied; yield False if a server uses it."""
    path = layout.root / LOCK_NAME
    if not path.exists() and not os.access(layout.root, os.W_OK):
        yield True  # read-only, and never used by a server
        return
    fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o640)
    is_free = True
    try:
        try:
            # A shared lock is enough: a server takes an exclusive one.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            is_free = False
        yield is_free
    finally:
        os.close(fd)


@contextmanager
def _unfinished(target: Path) -> Iterator[None]:
    """Take an empty or unfinished directory, and mark it as unfinished until the work is done and synced."""
    try:
        _disk.make_directory(target, 0o750)
    except FileExistsError:
        raise BackupError(f"{target} is not a directory") from None
    marker = target / UNFINISHED_NAME
    is_ours = marker.exists() and marker.read_bytes() == _MARKER
    others = [name for name in os.listdir(target) if name != "lost+found"]
    if others and not is_ours:
        raise BackupError(
            f"{target} is not empty: name a directory that is empty or does not exist"
        )
    with _disk.opened(marker, create=True) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BackupError(
                f"another backup or restore is writing to {target}: wait until it ends"
            ) from None
        _disk.write(fd, [_MARKER], 0, synced=True)
        _disk.sync_directory(target)
        _disk.sync_directory(target.parent)
        # An interrupted backup or restore has left files beside its marker.
        for path in list(target.rglob("*")):
            is_ours = path.relative_to(target).parts[0] != "lost+found"
            if is_ours and path.is_file() and path != marker:
                _disk.unlink(path)
        yield
        _disk.sync_file_system(fd)
        _disk.unlink(marker)
        _disk.sync_directory(target)


def _wait_until_applied(layout: Layout, view: Catalogue) -> None:
    """Wait until segments hold all commits that are in the journal now."""
    with view.snapshot():
        meta = view.meta()
        last = JournalScan(layout, meta, journal.boot_id()).last
    applied, since_s = meta.applied, time.monotonic()
    while applied < last:
        time.sleep(_POLL_S)
        now = view.meta().applied
        if now > applied:
            since_s = time.monotonic()
        elif time.monotonic() - since_s > _STALLED_S:
            raise BackupError(
                f"the server on {layout.root} has not applied its journal for {_STALLED_S:.0f} seconds: "
                "its disk may be full; see its log messages"
            )
        applied = now


NamedFiles = Mapping[Path, int]
"""Number of bytes that count of each file, by the file's path relative to the data directory."""


class FileCopy:
    """Copies files of one directory to another, each up to its end in the catalogue.

    Segments and indexes only grow, so a file that was copied before is continued at the end of its copy.
    """

    def __init__(self, source: Path, target: Path, progress: Progress | None) -> None:
        self._source = source
        self._target = target
        self._progress = progress
        self._sizes: dict[Path, int] = {}
        """Number of bytes of each file that the target has."""
        self._done = self._total = 0

    def missing_bytes(self, files: NamedFiles) -> int:
        return sum(max(0, size - self._sizes.get(path, 0)) for path, size in files.items())

    def take(self, files: NamedFiles) -> list[Path]:
        """Copy the missing bytes; return the files that no longer exist."""
        self._total = self._done + self.missing_bytes(files)
        gone = []
        for path, size in files.items():
            if self._sizes.get(path, -1) < size:
                try:
                    self._copy(path, size)
                except FileNotFoundError:
                    gone.append(path)
        return gone

    def keep_only(self, files: NamedFiles) -> None:
        """Delete the copies of all other files, which the source has deleted meanwhile."""
        for path in self._sizes.keys() - files.keys():
            _disk.unlink(self._target / path)

    def _copy(self, path: Path, size: int) -> None:
        position = self._sizes.get(path, 0)
        with (
            FileIO(self._source / path) as source,
            _disk.opened(self._target / path, create=True) as target,
        ):
            while position < size:
                wanted = min(_BLOCK_BYTES, size - position)
                # Unreadable pages become zeros in the copy: `verify` reports the damage.
                block, _ = read_patiently(source.fileno(), wanted, position)
                if not block:
                    break
                _disk.write(target, [block], position)
                position += len(block)
                self._done += len(block)
                if self._progress is not None:
                    self._progress(self._done, self._total)
            if position >= _LARGE_BYTES:
                _disk.sync(target)
        self._sizes[path] = size


def _copy_named(view: Catalogue, layout: Layout, copy: Layout, progress: Progress | None) -> None:
    """Copy the catalogue as of one moment, and every file that it names."""
    files = FileCopy(layout.root, copy.root, progress)
    for number in range(_PASSES_MAX):
        with view.snapshot():
            named = _named(view, layout)
        missing = files.missing_bytes(named)
        if number == 0:
            _check_room(copy.root, missing)
        elif missing < _GROWTH_BYTES:
            break
        files.take(named)
    for _ in range(_ATTEMPTS_MAX):
        # The snapshot keeps SQLite from emptying its write-ahead log, so little must be left to copy.
        with view.snapshot():
            named = _named(view, layout)
            if not files.take(named):
                view.back_up(copy.root / FILE_NAME, _disk)
                files.keep_only(named)
                return
    raise BackupError(
        f"files of {layout.root} were deleted again and again while they were copied: run the command "
        "again"
    )


def _named(view: Catalogue, layout: Layout) -> NamedFiles:
    """Return the files that the catalogue names."""
    found: dict[Path, int] = {}
    for row in view.all_segments():
        log = layout.segment(row.topic_id, row.base).relative_to(layout.root)
        found[log] = row.end - row.base
        found[log.with_suffix(".idx")] = row_position(row.rows)
    for batch in view.batches():
        for file in msgspec.msgpack.decode(batch.staged, type=StagedFiles):
            found[layout.staged_file(file.id.hex()).relative_to(layout.root)] = file.size
    return found


def _check_room(target: Path, needed: int) -> None:
    disk = os.statvfs(target)
    room = disk.f_bavail * disk.f_frsize
    if room < needed:
        raise BackupError(
            f"{target} has room for {room:,} bytes, and the copy needs {needed:,}: free some space, or name "
            "a directory on another disk"
        )


def _copy_small(source: Path, target: Path) -> None:
    """Copy the small files beside the log: the saved time and the tokens of clients.

    A server that starts years later must not expire everything at once.
    """
    for name in (TIME_NAME, TOKENS_NAME):
        if (source / name).exists():
            _disk.write_file(target / name, [(source / name).read_bytes()])


def _seal(copy: Layout, version: str) -> BackupManifest:
    """Record in the catalogue that all is applied and a jump is due, and write the manifest."""
    _set_meta(copy, restored_jumps=1)
    with closing(Catalogue.open(copy.root)) as catalogue:
        segments = list(catalogue.all_segments())
        manifest = BackupManifest(
            format=_FORMAT,
            version=version,
            made_ms=int(time.time() * 1000),
            commit=catalogue.meta().applied,
            topics=sum(1 for _ in catalogue.topics()),
            segments=len(segments),
            records=sum(row.end_ordinal - row.first_ordinal for row in segments),
            bytes=sum(row.end - row.base for row in segments),
        )
    encoded = msgspec.json.format(msgspec.json.encode(manifest)) + b"\n"
    _disk.write_file(copy.root / MANIFEST_NAME, [encoded])
    return manifest


def _set_meta(copy: Layout, *, restored_jumps: int) -> None:
    with closing(Catalogue.open(copy.root)) as catalogue, catalogue.transaction():
        catalogue.change_meta(
            clean=True, jump_due=True, restored_jumps=restored_jumps, journal_files={}
        )


def _check_comparable(old: Catalogue, backup: Catalogue) -> None:
    """Raise DataDirectoryError if the old catalogue is incomplete or cannot be compared with the backup's."""
    now, then = old.meta(), backup.meta()
    if now.format != then.format:
        raise DataDirectoryError(
            f"{old.path.parent} and the backup have catalogues of different formats and cannot be compared: "
            "restore without --old"
        )
    if not now.clean:
        raise DataDirectoryError(
            f"{old.path.parent} was not left by a clean stop, so its catalogue may be incomplete: start and "
            "stop a server there first"
        )
    # The log never gives a topic's number to another topic.
    numbers = ((row, old.topic_by_id(row.id)) for row in backup.topics())
    if (
        now.applied < then.applied
        or now.next_topic_id < then.next_topic_id
        or any(known is not None and known.name != row.name for row, known in numbers)
    ):
        raise DataDirectoryError(
            f"{old.path.parent} is not the log that the backup was made of, or is an older copy of it: "
            "name the directory that the restored one replaces, or restore without --old"
        )


def _revoke(copy: Layout, old: Catalogue) -> Revoked:
    """Remove from the copy everything that `old` no longer has."""
    destroyed = trimmed = 0
    with closing(Catalogue.open(copy.root)) as restored, restored.transaction():
        for row in list(restored.topics()):
            now = old.topic_by_id(row.id)  # a number is never used twice
            if now is None:
                _destroy(restored, old, row)
                destroyed += 1
            elif now.start_offset > row.start_offset:
                _trim(restored, row, now)
                trimmed += 1
        kept = {(one.name, one.reader) for one in old.cursors()}
        cursors = {(one.name, one.reader) for one in restored.cursors()} - kept
        restored.drop(CursorRow, cursors)
        notes = [(one.key,) for one in restored.notes() if old.note(one.key) is None]
        restored.drop(NoteRow, notes)
        named = {copy.segment(row.topic_id, row.base) for row in restored.all_segments()}
    for file in list(copy.files()):
        if file.path.with_suffix(".log") not in named:
            _disk.unlink(file.path)
    return Revoked(destroyed, trimmed, len(cursors), len(notes))


def _destroy(restored: Catalogue, old: Catalogue, row: TopicRow) -> None:
    grave, ms = old.grave(row.name)
    restored.drop_topic(row.id)
    tombstone = TombstoneRow(
        name=row.name,
        epoch=max(row.epoch, grave.epoch),
        end_offset=max(row.end_offset, grave.offset),
        end_ordinal=max(row.end_ordinal, grave.ordinal),
        ms=max(row.last_ms, ms),
    )
    restored.put([tombstone])


def _trim(restored: Catalogue, row: TopicRow, now: TopicRow) -> None:
    start = min((now.start_offset, now.start_ordinal), (row.end_offset, row.end_ordinal))
    restored.put([row._replace(start_offset=start[0], start_ordinal=start[1])])
    trimmed = [one for one in restored.segments(row.id) if one.end <= start[0]]
    restored.drop(SegmentRow, map(row_key, trimmed))
