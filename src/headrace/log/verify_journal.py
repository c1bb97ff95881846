"""Checks the part of the journal that is not applied yet: frames, entries, and what they add to topics.

A server may be writing it meanwhile. Frames that are half written, or gone because their file was put to
use again, look like damage for a moment: `verify.py` believes only what it sees twice.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace.log import journal
from headrace.log.catalogue import Catalogue
from headrace.log.entries import Create
from headrace.log.layout import Layout
from headrace.log.records import holds
from headrace.log.report import Damage, Found, Range


class Life(Found):
    """A topic as the catalogue and the entries so far say."""

    def __init__(self, name: str, epoch: int, offset: int, ordinal: int, ms: int) -> None:
        super().__init__(name)
        self.epoch = epoch
        self.offset = offset
        self.ordinal = ordinal
        self.ms = ms
        self.destroyed = False


class JournalCheck(Found):
    """One reading of the journal, against a catalogue of the same moment or before."""

    def __init__(self, layout: Layout, catalogue: Catalogue, boot_id: bytes) -> None:
        super().__init__()
        self._layout = layout
        self._catalogue = catalogue
        self._boot_id = boot_id
        self.lives: dict[int, Life] = {}
        """The topics it says anything of."""
        self.unfinished: list[str] = []
        """Writes that were not finished, and so were never acknowledged."""

    def run(self) -> None:
        meta = self._catalogue.meta()
        if meta.clean:
            return
        scans = [_scan(path) for path in self._layout.journal_files()]
        scans = sorted(scan for scan in scans if scan.last > meta.applied or scan.bad)
        ...
