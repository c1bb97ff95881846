"""Named points of a job where a test can make it wait, to kill something. Without a test, they do nothing.

To make a job wait, a test creates the file `stop-NAME` in a directory. At the point, the job creates
`reached-NAME` and waits until `stop-NAME` is removed.
"""

import time
from pathlib import Path
from typing import NamedTuple

_POLL_S = 0.01


class Points(NamedTuple):
    directory: str = ""
    """Directory for these files; empty outside of tests."""

    def here(self, name: str) -> None:
        if not self.directory:
            return
        stop = Path(self.directory, f"stop-{name}")
        if stop.exists():
            Path(self.directory, f"reached-{name}").touch()
            while stop.exists():
                time.sleep(_POLL_S)
