"""What every part is told by the command line. Parses nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.load import BLOCK


@dataclass(frozen=True)
class Options:
    dir: Path
    messages: int
    repeat: int
    quick: bool
    retries: int  # of a run during which others used the machine

    @property
    def count(self) -> int:
        """Messages under the clock, in whole blocks."""
        return max(self.messages // BLOCK, 1) * BLOCK

    @property
    def warm(self) -> int:
        """Messages before the clock starts, on the same connections and topic."""
        return max(self.count // 10 // BLOCK, 64) * BLOCK
