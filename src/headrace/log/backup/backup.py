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

Files are copied up to their ends in the catalogue. Segments and indexes only grow, so a file that was copied
before is continued at the end of its copy.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.config.settings import TopicRule
from headrace.errors import DataDirectoryError
from headrace.log.backup.revocations import Revoked, check_readable, revoke
from headrace.log.catalogue.catalogue import FILE_NAME, Catalogue
from headrace.log.catalogue.rows import BatchRow, SegmentRow
from headrace.log.commit import journal
from headrace.log.commit.journal import StagedFiles
from headrace.log.disk import Disk, read_patiently
from headrace.log.layout import LOCK_NAME, UNFINISHED_NAME, Layout
from headrace.log.read.index import row_position
from headrace.log.recovery.recovery import mark_clean, recover
from headrace.log.recovery.scan import JournalScan
from headrace.log.verify.inspect import CatalogueView, open_unchanged

Progress = Callable[[int, int], None]
"""Called with the number of copied bytes, and the total."""

_BLOCK_BYTES = 1 << 20

_LARGE_BYTES = 1 << 20
"""Files of this size are synced one by one, so that a server on the same disk never waits for all of them."""


class NamedFile(NamedTuple):
    """A file and the number of its bytes that count."""

    path: Path
    """Path relative to the data directory."""
    size: int


def named_files(
    layout: Layout, segments: Iterable[SegmentRow], batches: Iterable[BatchRow]
) -> Iterator[NamedFile]:
    """Yield the files that belong to these rows of the catalogue."""
    for row in segments:
        log = layout.segment(row.topic_id, row.base).relative_to(layout.root)
        yield NamedFile(log, row.end - row.base)
        yield NamedFile(log.with_suffix(".idx"), row_position(row.rows))
    for batch in batches:
        for file in msgspec.msgpack.decode(batch.staged, type=StagedFiles):
            path = layout.staged_file(file.id.hex()).relative_to(layout.root)
            yield NamedFile(path, file.size)


