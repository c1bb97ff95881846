"""Staged files: uploads that wait for their batch, durable and shown to nobody. Knows no topics.

A file is written under another name, and has its own when it is complete and on disk. It is *claimed* by
the batch that names it; the applier deletes it when that batch is in the segments (`applier.py`). What nobody
has claimed for `limits.staged_age_s` is deleted here.
"""

import errno
import os
import re
import secrets
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.config import Limits
from headrace.errors import StagedClaimedError, StagingFullError, UnknownStagedError
from headrace.log.blocks import BlockDecoder, staged_seed
from headrace.log.disk import Disk
from headrace.log.entries import StagedFile
from headrace.log.layout import Layout
from headrace.log.runner import Runner

STAGED_FILE_BYTES_MAX = 4 << 30
"""The longest upload: longer ones are split by whoever makes them."""

SWEEP_S = 600.0
"""How often files that nobody has claimed are looked for."""

_SYNC_BYTES = 8 << 20
"""How much of an upload is written before the disk is told to begin with it."""

ROOM_BYTES_MIN = 64 << 20
"""What uploads leave free besides the room that appending them takes: publishers need it more."""

_ROOM_STEP_BYTES = 8 << 20

_NAME = re.compile(r"[0-9a-f]{32}")
_UNFINISHED = ".new"


@dataclass(slots=True)
class Staged:
    """A complete file."""

    id: str
    size: int
    since_s: float
    """When it was uploaded, by the monotonic clock."""
    claimed: bool = False
    has_messages: bool = True
    """Whether there may be messages for channels in it: not known of one from before the start."""


class Upload:
    """A staged file that is being written: for any thread, one call at a time."""

    def __init__(self, layout: Layout, disk: Disk) -> None:
        self.id = secrets.token_hex(16)
        self.size = 0
        """What was reserved for it."""
        self._path = layout.staged_file(self.id)
        self._unfinished = self._path.with_suffix(_UNFINISHED)
        self._disk = disk
        self._decoder = BlockDecoder(staged_seed(self.id))
        self._fd: int | None = None
        self._written = self._sync_started = 0
        self._lock = threading.Lock()
        self._over = False
        """Whether it was given up: what a thread still does for it must not bring it back."""

    @property
    def records(self) -> int:
        return self._decoder.records

    @property
    def has_messages(self) -> bool:
        return self._decoder.has_messages

    def feed(self, *data: bytes) -> None:
        """Check and write what has arrived; raises BadBlockError and StagingFullError."""
        with self._lock, _no_room():
            if self._over:
                return
            parts = self._decoder.feed(*data)
            if self._fd is None:
                self._fd = self._disk.open(self._unfinished, create=True)
            if parts:
                self._disk.write(self._fd, parts, self._written)
                self._written += sum(map(len, parts))
            if self._written - self._sync_started >= _SYNC_BYTES:
                self._disk.start_sync(
                    self._fd, self._sync_started, self._written - self._sync_started
                )
                self._sync_started = self._written

    def finish(self) -> None:
        """Make it durable, and give it its name."""
        with self._lock, _no_room():
            if self._over:
                return
            self._decoder.finish()
            if self._fd is None:
                self._fd = self._disk.open(self._unfinished, create=True)
            self._disk.sync(self._fd)
            self._close()
            self._disk.rename(self._unfinished, self._path)
            self._disk.sync_directory(self._path.parent)

    def abort(self) -> None:
        """Leave nothing of it."""
        with self._lock:
            self._over = True
            self._close()
            self._disk.unlink(self._unfinished)

    def _close(self) -> None:
        if self._fd is not None:
            self._disk.close(self._fd)
            self._fd = None


