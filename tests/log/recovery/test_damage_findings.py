"""Damages that once also cost intact records, each as its own test.

They concern heads of journal files, the creation of topics, forged frames and unreadable blocks.
`test_damage_matrix.py` tries everything else.
"""

import random
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.log.damage_matrix.damages import UNITS, WHOLE, Damage, damages
from tests.log.damage_matrix.judge import judge
from tests.log.damage_matrix.unreadable import build, judge_unreadable
from tests.log.damage_matrix.worlds import BLOCK_BYTES, WORLDS, Builder, World
from tests.tools import sampled, takes_long, tool

FAULTS_SHOWN_MAX = 30

NAMES = ["orders", "invoices", "payments"]


def ten_records(builder: Builder, names: list[str], commits: int) -> None:
    """Make commits of ten records each, one topic after another."""
    for number in range(commits):
        builder.append({names[number % len(names)]: [60 + number] * 10})


@pytest.fixture
def newest(tmp_path) -> World:
    """An applied journal file, and a newest one with 200 acknowledged records in 20 frames."""
    builder = Builder(tmp_path / "newest" / "data")
    ten_records(builder, NAMES, 12)
    builder.rotate()
    builder.store.applying = False
    ten_records(builder, NAMES, 20)
    return builder.kill()


@pytest.fixture
def older(tmp_path) -> World:
    """An older file with 25 unapplied frames, in which a topic was created, and a newer file in use."""
    builder = Builder(tmp_path / "older" / "data")
    ten_records(builder, NAMES, 12)
    builder.rotate()
    builder.store.applying = False
    ten_records(builder, ["made here", *NAMES, "made here"], 25)
    builder.rotate()
    ten_records(builder, ["made here", *NAMES], 20)
    return builder.kill()


@pytest.fixture
def stopped(tmp_path) -> World:
    """A clean stop: SQLite keeps no other file beside the catalogue's."""
    builder = Builder(tmp_path / "stopped" / "data")
    ten_records(builder, NAMES, 12)
    return builder.stop()


def file_of(world: World, commit: int) -> str:
    frame = world.commits[commit].frame
    assert frame is not None
    return frame.file


def check(world: World, damage: Damage, scratch: Path) -> None:
    check_all(world, [damage], scratch)


def check_all(world: World, damages: Iterable[Damage], scratch: Path) -> None:
    faults = [f"{damage}: {fault}" for damage in damages for fault in judge(world, damage, scratch)]
    report(faults)


def report(faults: Sequence[object]) -> None:
    shown = "\n".join(map(str, faults[:FAULTS_SHOWN_MAX]))
    assert not faults, f"{len(faults)} faults:\n{shown}"


HEADS = [(length, what) for length in (512, 1024, 4096) for what in ("zeros", "garbage")]


@pytest.mark.parametrize(("length", "what"), HEADS)
def test_a_bad_head_of_the_newest_journal_file_costs_what_lies_in_it(
    newest, tmp_path, length, what
):
    damage = Damage(file_of(newest, -1), "journal", what, 0, length)
    check(newest, damage, tmp_path / "copy")


def test_a_missing_newest_journal_file_is_noticed_and_no_offset_is_given_twice(newest, tmp_path):
    damage = Damage(file_of(newest, -1), "journal", "missing", 0, WHOLE)
    check(newest, damage, tmp_path / "copy")


@pytest.mark.parametrize(("length", "what"), HEADS)
def test_a_bad_head_of_an_older_journal_file_costs_what_lies_in_it(older, tmp_path, length, what):
    damage = Damage(file_of(older, 13), "journal", what, 0, length)
    assert file_of(older, 13) != file_of(older, -1)
    check(older, damage, tmp_path / "copy")
    kept = [path.name for path in (tmp_path / "copy").glob("damaged-*")]
    assert kept == [], "the catalogue was sound"


def test_a_missing_older_journal_file_costs_nothing_in_others(older, tmp_path):
    damage = Damage(file_of(older, 13), "journal", "missing", 0, WHOLE)
    check(older, damage, tmp_path / "copy")


def test_a_flipped_bit_where_a_topic_is_made_costs_no_record(tmp_path):
    """500 records follow, in the same file and in the next one."""
    builder = Builder(tmp_path / "made" / "data")
    builder.store.applying = False
    builder.append({"another": [20]})
    ten_records(builder, ["the only one"], 25)
    builder.rotate()
    ten_records(builder, ["the only one"], 25)
    builder.append({"another": [20]})
    world = builder.kill()
    made = world.commits[1].groups[0]
    (place,) = made.places
    data = (world.path / place.file).read_bytes()
    name = data.index(b"the only one")
    assert name < place.begin
    # Flip a bit every few bytes, from before the entry that creates the topic to the first append.
    flips = [
        Damage(place.file, "journal", "flip", position, 1)
        for position in range(name - 60, place.begin, 5)
    ]
    check_all(world, flips, tmp_path / "copy")


