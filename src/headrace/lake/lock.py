"""The one job of a kind that changes a lake: others of the same storage are refused."""

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from headrace.lake.format import LakeError


class Lock:
    """Held until it is left, or until the process ends in any way."""

    def __init__(self, directory: Path, job: str) -> None:
        self._lake = directory.parent
        self._job = job
        self._fd = os.open(directory / f"lock-{job}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def __enter__(self) -> Self:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 20, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            raise LakeError(
                f"another {self._job} writes to {self._lake} (process {holder or 'unknown'})"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, b"%d\n" % os.getpid(), 0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._fd)
