"""How tests of the lake use hypothesis, and where they write."""

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings

from tests.tools import EXAMPLES

# The machine that runs tests is shared: how long an example takes says nothing.
settings.register_profile("lake", deadline=None, max_examples=EXAMPLES)
settings.load_profile("lake")

MEMORY = Path("/dev/shm")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory where that is possible: all is synced, and nothing here is about the disk."""
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    with TemporaryDirectory(prefix="headrace-", dir=place) as path:
        yield Path(path)