def test_the_name_of_a_topic_stands_in_two_blocks_at_least(tmp_path):
    """Any single block that holds the name may be damaged."""
    builder = Builder(tmp_path / "made" / "data")
    builder.store.applying = False
    ten_records(builder, ["another"], 3)
    ten_records(builder, ["the only one"], 12)
    ten_records(builder, ["another"], 3)
    world = builder.kill()
    bad = []
    for path in sorted((world.path / "journal").glob("*.journal")):
        data, at = path.read_bytes(), -1
        while (at := data.find(b"the only one", at + 1)) >= 0:
            file = f"journal/{path.name}"
            bad += [Damage(file, "journal", "zeros", at // unit * unit, unit) for unit in UNITS]
    check_all(world, dict.fromkeys(bad), tmp_path / "copy")


# Forged frames

FORGED_BLOCKS = 4


def history(builder: Builder, *, first: bool) -> None:
    """Make the commits before the attack. With `first`, the attack is the first frame of a file."""
    builder.append({"victim": [40], "attacker": [40]})
    ten_records(builder, ["victim", "attacker"], 3)
    builder.rotate()
    builder.store.applying = False
    if not first:
        ten_records(builder, ["victim", "attacker"], 4)


def forgery(path: Path, *, first: bool) -> bytes:
    """A payload of frames that follow the attacker's own: made by a store with the same history."""
    builder = Builder(path / "data")
    history(builder, first=first)
    builder.append_payloads("attacker", b"?" * FORGED_BLOCKS * BLOCK_BYTES)
    builder.append({"attacker": [70]})
    builder.append_payloads("victim", b"evil: nobody ever published this")
    files = {one: one.read_bytes() for one in (path / "data" / "journal").glob("*.journal")}
    builder.store.crash()
    (probe,) = [at for data in files.values() if (at := data.find(b"????????")) >= 0]
    (evil,) = [
        data[at // BLOCK_BYTES * BLOCK_BYTES :][:BLOCK_BYTES]
        for data in files.values()
        if (at := data.find(b"evil: nobody")) >= 0
    ]
    shutil.rmtree(path)
    padding = -probe % BLOCK_BYTES
    return b"." * padding + evil * FORGED_BLOCKS


@pytest.fixture(params=["guessed generation", "true generation"])
def same_chance(request) -> Iterator[None]:
    """A lucky attacker knows what a file's random numbers will be."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "true generation":
            patch.setattr(secrets, "randbits", lambda bits: random.Random(4).getrandbits(bits))
            patch.setattr(secrets, "token_bytes", lambda count: random.Random(4).randbytes(count))
        yield


@pytest.mark.usefixtures("same_chance")
@pytest.mark.parametrize("first", [True, False], ids=["first frame", "later frame"])
def test_a_frame_forged_inside_a_payload_is_never_believed(tmp_path, first):
    payload = forgery(tmp_path / "forger", first=first)
    builder = Builder(tmp_path / "forged" / "data")
    history(builder, first=first)
    attack = builder.append_payloads("attacker", payload)
    ten_records(builder, ["victim", "attacker"], 6)
    world = builder.kill()
    frame = attack.frame
    assert frame is not None
    data = (world.path / frame.file).read_bytes()
    (place,) = attack.groups[0].places
    assert data.index(payload[-BLOCK_BYTES:]) % BLOCK_BYTES == 0, "it has to stand at a block"
    bad = [
        Damage(frame.file, "journal", what, position, unit)
        for unit in UNITS
        for position in range(frame.begin // unit * unit, place.end, unit)
        for what in ("zeros", "garbage")
    ]
    check_all(world, sampled(bad, 3), tmp_path / "copy")


# Unreadable blocks


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return build(tool("gcc", "cc"), tmp_path_factory.mktemp("library") / "unreadable.so")


UNREADABLE = {
    "the head of the newest journal file": ("journal", 0, 4096),
    "a block inside the newest journal file": ("journal", 8192, 4096),
    "the newest journal file": ("journal", 0, WHOLE),
    "the head of the catalogue": ("catalogue", 0, 4096),
    "a page of the catalogue": ("catalogue", 8192, 4096),
    "the catalogue": ("catalogue", 0, WHOLE),
}


@pytest.fixture
def unreadable(request, what) -> tuple[World, Damage]:
    kind, position, length = UNREADABLE[what]
    world = request.getfixturevalue("newest" if kind == "journal" else "stopped")
    file = file_of(world, -1) if kind == "journal" else "catalogue.sqlite"
    return world, Damage(file, kind, "unreadable", position, length)


@pytest.mark.parametrize("what", UNREADABLE)
def test_what_the_disk_cannot_read_is_damage_and_no_reason_not_to_start(
    library, unreadable, tmp_path
):
    copy = tmp_path / "copy"
    report(judge_unreadable(library, *unreadable, copy))
    kept = [*copy.glob("damaged-*"), *(copy / "quarantine").glob("*")]
    assert kept, "the old file is kept"


@pytest.mark.parametrize("first", ["verify", "start"])
@pytest.mark.parametrize("what", ["the head of the newest journal file", "the catalogue"])
def test_a_read_that_fails_once_is_tried_again_and_is_no_damage(
    library, unreadable, tmp_path, first
):
    copy = tmp_path / "copy"
    faults = judge_unreadable(library, *unreadable, copy, times=1, verify_first=first == "verify")
    report(faults)
    assert [*copy.glob("damaged-*"), *(copy / "quarantine").glob("*")] == []


@takes_long
def test_every_block_of_a_file_may_be_unreadable(library, tmp_path):
    world = WORLDS["mixed"](tmp_path / "mixed" / "data")
    faults = []
    for damage in damages(world):
        if damage.what == "zeros" and damage.length == UNITS[-1]:
            bad = damage._replace(what="unreadable")
            found = judge_unreadable(library, world, bad, tmp_path / "copy")
            faults += [f"{bad}: {fault}" for fault in found]
    report(faults)
