"""What tests of the log share: a store with tiny files in a temporary directory, closed at the end."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings

from headrace.config import Config, Journal, Limits, PrefixRule, Segment
from headrace.log import layout
from headrace.model import Durability
from headrace.testing.store import StepStore
from tests.tools import EXAMPLES

# The same examples every time: what fails here fails everywhere, and a slow machine is no failure.
settings.register_profile(
    "log", deadline=None, max_examples=EXAMPLES, derandomize=True, print_blob=True
)
settings.load_profile("log")

Open = Callable[..., StepStore]

MEMORY = Path("/dev/shm")
QUICK = MEMORY if os.access(MEMORY, os.W_OK) else None
"""Where directories are made: these tests start stores by the thousand, and lose nothing with the machine."""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with TemporaryDirectory(prefix="headrace-", dir=QUICK) as path:
        yield Path(path)


@pytest.fixture(autouse=True, scope="module")
def _few_directories() -> Iterator[None]:
    """Hundreds of starts are quicker with four directories to look into than with 256."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "SEGMENT_DIRECTORIES", 4)
        yield


def tiny(path: Path, **changes: object) -> Config:
    """Files so small that a few records fill them; topics under written/ and memory/ are so."""
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
    """Start a store on the test's directory, after letting go of the one before it, as a kill does."""
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
