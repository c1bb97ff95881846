"""Damage to every sector and every block of every file: only its own content is lost, and all is reported.

A usual run takes a sample of every kind of damage to every kind of structure, `make torture` takes all.
The top of `damage_matrix/judge.py` says what counts as the content of a block. To look at a part of it:

    pytest tests/log/recovery/test_damage_matrix.py -k journal
    python -m tests.log.damage_matrix --world mixed --kind journal --every 7
"""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from headrace.log.verify.verify import verify
from tests.log.conftest import QUICK
from tests.log.damage_matrix.damages import KINDS
from tests.log.damage_matrix.judge import heard, judge, open_store
from tests.log.damage_matrix.sample import Case, of_kind, sample
from tests.log.damage_matrix.worlds import WORLDS, World
from tests.tools import takes_long

FAULTS_SHOWN_MAX = 30


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[str, World]]:
    with TemporaryDirectory(prefix="headrace-", dir=QUICK) as path:
        yield {name: build(Path(path) / name / "data") for name, build in WORLDS.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_block_costs_its_own_content_at_most(worlds, tmp_path, kind):
    check(sample(worlds.values(), kind, 1), tmp_path / "copy")


@takes_long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WORLDS)
def test_every_damaged_block_costs_its_own_content_at_most(worlds, tmp_path, name, kind):
    world = worlds[name]
    check(((world, damage) for damage in of_kind(world, kind)), tmp_path / "copy")


def check(cases: Iterable[Case], scratch: Path) -> None:
    wrong: list[str] = []
    total = failed = 0
    for total, (world, damage) in enumerate(cases, 1):
        faults = judge(world, damage, scratch, settle=bool(total % 2))
        failed += bool(faults)
        wrong += [f"{world.name}: {damage}: {fault}" for fault in faults]
    shown = "\n".join(wrong[:FAULTS_SHOWN_MAX])
    assert not wrong, f"{failed} of {total} damages, {len(wrong)} faults:\n{shown}"


@pytest.mark.parametrize("name", WORLDS)
def test_without_damage_everything_is_there_and_nothing_is_reported(worlds, tmp_path, name):
    """This tests the judge itself: it expects exactly what an undamaged directory gives."""
    world = worlds[name]
    copy = tmp_path / "copy"
    shutil.copytree(world.path, copy)
    assert not verify(copy).damaged
    with heard() as lines:
        served = open_store(world, copy, lines)
        assert served.said == []
        for topic, expected in world.topics.items():
            old = {at: one for at, one in served.topics[topic].items() if at < expected.end[0]}
            assert old == expected.records
        served.store.crash()


def test_the_worlds_hold_every_kind_of_file(worlds):
    held = {kind for world in worlds.values() for kind in KINDS if any(of_kind(world, kind))}
    assert held == set(KINDS)
