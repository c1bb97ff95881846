"""The manifests of a lake on disk: written, read, and folded into how far the lake has each topic."""

from pathlib import Path
from typing import NamedTuple

from headrace.lake.format import LakeError, Manifest, Positions, decode_manifest
from headrace.lake.syncing import make_directory, replace

HIDDEN = "_headrace"
"""Readers of tables, and those who sweep them, leave names alone that begin so."""


class Reach(NamedTuple):
    """Where the lake begins and ends in each topic."""

    starts: Positions
    ends: Positions


class Manifests:
    def __init__(self, lake: Path) -> None:
        self._directory = lake / HIDDEN / "batches"

    def write(self, manifest: Manifest) -> None:
        """On disk when this returns. One that is there and was never committed is written over."""
        make_directory(self._directory)
        replace(self.path(manifest.number), manifest.encode())

    def read(self, number: int) -> Manifest:
        path = self.path(number)
        try:
            return decode_manifest(path.read_bytes(), str(path))
        except FileNotFoundError:
            raise LakeError(
                f"{path} is missing, which says what a batch of the table holds: restore it, or export "
                "to a new directory"
            ) from None

    def reach(self, last: int | None) -> Reach:
        """After batch `last`, the last that the table has committed: files behind it do not count."""
        reach = Reach({}, {})
        for number in range(0 if last is None else last + 1):
            manifest = self.read(number)
            reach.starts.update(
                (name, at) for name, at in manifest.start.items() if name not in reach.starts
            )
            reach.ends.update(manifest.end)
        return reach

    def path(self, number: int) -> Path:
        return self._directory / f"{number:012}.json"
