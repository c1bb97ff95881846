"""A Delta table of the rows of a lake that are not there once more, and what each run notes of itself.

A run counts when the table has committed its number, in the same step as its files. Its note is on disk
before: up to where it has covered each topic, and which files have the keys that the next one needs.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
from crc32c import crc32c
from deltalake import DeltaTable

from headrace.lake.delta import DeltaLake
from headrace.lake.format import (
    DATE,
    FORMAT,
    RENAMED_FORMAT,
    LakeError,
    Shape,
    check_format,
    present_topic,
)
from headrace.lake.manifests import HIDDEN
from headrace.lake.ours import open_ours
from headrace.lake.syncing import make_directory, replace
from headrace.lake.writing import Written
from headrace.model import legacy_name

APP = "headrace-dedupe"
"""The application whose numbers are those of runs."""

_FORMAT_KEY = "headrace.deduped"
_NOTE_KEY = "headrace.note"

KEYS = "keys"
_NOTES = "runs"
_KEPT_S = 7 * 86_400.0
"""How long files stay that the table no longer names: someone may still read them."""

_OURS = re.compile(
    r"([0-9]{12,})-([0-9a-f]{8}\.json(\.[0-9a-f]{12}\.tmp)?|[0-9]{4,}-[0-9a-f]{12}\.parquet)"
)
"""Names of notes, also half written, and of files of keys."""

_RESTORE = "restore it, or dedupe into a new directory"


class Bucket(NamedTuple):
    """A part of the keys that rows were known by."""

    path: str = ""
    """Of their file, below the directory; empty where there are none."""
    keys: int = 0


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has done, for the next one."""

    format: int = FORMAT
    number: int
    lake: str
    """The identity of its table."""
    key: str
    window_ms: int | None
    """None: for ever."""
    ends: dict[str, int]
    """The offset in each topic up to which it is covered."""
    done: tuple[str, ...]
    """Files of the lake that have nothing more: a file never changes."""
    buckets: tuple[Bucket, ...]

    def encode(self) -> bytes:
        # An earlier one is what it was on disk: it is named after its checksum.
        is_old = self.format < RENAMED_FORMAT
        return msgspec.json.encode(self._renamed(legacy_name) if is_old else self)

    def present(self) -> "Note":
        """With the present names of topics, whatever version has noted them."""
        return self._renamed(present_topic) if self.format < RENAMED_FORMAT else self

    def _renamed(self, name: Callable[[str], str]) -> "Note":
        ends = {name(topic): end for topic, end in self.ends.items()}
        return msgspec.structs.replace(self, ends=ends)


class _Versioned(msgspec.Struct):
    format: int


class DedupedTable:
    def __init__(self, directory: Path, shape: Shape) -> None:
        self._directory = directory
        self._table = DeltaLake(directory, shape)

    @classmethod
    def open(cls, directory: Path, shape: Shape) -> Self | None:
        """None where one can be made; a directory of something else is refused. Changes nothing."""
        found = open_ours(directory, _FORMAT_KEY, "deduped rows of Headrace")
        return cls(directory, shape) if found else None

    @classmethod
    def make(cls, directory: Path, shape: Shape) -> Self:
        make_directory(directory)
        DeltaTable.create(
            str(directory),
            shape.columns.append(DATE),
            mode="ignore",  # someone may have been faster
            partition_by=["date"],
            name="headrace deduped",
            configuration={_FORMAT_KEY: str(FORMAT)},
            raise_if_key_not_exists=False,
        )
        made = cls(directory, shape)
        made._table.sync()
        return made

    def last(self) -> Note | None:
        """What the last run that counts has noted."""
        number = self._table.last(APP)
        if number is None:
            return None
        noted = (self._table.notes(number) or {}).get(_NOTE_KEY)
        # Of others with its number none was committed; they are soon swept.
        paths = list((self._directory / HIDDEN / _NOTES).glob(f"{noted or f'{number:012}-*'}.json"))
        if len(paths) != 1:
            raise LakeError(
                f"{self._directory}: the note of run {number} is missing, which says how far it is: "
                f"{_RESTORE}"
            )
        return read_note(paths[0])

    def commit(self, note: Note, files: Sequence[Written], here: Callable[[str], None]) -> bool:
        """Add files to the table, once for the number of the note; False when it was committed before.

        `here` is told when the note is on disk.
        """
        path = note_path(self._directory, note)
        make_directory(path.parent)
        replace(path, note.encode())
        here("noted")
        return self._table.commit(APP, note.number, files, {_NOTE_KEY: path.stem})

    def sweep(self, note: Note) -> None:
        """Delete the notes and keys of runs up to this, the last, which it does not name; and files of rows
        that the table has not named for a week.

        What is of a later number may be of a run on another machine.
        """
        hidden = self._directory / HIDDEN
        named = {self._directory / one.path for one in note.buckets}
        named.add(note_path(self._directory, note))
        for path in (*hidden.glob(f"{_NOTES}/*"), *hidden.glob(f"{KEYS}/*")):
            ours = _OURS.fullmatch(path.name)
            if ours and int(ours[1]) <= note.number and path not in named:
                path.unlink(missing_ok=True)
        self._table.sweep(_KEPT_S, dry_run=False)


def note_path(directory: Path, note: Note) -> Path:
    """Named after its checksum too: one that loses at the commit does not take the place of another."""
    data = note.encode()
    return directory / HIDDEN / _NOTES / f"{note.number:012}-{crc32c(data):08x}.json"


def read_note(path: Path) -> Note:
    reason = "its checksum fails"
    try:
        data = path.read_bytes()
        check_format(msgspec.json.decode(data, type=_Versioned).format, str(path))
        note = msgspec.json.decode(data, type=Note)
        if path.stem.endswith(f"-{crc32c(data):08x}"):
            return note.present()
    except ValueError as error:
        reason = str(error)
    raise LakeError(f"{path} is damaged ({reason}): {_RESTORE}")
