"""Backups of a data directory, made beside a running server, and what puts them back in place.

Theory of operation. The server is not asked for anything. A backup waits until the applier has moved every
commit that the journal held at its beginning into segments. Then it copies the files that the catalogue
names. Segments only ever grow, so most are copied without holding anything; a last pass copies the growth
and the catalogue inside one read transaction, which is the moment that the backup stands for. The journal is
left out: the catalogue says that nothing in it is missing.

    marker ─▶ wait for the applier ─▶ copy ─▶ growth and catalogue ─▶ manifest ─▶ marker removed

The catalogue of a backup says that a jump is due: whichever server first starts on it, or on a copy of it,
goes on far ahead with new epochs, and no position of a client that has seen more comes to mean other records.
`restore` makes the jump longer the older the backup is: of two restores from one backup the later is ahead.

A directory with the marker is unfinished: no server starts on it, and nothing is restored from it.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from headrace.config import TopicRule
from headrace.errors import DataDirectoryError
from headrace.log import journal
from headrace.log.catalogue import FILE_NAME, Catalogue
from headrace.log.disk import Disk
from headrace.log.file_copy import FileCopy, NamedFile, Progress, named_files
from headrace.log.inspect import CatalogueView, open_unchanged
from headrace.log.journal_scan import JournalScan
from headrace.log.layout import LOCK_NAME, UNFINISHED_NAME, Layout
from headrace.log.recovery import mark_clean, recover
from headrace.log.revocations import Revoked, check_readable, revoke

MANIFEST_NAME = "backup.json"
_FORMAT = 1

_MARKER = b"A backup or restore is written here, or was interrupted.\n"

_JUMPS_MAX = 1 << 20
"""Two years of minutes: with so many jumps, offsets still are exact in programs that hold them as doubles."""

_CLOCK_NAME = "clock"

_STALLED_S = 60.0
"""How long the applier may make no progress at all."""
_POLL_S = 0.05

_GROWTH_BYTES = 64 << 20
"""With less than this missing, the last pass begins."""
_PASSES_MAX = 5
_ATTEMPTS_MAX = 20
"""Last passes in which files vanished because retention took them."""


class BackupError(DataDirectoryError):
    """The backup or restore cannot be done: the message says what to change."""


class Manifest(msgspec.Struct, frozen=True):
    """What a finished backup says of itself."""

    format: int
    version: str
    """Of the program that made it."""
    made_ms: int
    commit: int
    """The last commit of the journal that it holds."""
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
) -> Manifest:
    """Make `target` a backup of the data directory `source`, whether or not a server runs there.

    Holds at least everything that was acknowledged before the call. `rule` matters only where the last
    server was killed: its journal is then applied to the copy.
    """
    disk = disk or Disk()
    layout, copy = Layout(source), Layout(target)
    if target.resolve().is_relative_to(source.resolve()):
        raise BackupError(f"{target} lies in the data directory: choose another place")
    if (source / UNFINISHED_NAME).exists():
        raise BackupError(f"{source} is unfinished: a backup or restore was interrupted there")
    with open_unchanged(source) as view:
        view.meta()  # raises unless this version knows the format, before anything is locked or made
    # Opened again: who has the lock knows that nobody changes the catalogue.
    with (
        _lock_if_free(layout) as is_free,
        open_unchanged(source) as view,
        _unfinished(target, disk),
    ):
        copy.make()
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
) -> tuple[Manifest, Revoked | None]:
    """Make `target` a data directory with what a backup holds.

    Without what `old`, the directory of which the backup was made, has given up since.
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
            copy.make()
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


def _jumps(manifest: Manifest) -> int:
    """One more for every minute since the backup was made, so that no two restores continue alike."""
    minutes = (int(time.time() * 1000) - manifest.made_ms) // 60_000
    return 1 + min(max(0, minutes), _JUMPS_MAX)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a finished backup; raises `BackupError` for anything else."""
    if not directory.is_dir():
        raise BackupError(f"there is no directory {directory}")
    if (directory / UNFINISHED_NAME).exists():
        raise BackupError(f"{directory} is unfinished: the backup was interrupted, use another one")
    try:
        manifest = msgspec.json.decode((directory / MANIFEST_NAME).read_bytes(), type=Manifest)
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
    """Keep servers away while a directory that none uses is copied; False where one does."""
    path = layout.root / LOCK_NAME
    if not path.exists() and not os.access(layout.root, os.W_OK):
        yield True  # read-only, and never used by a server
        return
    fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        try:
            # Shared is enough: a server takes it for itself alone.
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
    """Take an empty directory, or one that was left unfinished, and mark it until the work is done."""
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
    """Delete what an interrupted backup or restore has left."""
    for name in os.listdir(directory):
        path = directory / name
        if path.is_dir() and name != "lost+found":
            shutil.rmtree(path)
        elif path.is_file() and name != but:
            path.unlink()


def _wait_until_applied(layout: Layout, view: CatalogueView) -> None:
    """Wait until segments hold everything that the journal holds now."""
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
        # SQLite's log cannot be emptied meanwhile: there must be little left to copy.
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
    """The saved time: a server that starts years later must not forget everything at once."""
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


def _seal(copy: Layout, disk: Disk, version: str) -> Manifest:
    """Say in the catalogue that nothing is missing and a jump is due, and write the manifest."""
    _set_meta(copy, restored_jumps=1)
    catalogue = Catalogue.open(copy.root)
    try:
        segments = list(catalogue.all_segments())
        manifest = Manifest(
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
