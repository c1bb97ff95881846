"""Options from the command line, as all parts get them. Parses nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.load.load import BLOCK


@dataclass(frozen=True)
class Options:
    dir: Path
    messages: int
    repeat: int
    quick: bool
    retries: int  # of a run during which other processes used the machine

    @property
    def count(self) -> int:
        """Number of messages that are measured, in whole blocks."""
        return max(self.messages // BLOCK, 1) * BLOCK

    @property
    def warm(self) -> int:
        """Number of messages before the measurement, on the same connections and topic."""
        return max(self.count // 10 // BLOCK, 64) * BLOCK
