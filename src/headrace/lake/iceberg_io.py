"""Files of an Iceberg table's metadata, on disk before the catalogue names them: the library leaves it to the
system, and the catalogue is synced."""

import io
import os
from pathlib import Path

from pyiceberg.io import InputFile, OutputFile
from pyiceberg.io.pyarrow import PyArrowFileIO

from headrace.lake.syncing import make_directory, sync


class SyncedIO(PyArrowFileIO):
    """Of local files only; what the library is told to load by name."""

    def new_output(self, location: str) -> OutputFile:  # type: ignore[override]
        return _Output(location)


class _Output(OutputFile):
    def __init__(self, location: str) -> None:
        super().__init__(location)
        self._path = Path(location.removeprefix("file://"))

    def __len__(self) -> int:
        return self._path.stat().st_size

    def exists(self) -> bool:
        return self._path.exists()

    def to_input_file(self) -> InputFile:
        return SyncedIO().new_input(self.location)

    def create(self, overwrite: bool = False) -> "_Stream":
        make_directory(self._path.parent)
        return _Stream(self._path, "wb" if overwrite else "xb")


class _Stream(io.BufferedWriter):
    def __init__(self, path: Path, mode: str) -> None:
        super().__init__(io.FileIO(path, mode))
        self._path = path

    def close(self) -> None:
        if not self.closed:
            self.flush()
            os.fsync(self.fileno())
            super().close()
            sync(self._path.parent)
