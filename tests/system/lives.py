"""Repeated kills and starts of a server, and tiny files that make each of its lives eventful."""

import random
import time

from headrace.testing import LogChecker, ServerProcess, wait_until

TINY = """
[journal]
file_bytes = 131072
files = 3
rotate_s = 0.15
commit_bytes_max = 65536
[segment]
bytes = 32768
"""


def end_one_life(
    server: ServerProcess, chance: random.Random, checker: LogChecker, number: int
) -> None:
    """Kill the server at a random moment, mostly under load and sometimes during recovery; then start it."""
    if number % 4 == 3:
        # This is long enough for the server to write and apply something, even on a busy machine.
        before = checker.records("t0")
        wait_until(lambda: checker.records("t0") > before + 50, 30, "records to come through")
    time.sleep(chance.uniform(0.0, 0.4))
    server.kill()
    while chance.random() < 0.3:
        server.spawn()
        time.sleep(chance.uniform(0.05, 0.6))
        server.kill()
    server.start()
