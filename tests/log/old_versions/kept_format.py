"""Pack data directories and their expected content, to test later versions on earlier formats.

    python -m tests.log.old_versions.kept_format tests/log/old_versions/format3

packs one directory for each state that the present code leaves. Run it before a format changes, and keep the
archives.
"""

import io
import json
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headrace.log import layout
from tests.archives import extract
from tests.log.damage_matrix.worlds import WORLDS, World

KEPT = ("clean", "unapplied", "mixed", "recycled", "many", "batches")
"""Worlds whose files on disk differ."""


def pack(world: World, target: Path) -> None:
    """Write the directory and its expected content into one archive."""
    described = json.dumps(describe(world), indent=1).encode()
    with tarfile.open(target, "w:xz", preset=9) as archive:
        member = tarfile.TarInfo("expected.json")
        member.size = len(described)
        archive.addfile(member, io.BytesIO(described))
        archive.add(world.path, "data", filter=_anonymous)


def unpack(archive: Path, target: Path) -> dict[str, Any]:
    """Extract the directory to `target / "data"`, and return its expected content."""
    extract(archive, target)
    expected: dict[str, Any] = json.loads((target / "expected.json").read_text())
    return expected


def describe(world: World) -> dict[str, Any]:
    return {
        "journal_files": world.files,
        "boot": world.boot.hex(),
        "clean": world.clean,
        "topics": {
            name: {
                "exists": topic.exists,
                "epoch": topic.epoch,
                "end": topic.end,
                "records": [
                    [offset, ordinal, payload.decode()]
                    for offset, (ordinal, payload) in sorted(topic.records.items())
                ],
            }
            for name, topic in sorted(world.topics.items())
        },
        "cursors": [
            [name, reader, *values[-1]] for (name, reader), values in sorted(world.cursors.items())
        ],
        "notes": {key.decode(): values[-1].decode() for key, values in sorted(world.notes.items())},
        "producers": [
            [name, producer, number, payload.decode()]
            for (name, producer), (number, payload) in sorted(world.producers.items())
        ],
        "pending": [
            [block.topic, [payload.decode() for payload in block.payloads]]
            for block in world.pending
        ],
    }


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o755 if member.isdir() else 0o644
    member.mtime = 1_700_000_000
    return member


def main() -> None:
    target = Path(sys.argv[1])
    target.mkdir(exist_ok=True)
    layout.SEGMENT_DIRECTORIES = 4  # the tests that open the archives use the same value
    with TemporaryDirectory() as scratch:
        for name in KEPT:
            pack(WORLDS[name](Path(scratch) / name / "data"), target / f"{name}.tar.xz")


if __name__ == "__main__":
    main()
