"""Hypothesis profile and temporary directory for tests of the lake."""

import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings

from tests.tools import EXAMPLES

# The machine that runs the tests is shared, so the duration of an example means nothing.
settings.register_profile("lake", deadline=None, max_examples=EXAMPLES)
settings.load_profile("lake")

MEMORY = Path("/dev/shm")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Use a directory in memory if possible: writers fsync everything, and no test here is about the disk."""
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    with TemporaryDirectory(prefix="headrace-", dir=place) as path:
        yield Path(path)
