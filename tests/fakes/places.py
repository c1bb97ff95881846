"""Places of newcomers, with a clock that a test sets."""

from headrace.server.peers.newcomers import Newcomers


class Places:
    def __init__(self, places_max: int = 1024) -> None:
        self.now_s = 100.0
        self.applied: list[str] = []
        """The limit that applied, and of what, each time."""
        self.newcomers = Newcomers(
            "handshakes_max",
            lambda: places_max,
            lambda limit, of: self.applied.append(f"{limit} {of}"),
            lambda: self.now_s,
        )
