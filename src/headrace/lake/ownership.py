"""Ownership of directories: a lock for jobs that change a lake, and recognition of a job's own tables.

One job of each kind changes a lake at a time, among those that share the storage. A directory with content
that no job has made is refused.
"""

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from headrace.lake.errors import in_a_sentence
from headrace.lake.format import LakeError, check_format, check_path
from headrace.lake.formats.delta import LOG
from headrace.lake.manifests import HIDDEN


def open_ours(directory: Path, format_key: str, what: str) -> bool:
    """Return True if the directory has such a table, False if one can be created there.

    Raise LakeError for a directory with other content. Changes nothing.
    """
    check_path(directory)
    if not directory.exists():
        return False
    if not directory.is_dir():
        raise LakeError(f"{directory} is no directory: name a new or an empty one")
    with in_a_sentence(directory, LOG):
        try:
            number = DeltaTable(str(directory)).metadata().configuration.get(format_key)
        except TableNotFoundError:
            # A table whose creation was interrupted may have left these directories.
            others = sorted({path.name for path in directory.iterdir()} - {HIDDEN, LOG})
            if others:
                raise _not_ours(directory, what, others[0]) from None
            return False
    if number is None or not number.isdigit():
        raise _not_ours(directory, what, "a Delta table of something else")
    check_format(int(number), str(directory))
    return True


def _not_ours(directory: Path, what: str, found: str) -> LakeError:
    return LakeError(
        f"{directory} holds something else than {what} ({found}): name a new or an empty directory"
    )


class Lock:
    """Lock that is held until the `with` block ends, or until the process ends in any way."""

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