class Staging:
    """Which staged files there are, and which of them are claimed. Called from the loop only."""

    def __init__(
        self, layout: Layout, disk: Disk, runner: Runner, limits: Limits, now_ms: int
    ) -> None:
        self._layout = layout
        self._disk = disk
        self._runner = runner
        self.limits = limits
        self._files: dict[str, Staged] = {}
        self._swept_s = 0.0
        self.bytes = 0
        """Of all files, and of those that are being uploaded."""
        now_s, now = time.monotonic(), time.time()
        for path, found in _complete(layout):
            # The system's time of the file is the wall clock's, which may have jumped: the lesser age is
            # never too much.
            age_s = max(0.0, min(now, now_ms / 1000) - found.st_mtime)
            self._files[path.name] = Staged(path.name, found.st_size, now_s - age_s)
            self.bytes += found.st_size

    # Uploading

    def begin(self) -> Upload:
        return Upload(self._layout, self._disk)

    def reserve(self, upload: Upload, size: int) -> None:
        """Make sure that there may be so many more bytes of it; raises StagingFullError."""
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
        """What is staged is written once more, to segments: without room for that it would hold back all."""
        found = os.statvfs(self._layout.root)
        free = found.f_bavail * found.f_frsize
        if free < self.bytes + ROOM_BYTES_MIN:
            raise StagingFullError(
                f"{free} bytes are free on the disk, and {self.bytes} are staged that have to be appended: "
                "upload again when there is room"
            )

    def keep(self, upload: Upload) -> None:
        """It is finished."""
        self._files[upload.id] = Staged(
            upload.id, upload.size, time.monotonic(), has_messages=upload.has_messages
        )

    def drop(self, upload: Upload) -> None:
        """It came to nothing."""
        self.bytes -= upload.size
        self._runner.background(upload.abort, lambda _: None)

    # Claiming

    def claim(self, ids: Sequence[str]) -> list[StagedFile]:
        """Take the files for a batch, all or none; raises UnknownStagedError and StagedClaimedError."""
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
        # One without records need not be remembered.
        self._delete([staged for staged in files if not staged.size])
        return [StagedFile(bytes.fromhex(one.id), one.size) for one in files if one.size]

    def release(self, files: Iterable[StagedFile]) -> None:
        """Their batch was refused: another may claim them."""
        for file in files:
            self._files[file.id.hex()].claimed = False

    def may_have_messages(self, files: Iterable[StagedFile]) -> bool:
        return any(self._files[file.id.hex()].has_messages for file in files)

    def restore_claims(self, files: Iterable[StagedFile]) -> None:
        """These are part of a batch that was decided before the start."""
        for file in files:
            staged = self._files.get(file.id.hex())
            if staged is not None:
                staged.claimed = True

    def forget(self, files: Iterable[StagedFile]) -> None:
        """The applier has deleted these."""
        for file in files:
            staged = self._files.pop(file.id.hex(), None)
            if staged is not None:
                self.bytes -= staged.size

    def discard(self, ids: Collection[str]) -> None:
        """Delete those of the files that are there and that nobody has claimed."""
        found = [self._files[one] for one in dict.fromkeys(ids) if one in self._files]
        self._delete([staged for staged in found if not staged.claimed])

    def _delete(self, files: Sequence[Staged]) -> None:
        for staged in files:
            del self._files[staged.id]
            self.bytes -= staged.size
        paths = [self._layout.staged_file(staged.id) for staged in files]
        if paths:
            self._runner.background(lambda: _unlink(self._disk, paths), lambda _: None)

    def tick(self, now_s: float) -> None:
        """Delete, every now and then, what nobody has claimed."""
        if now_s - self._swept_s >= min(SWEEP_S, self.limits.staged_age_s):
            self._swept_s = now_s
            before_s = now_s - self.limits.staged_age_s
            self.discard([one.id for one in self._files.values() if one.since_s < before_s])


def remove_unfinished(layout: Layout, disk: Disk) -> None:
    """Delete what a crash left of uploads."""
    for path in layout.staged.glob(f"*{_UNFINISHED}"):
        disk.unlink(path)


def _complete(layout: Layout) -> Iterable[tuple[Path, os.stat_result]]:
    with os.scandir(layout.staged) as found:
        for entry in found:
            # What has another name is not ours, and stays.
            if _NAME.fullmatch(entry.name) and entry.is_file():
                yield Path(entry.path), entry.stat()


def _unlink(disk: Disk, paths: list[Path]) -> None:
    for path in paths:
        disk.unlink(path)


@contextmanager
def _no_room() -> Iterator[None]:
    """Says in our words that the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        reason = "no space left on the disk: upload again when there is room"
        raise StagingFullError(reason) from error
