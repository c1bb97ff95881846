"""Run the matrix, or a part of it, and count the faults by kind.

python -m tests.log.damage_matrix --world mixed --kind journal --what zeros --every 5
python -m tests.log.damage_matrix --only 'journal/2.journal: at 0 4096 zeros' --world mixed
"""

import argparse
import time
from collections import Counter, defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

from headrace.log import layout
from tests.log.damage_matrix import judge
from tests.log.damage_matrix.damages import damages
from tests.log.damage_matrix.worlds import WORLDS

MEMORY = Path("/dev/shm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", action="append", choices=WORLDS, help="all without it")
    parser.add_argument("--kind", action="append", help="of file: journal, segment, …")
    parser.add_argument("--what", action="append", help="of damage: zeros, garbage, …")
    parser.add_argument("--every", type=int, default=1, help="only every so manieth damage")
    parser.add_argument("--only", help="one damage, as it is printed")
    parser.add_argument("--examples", type=int, default=2, help="printed of each kind of fault")
    parser.add_argument(
        "--one-frame", action="store_true", help="excuse nothing at the end but the very last frame"
    )
    parser.add_argument(
        "--index-rows", action="store_true", help="let a damaged index cost the runs of its segment"
    )
    options = parser.parse_args()
    judge.TAIL_IS_ONE_FRAME |= options.one_frame
    judge.INDEX_ROWS_ARE_CONTENT = options.index_rows
    # Starts are quicker with four segment directories than with 256.
    layout.SEGMENT_DIRECTORIES = 4
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as scratch:
        for name in options.world or WORLDS:
            run(name, options, Path(scratch))


def run(name: str, options: argparse.Namespace, scratch: Path) -> None:
    world = WORLDS[name](scratch / name / "data")
    chosen = [
        damage
        for damage in damages(world)
        if (not options.kind or damage.kind in options.kind)
        and (not options.what or damage.what in options.what)
        and (not options.only or str(damage) == options.only)
    ][:: options.every]
    begun, wrong = time.monotonic(), 0
    counts: Counter[tuple[str, str, str]] = Counter()
    examples: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for number, damage in enumerate(chosen):
        faults = judge.judge(world, damage, scratch / "copy", settle=bool(number % 2))
        wrong += bool(faults)
        for kind in {fault.kind for fault in faults}:
            key = damage.kind, damage.what, kind
            counts[key] += 1
            if len(examples[key]) < options.examples:
                examples[key] += [f"{damage}: {one}" for one in faults if one.kind == kind][:1]
    took = time.monotonic() - begun
    print(f"{name}: {wrong} of {len(chosen)} damages are handled wrongly ({took:.1f} s)")
    for key, count in sorted(counts.items()):
        print(f"  {count:5d} {' / '.join(key)}")
        for example in examples[key]:
            print(f"          {example}")


if __name__ == "__main__":
    main()
