"""Staged files: durable uploads that wait for their batch and are not visible to readers. Knows no topics.

A file is written under a temporary name, and gets its own name when it is complete and on disk. A batch that
names the file *claims* it. The applier deletes the file when that batch is in the segments (`log/apply/`).
A file that no batch has claimed for `limits.staged_age_s` is deleted here.
"""

import os
import re
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.config.settings import Limits
from headrace.errors import StagedClaimedError, StagingFullError, UnknownStagedError
from headrace.log.batch.blocks import BlockDecoder, Checks, staged_seed
from headrace.log.commit.journal import StagedFile
from headrace.log.disk import Disk, is_full
from headrace.log.layout import Layout
from headrace.log.store import Clocks, Runner

SWEEP_S = 600.0
"""Seconds between two searches for files that no batch has claimed."""

_SYNC_BYTES = 8 << 20
"""Bytes of an upload that are written before the disk is told to start writing them out."""

ROOM_BYTES_MIN = 64 << 20
"""Free space that uploads leave for publishers, besides the space that appending the uploads takes."""

_ROOM_STEP_BYTES = 8 << 20

FILES_MAX = 250_000
"""Uploads that are kept at a time. An upload without records takes room too."""
UPLOAD_TOPICS_MAX = 1000
"""Topics of one upload that are remembered. Those of others are read from the file when they are needed."""
TOPICS_MAX = 100_000
"""Topics of all uploads that are remembered."""

_NAME = re.compile(r"[0-9a-f]{32}")
_UNFINISHED = ".new"


@dataclass(slots=True)
class CompleteUpload:
    id: str
    size: int
    since_s: float
    """Time of the upload, by the monotonic clock."""
    claimed: bool = False
    topics: frozenset[str] | None = None
    """Its topics; None, for unknown, if they are many or the file is from before the start."""


class StagingUpload:
    """A staged file that is being written. Usable from any thread, one call at a time."""

    def __init__(
        self, layout: Layout, disk: Disk, checks: Checks, now_ms: Callable[[], int]
    ) -> None:
        self.id = secrets.token_hex(16)
        self.size = 0
        """Number of bytes reserved for the file."""
        self._path = layout.staged_file(self.id)
        self._unfinished = self._path.with_suffix(_UNFINISHED)
        self._disk = disk
        self._now_ms = now_ms
        self._decoder = BlockDecoder(checks, staged_seed(self.id))
        self._fd: int | None = None
        self._written = self._sync_started = 0
        self._lock = threading.Lock()
        self.topics: frozenset[str] | None = frozenset()
        """Topics that `take_topics` has returned; None if they are many."""
        self._over = False
        """True once the upload was aborted: a thread that still works on it must not recreate the file."""

    @property
    def records(self) -> int:
        return self._decoder.records

    def take_topics(self) -> Collection[str]:
        """Return the topics that have come since the last call. Not to be called during `feed`."""
        topics, self._decoder.topics = self._decoder.topics, {}
        if self.topics is not None:
            known = self.topics.union(topics) if topics else self.topics
            self.topics = known if len(known) <= UPLOAD_TOPICS_MAX else None
        return topics

    def feed(self, *data: bytes) -> None:
        """Check and write the data that has arrived; raise BadBlockError or StagingFullError."""
        with self._lock, _no_room():
            if self._over:
                return
            parts = self._decoder.feed(*data)
            if self._fd is None:
                self._fd = self._disk.open(self._unfinished, create=True)
            if parts:
                self._disk.write(self._fd, parts, self._written)
                self._written += sum(map(len, parts))
            started, size = self._sync_started, self._written - self._sync_started
            if size >= _SYNC_BYTES:
                self._disk.start_sync(self._fd, started, size)
                self._sync_started = self._written

    def finish(self) -> None:
        """Make the file durable, and give it its name."""
        with self._lock, _no_room():
            if self._over:
                return
            self._decoder.finish()
            if self._fd is None:
                self._fd = self._disk.open(self._unfinished, create=True)
            self._disk.date(self._fd, self._now_ms())  # the next start computes the age from it
            self._disk.sync(self._fd)
            self._close()
            self._disk.rename(self._unfinished, self._path)
            self._disk.sync_directory(self._path.parent)

    def abort(self) -> None:
        """Give up the upload and delete its unfinished file."""
        with self._lock:
            self._over = True
            self._close()
            self._disk.unlink(self._unfinished)

    def _close(self) -> None:
        if self._fd is not None:
            self._disk.close(self._fd)
            self._fd = None


