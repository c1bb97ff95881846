"""What a replay does, kept in the lake when it begins: so a repeat does the same, whatever has changed."""

import os
import uuid
from pathlib import Path

import msgspec

from headrace.lake.format import FORMAT, LakeError, check_format
from headrace.lake.manifests import HIDDEN
from headrace.lake.syncing import make_directory, sync
from headrace.pipeline.replay_plan import Course, Wanted


class _Note(msgspec.Struct):
    format: int
    wanted: Wanted
    course: Course


class _Versioned(msgspec.Struct):
    format: int


class Notes:
    def __init__(self, lake: Path) -> None:
        self._lake = lake
        self._directory = lake / HIDDEN / "replays"

    def find(self, wanted: Wanted) -> Course | None:
        path = self._path(wanted)
        try:
            data = path.read_bytes()
            check_format(msgspec.json.decode(data, type=_Versioned).format, str(path))
            return msgspec.json.decode(data, type=_Note).course
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise LakeError(
                f"{path} is damaged ({error}), which says what the replay does: restore it, or replay under "
                "another name"
            ) from None

    def begin(self, wanted: Wanted, course: Course) -> Course:
        """Keep it for good, unless there is one: then that counts."""
        path = self._path(wanted)
        try:
            make_directory(self._directory)
            made = path.with_suffix(f".{uuid.uuid4().hex}")
            made.write_bytes(msgspec.json.encode(_Note(FORMAT, wanted, course)))
            sync(made)
        except OSError as error:
            raise LakeError(f"{self._lake} cannot be written to: {error.strerror}") from None
        try:
            os.link(made, path)
        except FileExistsError:
            pass  # another one began at the same moment
        finally:
            made.unlink()
        sync(self._directory)
        found = self.find(wanted)
        assert found is not None
        return found

    def _path(self, wanted: Wanted) -> Path:
        return self._directory / f"{wanted.key}.json"
