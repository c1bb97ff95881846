"""Select damages for a short run: some of every kind, to every kind of structure. Elsewhere: judging them."""

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator

from tests.log.damage_matrix.damages import Damage, damages
from tests.log.damage_matrix.judge import hits_the_end
from tests.log.damage_matrix.worlds import World

Case = tuple[World, Damage]


def sample(worlds: Iterable[World], kind: str, count: int) -> list[Case]:
    """Return at most `count` damages of each stratum; every run gets the same ones."""
    strata: dict[tuple[object, ...], list[Case]] = defaultdict(list)
    for world in worlds:
        for damage in of_kind(world, kind):
            strata[stratum(world, damage)].append((world, damage))
    chosen: list[Case] = []
    for key in sorted(strata, key=str):
        cases = strata[key]
        chosen += random.Random(str(key)).sample(cases, min(count, len(cases)))
    return chosen


def of_kind(world: World, kind: str) -> Iterator[Damage]:
    return (damage for damage in damages(world) if damage.kind == kind)


def stratum(world: World, damage: Damage) -> tuple[object, ...]:
    """Return the stratum: damages of one stratum hit the same structures in the same way."""
    return damage.what, damage.length, zone(world, damage)


def zone(world: World, damage: Damage) -> str:
    """Return which structures are in the damaged block."""
    if damage.kind != "journal" or damage.what == "missing":
        return "first" if damage.position == 0 else "later"
    frames = [commit.frame for commit in world.commits if commit.frame is not None]
    hit = [frame for frame in frames if frame.overlaps(damage.place)]
    in_use = "newest" if frames and frames[-1].file == damage.file else "older"
    if damage.position == 0:
        return f"head of {in_use}" if hit else "head of an applied file"
    if not hit:
        return "unused"
    if frames[-1] in hit:
        return "end of the last frame" if hits_the_end(world, damage) else "last frame"
    begins = any(damage.position <= frame.begin < damage.place.end for frame in hit)
    return f"{'begin' if begins else 'inside'} of a frame, {in_use}"