class Staging:
    """The set of staged files, and their claims. Called from the loop only."""

    def __init__(
        self,
        layout: Layout,
        disk: Disk,
        runner: Runner,
        limits: Limits,
        checks: Checks,
        clocks: Clocks,
    ) -> None:
        self._layout = layout
        self._disk = disk
        self._runner = runner
        self.limits = limits
        self._checks = checks
        self._files: dict[str, CompleteUpload] = {}
        self._topics = 0
        """Topics that are remembered, counted for each file."""
        self._swept_s = 0.0
        self.bytes = 0
        """Size of all files, including those that are being uploaded."""
        self._elapsed_s, self._now_ms = clocks.elapsed_s, clocks.now_ms
        started_s = clocks.elapsed_s()
        now_s = min(clocks.wall_s(), clocks.now_ms() / 1000)
        with os.scandir(layout.staged) as found:
            # Files with other names are not Headrace's, and are left alone.
            for entry in (one for one in found if _NAME.fullmatch(one.name) and one.is_file()):
                # The time of a copied file is from the wall clock, which may have jumped. The smaller of both
                # ages is used, so that no file is deleted too early.
                age_s = max(0.0, now_s - entry.stat().st_mtime)
                size = entry.stat().st_size
                self._files[entry.name] = CompleteUpload(entry.name, size, started_s - age_s)
                self.bytes += size

    # Uploading

    def begin(self) -> StagingUpload:
        if len(self._files) >= FILES_MAX:
            raise StagingFullError(
                f"{len(self._files)} uploads wait for their batches: upload again when there are fewer"
            )
        return StagingUpload(self._layout, self._disk, self._checks, self._now_ms)

    def reserve(self, upload: StagingUpload, size: int) -> None:
        """Reserve `size` more bytes for the upload; raise StagingFullError if they do not fit."""
        if self.bytes + size > self.limits.staged_bytes_max:
            raise StagingFullError(
                f"{self.bytes} bytes are staged, limits.staged_bytes_max allows "
                f"{self.limits.staged_bytes_max}: upload again when their batches are appended"
            )
        before = upload.size
        upload.size += size
        self.bytes += size
        if not before or before // _ROOM_STEP_BYTES != upload.size // _ROOM_STEP_BYTES:
            self._check_room()

    def _check_room(self) -> None:
        """Raise StagingFullError unless the disk has room to append all staged records.

        Staged records are written once more, to segments. Lack of room there would hold back all publishes.
        """
        found = os.statvfs(self._layout.root)
        free = found.f_bavail * found.f_frsize
        if free < self.bytes + ROOM_BYTES_MIN:
            raise StagingFullError(
                f"{free} bytes are free on the disk, and {self.bytes} staged bytes are still to be appended: "
                "upload again when there is room"
            )

    def keep(self, upload: StagingUpload) -> None:
        """Add the file of a finished upload."""
        upload.take_topics()
        topics = upload.topics
        if topics is not None and self._topics + len(topics) > TOPICS_MAX:
            topics = None
        self._topics += len(topics or ())
        self._files[upload.id] = CompleteUpload(
            upload.id, upload.size, self._elapsed_s(), topics=topics
        )

    def drop(self, upload: StagingUpload) -> None:
        """Abort an upload and release its reserved bytes."""
        self.bytes -= upload.size
        self._runner.background(upload.abort, lambda _: None)

    # Claiming

    def claim(self, ids: Sequence[str]) -> list[StagedFile]:
        """Claim the files for a batch, all or none; raise UnknownStagedError or StagedClaimedError."""
        files = []
        for staged_id in ids:
            staged = self._files.get(staged_id)
            if staged is None:
                raise UnknownStagedError(f"there is no staged file {staged_id[:40]!r}")
            if staged.claimed:
                raise StagedClaimedError(f"staged file {staged_id!r} is part of another batch")
            files.append(staged)
        for staged in files:
            staged.claimed = True
        # A file without records need not be kept.
        self._delete([staged for staged in files if not staged.size])
        return [StagedFile(bytes.fromhex(one.id), one.size) for one in files if one.size]

    def release(self, files: Iterable[StagedFile]) -> None:
        """Release the files of a refused batch, so that another batch may claim them."""
        for file in files:
            self._files[file.id.hex()].claimed = False

    def topics(self, files: Iterable[StagedFile]) -> frozenset[str] | None:
        """Return the topics of the files; None if they are not known."""
        found: set[str] = set()
        for file in files:
            topics = self._files[file.id.hex()].topics
            if topics is None:
                return None
            found |= topics
        return frozenset(found)

    def restore_claims(self, files: Iterable[StagedFile]) -> None:
        """Claim the files of a batch that was decided before the start."""
        for file in files:
            staged = self._files.get(file.id.hex())
            if staged is not None:
                staged.claimed = True

    def forget(self, files: Iterable[StagedFile]) -> None:
        """Forget files that the applier has deleted."""
        for file in files:
            staged = self._files.get(file.id.hex())
            if staged is not None:
                self._forget(staged)

    def discard(self, ids: Collection[str]) -> None:
        """Delete the files that exist and that no batch has claimed."""
        found = [self._files[one] for one in dict.fromkeys(ids) if one in self._files]
        self._delete([staged for staged in found if not staged.claimed])

    def _forget(self, staged: CompleteUpload) -> None:
        del self._files[staged.id]
        self.bytes -= staged.size
        self._topics -= len(staged.topics or ())

    def _delete(self, files: Sequence[CompleteUpload]) -> None:
        for staged in files:
            self._forget(staged)
        paths = [self._layout.staged_file(staged.id) for staged in files]
        if paths:
            self._runner.background(partial(_unlink, self._disk, paths), lambda _: None)

    def tick(self, now_s: float) -> None:
        """Delete, from time to time, old files that no batch has claimed."""
        if now_s - self._swept_s >= min(SWEEP_S, self.limits.staged_age_s):
            self._swept_s = now_s
            before_s = now_s - self.limits.staged_age_s
            self.discard([one.id for one in self._files.values() if one.since_s < before_s])


def remove_unfinished(layout: Layout, disk: Disk) -> None:
    """Delete the unfinished files of uploads that a crash interrupted."""
    _unlink(disk, layout.staged.glob(f"*{_UNFINISHED}"))


def _unlink(disk: Disk, paths: Iterable[Path]) -> None:
    for path in paths:
        disk.unlink(path)


@contextmanager
def _no_room() -> Iterator[None]:
    """Translate the system's error for a full disk to StagingFullError."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        reason = "no space left on the disk: upload again when there is room"
        raise StagingFullError(reason) from error