class FileCopy:
    """Copies files of one directory to another."""

    def __init__(self, source: Path, target: Path, disk: Disk, progress: Progress | None) -> None:
        self._source = source
        self._target = target
        self._disk = disk
        self._progress = progress
        self._sizes: dict[Path, int] = {}
        """Number of bytes of each file that the target has."""
        self._done = self._total = 0

    def missing_bytes(self, files: Iterable[NamedFile]) -> int:
        return sum(max(0, file.size - self._sizes.get(file.path, 0)) for file in files)

    def take(self, files: list[NamedFile]) -> list[NamedFile]:
        """Copy the missing bytes; return the files that no longer exist."""
        self._total = self._done + self.missing_bytes(files)
        gone = []
        for file in files:
            if self._sizes.get(file.path, -1) < file.size:
                try:
                    self._copy(file)
                except FileNotFoundError:
                    gone.append(file)
        return gone

    def keep_only(self, files: Iterable[NamedFile]) -> None:
        """Delete the copies of all other files, which the source has deleted meanwhile."""
        for path in self._sizes.keys() - {file.path for file in files}:
            self._disk.unlink(self._target / path)

    def _copy(self, file: NamedFile) -> None:
        position = self._sizes.get(file.path, 0)
        source = os.open(self._source / file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            target = self._disk.open(self._target / file.path, create=True)
            try:
                while position < file.size:
                    wanted = min(_BLOCK_BYTES, file.size - position)
                    # Unreadable pages become zeros in the copy: `verify` reports the damage.
                    block, _ = read_patiently(source, wanted, position)
                    if not block:
                        break
                    self._disk.write(target, [block], position)
                    position += len(block)
                    self._advance(len(block))
                if position >= _LARGE_BYTES:
                    self._disk.sync(target)
            finally:
                self._disk.close(target)
        finally:
            os.close(source)
        self._sizes[file.path] = file.size

    def _advance(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)


MANIFEST_NAME = "backup.json"
_FORMAT = 1

_MARKER = b"A backup or restore is written here, or was interrupted.\n"

_JUMPS_MAX = 1 << 20
"""Two years of minutes: after this number of jumps, offsets are still exact as double-precision numbers."""

_CLOCK_NAME = "clock"

_STALLED_S = 60.0
"""Seconds without any progress of the applier after which the backup fails."""
_POLL_S = 0.05

_GROWTH_BYTES = 64 << 20
"""The last pass begins when fewer bytes than this are missing."""
_PASSES_MAX = 5
_ATTEMPTS_MAX = 20
"""Largest number of last passes: a pass is repeated if retention deleted files meanwhile."""


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


def back_up(
    source: Path,
    target: Path,
    rule: Callable[[str], TopicRule],
    version: str,
    progress: Progress | None = None,
    disk: Disk | None = None,
) -> BackupManifest:
    """Make `target` a backup of the data directory `source`, whether or not a server runs there.

    The backup holds at least everything that was acknowledged before the call. `rule` matters only if the
    last server was killed: then the backup applies that server's journal to the copy.
    """
    disk = disk or Disk()
    layout, copy = Layout(source), Layout(target)
    if target.resolve().is_relative_to(source.resolve()):
        raise BackupError(f"{target} lies in the data directory: choose another place")
    if (source / UNFINISHED_NAME).exists():
        raise BackupError(f"{source} is unfinished: a backup or restore was interrupted there")
    with open_unchanged(source) as view:
        view.meta()  # raises unless this version knows the format, before anything is locked or made
    # The catalogue is opened again: while this process has the lock, no other process changes it.
    with (
        _lock_if_free(layout) as is_free,
        open_unchanged(source) as view,
        _unfinished(target, disk),
    ):
        copy.make(disk)
        is_clean = is_free and view.meta().clean
        if not is_free:
            _wait_until_applied(layout, view)
        elif not is_clean:
            _copy_journal(layout, copy, disk)
        _copy_clock(source, target, disk)
        _copy_named(view, layout, copy, disk, progress)
        if is_free and not is_clean:
            recover(copy, disk, rule, boot_id=journal.boot_id())
            mark_clean(copy, disk)
            shutil.rmtree(copy.journal)
            copy.journal.mkdir()
        return _seal(copy, disk, version)


def restore(
    source: Path,
    target: Path,
    progress: Progress | None = None,
    disk: Disk | None = None,
    old: Path | None = None,
) -> tuple[BackupManifest, Revoked | None]:
    """Make `target` a data directory with the content of a backup.

    `old` is the directory from which the backup was made: whatever it has deleted since is not restored.
    """
    disk = disk or Disk()
    manifest = read_manifest(source)
    layout, copy = Layout(source), Layout(target)
    revoked = None
    with ExitStack() as stack:
        view = stack.enter_context(open_unchanged(source))
        given_up = stack.enter_context(open_unchanged(old)) if old is not None else None
        if given_up is not None:
            check_readable(given_up, view)
        if not view.meta().jump_due:
            raise BackupError(
                f"{source} is no backup any more: a server was started on it; restore another one"
            )
        with _unfinished(target, disk):
            copy.make(disk)
            _copy_clock(source, target, disk)
            _copy_named(view, layout, copy, disk, progress)
            if given_up is not None:
                revoked = _revoke(copy, given_up, disk)
            _set_meta(copy, restored_jumps=_jumps(manifest))
            _sync(target, disk)
    return manifest, revoked


def _revoke(copy: Layout, old: CatalogueView, disk: Disk) -> Revoked:
    catalogue = Catalogue.open(copy.root)
    try:
        revoked = revoke(catalogue, old)
        named = {copy.segment(row.topic_id, row.base) for row in catalogue.all_segments()}
    finally:
        catalogue.close()
    for suffix in (".log", ".idx"):
        for file in list(copy.files(suffix)):
            if file.path.with_suffix(".log") not in named:
                disk.unlink(file.path)
    return revoked


def _jumps(manifest: BackupManifest) -> int:
    """Return one jump per minute since the backup was made, plus one: no two restores continue alike."""
    minutes = (int(time.time() * 1000) - manifest.made_ms) // 60_000
    return 1 + min(max(0, minutes), _JUMPS_MAX)


def read_manifest(directory: Path) -> BackupManifest:
    """Return the manifest of a finished backup; raise `BackupError` for anything else."""
    if not directory.is_dir():
        raise BackupError(f"there is no directory {directory}")
    if (directory / UNFINISHED_NAME).exists():
        raise BackupError(f"{directory} is unfinished: the backup was interrupted, use another one")
    try:
        manifest = msgspec.json.decode(
            (directory / MANIFEST_NAME).read_bytes(), type=BackupManifest
        )
    except FileNotFoundError:
        raise BackupError(
            f"{directory} is not a backup: it has no {MANIFEST_NAME}; `headrace backup` makes one"
        ) from None
    except msgspec.MsgspecError as error:
        raise BackupError(f"{directory / MANIFEST_NAME} is damaged: {error}") from None
    if manifest.format != _FORMAT:
        raise BackupError(f"{directory} has format {manifest.format}, this version reads {_FORMAT}")
    return manifest


@contextmanager
def _lock_if_free(layout: Layout) -> Iterator[bool]:
    """Lock a directory that no server uses while it is copied; yield False if a server uses it."""
    path = layout.root / LOCK_NAME
    if not path.exists() and not os.access(layout.root, os.W_OK):
        yield True  # read-only, and never used by a server
        return
    fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        try:
            # A shared lock is enough: a server takes an exclusive one.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            is_free = False
        else:
            is_free = True
        yield is_free
    finally:
        os.close(fd)


@contextmanager
def _unfinished(target: Path, disk: Disk) -> Iterator[None]:
    """Take an empty or unfinished directory, and mark it as unfinished until the work is done."""
    try:
        target.mkdir(mode=0o750, parents=True, exist_ok=True)
    except FileExistsError:
        raise BackupError(f"{target} is not a directory") from None
    marker = target / UNFINISHED_NAME
    is_ours = marker.exists() and marker.read_bytes() == _MARKER
    others = [name for name in os.listdir(target) if name != "lost+found"]
    if others and not is_ours:
        raise BackupError(
            f"{target} is not empty: name a directory that is empty or does not exist"
        )
    fd = disk.open(marker, create=True)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BackupError(f"another backup or restore writes to {target}") from None
        disk.write(fd, [_MARKER], 0, synced=True)
        disk.sync_directory(target)
        disk.sync_directory(target.parent)
        _empty(target, but=marker.name)
        yield
        disk.unlink(marker)
        disk.sync_directory(target)
    finally:
        disk.close(fd)


def _empty(directory: Path, but: str) -> None:
    """Delete the files that an interrupted backup or restore has left."""
    for name in os.listdir(directory):
        path = directory / name
        if path.is_dir() and name != "lost+found":
            shutil.rmtree(path)
        elif path.is_file() and name != but:
            path.unlink()


def _wait_until_applied(layout: Layout, view: CatalogueView) -> None:
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
                f"the server at {layout.root} does not apply its journal: is its disk full? "
                "Its diagnostics say why"
            )
        applied = now


