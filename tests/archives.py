"""Extract the archives that tests keep, with every Python version that Headrace runs on."""

import tarfile
from pathlib import Path


def extract(archive: Path, target: Path) -> None:
    with tarfile.open(archive) as opened:
        # Python 3.11.2, the version in Debian, has no filters. Later versions warn if no filter is given.
        if hasattr(tarfile, "data_filter"):
            opened.extraction_filter = tarfile.data_filter
        opened.extractall(target)
