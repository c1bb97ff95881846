"""Judge a data directory with a part that the disk cannot read: every read of that part fails with EIO.

SQLite reads in C, so the failure has to come from below: from a library that is loaded before all others. The
judge runs in a child process with that library. The child runs this file as a script.
"""

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

from headrace.log import layout
from tests.log.damage_matrix.damages import Damage
from tests.log.damage_matrix.judge import Fault, Trial
from tests.log.damage_matrix.worlds import World

SOURCE = Path(__file__).with_suffix(".c")
TIMEOUT_S = 60


def build(compiler: str, target: Path) -> Path:
    """Compile the library."""
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", target, SOURCE, "-ldl"]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    return target


def judge_unreadable(
    library: Path,
    world: World,
    damage: Damage,
    scratch: Path,
    *,
    times: int = -1,
    verify_first: bool = True,
) -> list[Fault]:
    """Return all faults of a start on a directory with an unreadable part.

    The first `times` reads fail, or all reads if it is -1. Without `verify_first`, the start is the first to
    meet a failing read.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(world.path, scratch)
    inode = (scratch / damage.file).stat().st_ino
    given = pickle.dumps((world, damage, scratch, verify_first, layout.SEGMENT_DIRECTORIES))
    done = subprocess.run(
        [sys.executable, "-m", "tests.log.damage_matrix.unreadable"],
        input=given,
        stdout=subprocess.PIPE,
        env=os.environ
        | {
            "LD_PRELOAD": str(library),
            "UNREADABLE": f"{inode} {damage.position} {damage.place.end} {times}",
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        timeout=TIMEOUT_S,
        check=True,
    )
    faults: list[Fault] = pickle.loads(done.stdout)
    return faults


def main() -> None:
    world, damage, path, verify_first, directories = pickle.load(sys.stdin.buffer)
    layout.SEGMENT_DIRECTORIES = directories
    faults = Trial(world, damage, path).run(verify_first=verify_first)
    sys.stdout.buffer.write(pickle.dumps([Fault(*fault) for fault in faults]))


if __name__ == "__main__":
    main()