def _copy_named(
    view: CatalogueView, layout: Layout, copy: Layout, disk: Disk, progress: Progress | None
) -> None:
    """Copy the catalogue as of one moment, and every file that it names."""
    files = FileCopy(layout.root, copy.root, disk, progress)
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
                view.back_up(copy.root / FILE_NAME)
                files.keep_only(named)
                return
    raise BackupError(f"files of {layout.root} vanished again and again while they were copied")


def _named(view: CatalogueView, layout: Layout) -> list[NamedFile]:
    return list(named_files(layout, view.all_segments(), view.batches()))


def _check_room(target: Path, needed: int) -> None:
    room = os.statvfs(target)
    if room.f_bavail * room.f_frsize < needed:
        raise BackupError(
            f"{target} has room for {room.f_bavail * room.f_frsize:,} bytes, {needed:,} are needed"
        )


def _copy_clock(source: Path, target: Path, disk: Disk) -> None:
    """Copy the saved time: a server that starts years later must not expire everything at once."""
    if (source / _CLOCK_NAME).exists():
        data = (source / _CLOCK_NAME).read_bytes()
        fd = disk.open(target / _CLOCK_NAME, create=True)
        try:
            disk.write(fd, [data], 0)
        finally:
            disk.close(fd)


def _copy_journal(layout: Layout, copy: Layout, disk: Disk) -> None:
    named = [
        NamedFile(path.relative_to(layout.root), path.stat().st_size)
        for path in layout.journal_files()
    ]
    FileCopy(layout.root, copy.root, disk, None).take(named)


def _seal(copy: Layout, disk: Disk, version: str) -> BackupManifest:
    """Record in the catalogue that all is applied and a jump is due, and write the manifest."""
    _set_meta(copy, restored_jumps=1)
    catalogue = Catalogue.open(copy.root)
    try:
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
    finally:
        catalogue.close()
    fd = disk.open(copy.root / MANIFEST_NAME, create=True)
    try:
        disk.write(fd, [msgspec.json.format(msgspec.json.encode(manifest)) + b"\n"], 0)
    finally:
        disk.close(fd)
    _sync(copy.root, disk)
    return manifest


def _set_meta(copy: Layout, *, restored_jumps: int) -> None:
    catalogue = Catalogue.open(copy.root)
    try:
        with catalogue.transaction():
            meta = msgspec.structs.replace(
                catalogue.meta(),
                clean=True,
                jump_due=True,
                restored_jumps=restored_jumps,
                journal_files={},
            )
            catalogue.put_meta(meta)
    finally:
        catalogue.close()


def _sync(root: Path, disk: Disk) -> None:
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        disk.sync_file_system(fd)
    finally:
        os.close(fd)
