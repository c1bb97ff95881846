"""Extracts the archives that tests keep, with every Python that Headrace runs on."""

import tarfile
from pathlib import Path


def extract(archive: Path, target: Path) -> None:
    with tarfile.open(archive) as opened:
        # Python 3.11.2, which Debian has, knows no filters; later ones warn without one.
        if hasattr(tarfile, "data_filter"):
            opened.extraction_filter = tarfile.data_filter
        opened.extractall(target)
