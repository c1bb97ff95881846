"""Translation of library errors on tables and files into one plain sentence.

The libraries trust what they read. A single wrong bit in one of their files may raise any error, anywhere.
"""

import errno
import functools
import os
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from headrace.errors import HeadraceError
from headrace.lake.format import DamagedTableError, LakeError, plain

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_SQLITE_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_BUSY)

_OS_ERROR = re.compile(r"\(os error ([0-9]+)\)")
"""Error number in messages of Rust libraries."""


@contextmanager
def in_a_sentence(
    lake: Path,
    file: str,
    kinds: type[Exception] | tuple[type[Exception], ...] = Exception,
    *,
    writing: bool = False,
) -> Iterator[None]:
    """Translate errors raised while `file` of the lake, or a file below it, is used.

    Errors of other types than `kinds` pass unchanged.
    """
    try:
        yield
    except HeadraceError:
        raise
    except kinds as error:
        reason = getattr(error, "orig", None) or error  # SQLAlchemy wraps the SQLite error
        if _is_of_writing(reason, writing):
            raise LakeError(f"{lake / file} cannot be written to: {plain(reason)}") from None
        raise DamagedTableError(lake, file, reason) from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Add the path to errors of a library that writes one of our files and does not name it."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        reason = os.strerror(error.errno) if error.errno else plain(error)
        raise LakeError(f"{path} cannot be written to: {reason}") from None


class _Table(Protocol):
    _lake: Path
    _where: str


_T = TypeVar("_T", bound=_Table)
_P = ParamSpec("_P")
_R = TypeVar("_R")
_Method = Callable[Concatenate[_T, _P], _R]


def reads(method: _Method[_T, _P, _R]) -> _Method[_T, _P, _R]:
    """Translate the errors of a method that only reads files of its table."""
    return _told(method, writing=False)


def writes(method: _Method[_T, _P, _R]) -> _Method[_T, _P, _R]:
    return _told(method, writing=True)


def _told(method: _Method[_T, _P, _R], *, writing: bool) -> _Method[_T, _P, _R]:
    @functools.wraps(method)
    def call(self: _T, /, *args: _P.args, **given: _P.kwargs) -> _R:
        with in_a_sentence(self._lake, self._where, writing=writing):
            return method(self, *args, **given)

    return call


def _is_of_writing(error: Exception, writing: bool) -> bool:
    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None) or 0
        return code & 0xFF in _SQLITE_FULL
    said = _OS_ERROR.search(str(error))
    number = int(said[1]) if said else getattr(error, "errno", None)
    return number in _FULL or (writing and number not in (None, errno.ENOENT))
