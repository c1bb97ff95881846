"""Files that a run keeps between its tasks: Arrow batches with a number each, in a separate directory.

Only the run that wrote the files uses them. The next run removes the files of a killed run.
"""

import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import pyarrow as pa

from headrace.lake.errors import writing
from headrace.lake.files.durable import make_directory
from headrace.lake.manifests import HIDDEN
from headrace.pipeline.tasks import NotSharedError

Batches = dict[int, list[int]]
"""Indexes of a file's batches, by the number of the batch."""

Places = list[tuple[str, list[int]]]
"""Paths of files, each with the indexes of some batches."""


@contextmanager
def staging(directory: Path) -> Iterator[Path]:
    """Yield a directory for the files of a run, empty before and after; only one run may use it at a time."""
    place = directory / HIDDEN / "staging"
    make_directory(place)
    _empty(place)
    try:
        yield place
    finally:
        _empty(place)


def _empty(place: Path) -> None:
    for path in place.iterdir():
        path.unlink()


class WorkFile:
    """Staged file of one task.

    A task that Spark repeats writes another file. Only files that the driver learns of count.
    """

    def __init__(self, staging: str, name: str, schema: pa.Schema) -> None:
        if not Path(staging).is_dir():
            raise NotSharedError(
                f"Spark's executors do not see {staging}: name a directory that all machines share"
            )
        self.path = str(Path(staging, f"{name}-{uuid.uuid4().hex[:12]}.arrow"))
        self.batches: Batches = {}
        self._schema = schema
        self._written = 0

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        with writing(Path(self.path)):
            file = self._stack.enter_context(pa.OSFile(self.path, "wb"))
            self._writer = self._stack.enter_context(pa.ipc.new_file(file, self._schema))
        return self

    def __exit__(self, *given: object) -> None:
        with writing(Path(self.path)):
            self._stack.close()

    def add(self, number: int, batch: pa.RecordBatch) -> None:
        with writing(Path(self.path)):
            self._writer.write_batch(batch)
        self.batches.setdefault(number, []).append(self._written)
        self._written += 1


def by_number(files: Iterable[tuple[str, Batches]]) -> dict[int, Places]:
    found: dict[int, Places] = {}
    for path, batches in files:
        for number, some in batches.items():
            found.setdefault(number, []).append((path, some))
    return dict(sorted(found.items()))


def read_staged(
    stack: ExitStack, places: Sequence[tuple[str, list[int]]]
) -> Iterator[pa.RecordBatch]:
    """Yield batches from files that stay mapped until the stack is closed: pages are read when needed."""
    for path, numbers in places:
        reader = pa.ipc.open_file(stack.enter_context(pa.memory_map(path)))
        for number in numbers:
            yield reader.get_batch(number)
