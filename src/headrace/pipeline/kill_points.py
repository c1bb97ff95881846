"""Named points of a job, where a test can have it wait and kill something; for all others they are nothing.

Whoever wants a job to wait makes the file `stop-NAME` in a directory; the job makes `reached-NAME` and goes
on when the first is gone.
"""

import time
from pathlib import Path
from typing import NamedTuple

_POLL_S = 0.01


class Points(NamedTuple):
    directory: str = ""
    """Empty, unless it is for a test."""

    def here(self, name: str) -> None:
        if not self.directory:
            return
        stop = Path(self.directory, f"stop-{name}")
        if stop.exists():
            Path(self.directory, f"reached-{name}").touch()
            while stop.exists():
                time.sleep(_POLL_S)
