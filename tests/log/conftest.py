"""Fixtures for tests of the log: a store with tiny files in a temporary directory, closed at the end."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings

from headrace.config.settings import Config, Journal, Limits, PrefixRule, Segment
from headrace.log import layout
from headrace.model import Durability
from tests.fakes.store import StepStore
from tests.tools import EXAMPLES

# Examples are the same in every run, so a failure here can be reproduced everywhere. No deadline is set,
# because a slow machine is not a failure.
settings.register_profile(
    "log", deadline=None, max_examples=EXAMPLES, derandomize=True, print_blob=True
)
settings.load_profile("log")

Open = Callable[..., StepStore]

MEMORY = Path("/dev/shm")
QUICK = MEMORY if os.access(MEMORY, os.W_OK) else None
"""Parent of the tests' directories: in memory if possible.

These tests start stores by the thousand, and no data has to survive a crash of the machine.
"""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with TemporaryDirectory(prefix="headrace-", dir=QUICK) as path:
        yield Path(path)


@pytest.fixture(autouse=True, scope="module")
def _few_directories() -> Iterator[None]:
    """Use four segment directories instead of 256, which makes hundreds of starts quicker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "SEGMENT_DIRECTORIES", 4)
        yield


def tiny(path: Path, **changes: object) -> Config:
    """Return a configuration with files so small that a few records fill them.

    Topics under written/ and memory/ have that durability.
    """
    rules = (
        PrefixRule(prefix="written/", durability=Durability.WRITTEN),
        PrefixRule(prefix="memory/", durability=Durability.MEMORY),
    )
    given = {
        "data_dir": path,
        "journal": Journal(file_bytes=65_536, files=3, commit_bytes_max=4096),
        "segment": Segment(bytes=128, open_files_max=4),
        "limits": Limits(memory_topic_bytes_max=1 << 20),
        "topics": rules,
    }
    return Config(**(given | changes))


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Open]:
    """Start a store on the test's directory. The store before it is abandoned first, as by a kill."""
    opened: list[StepStore] = []

    def open_(config: Config | None = None, **options: object) -> StepStore:
        while opened:
            opened.pop().crash()
        opened.append(StepStore(config or tiny(tmp_path / "data"), **options))
        return opened[0]

    yield open_
    while opened:
        opened.pop().crash()


@pytest.fixture
def store(open_store: Open) -> StepStore:
    return open_store()
