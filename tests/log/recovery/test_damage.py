"""One flipped bit or one truncated file, anywhere: the store starts and serves everything else."""

import logging
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headrace.log.catalogue.catalogue import FILE_NAME
from headrace.log.layout import Layout
from headrace.log.read.index import HEADER_BYTES, decode_rows
from tests.fakes.disk import flip
from tests.fakes.store import StepStore
from tests.log.conftest import tiny
from tests.log.expected import check_order

NAMES = ["small", "mixed", "written/w"]
KINDS = {
    "journal": "journal/*.journal",
    "segment": "segments/**/*.log",
    "index": "segments/**/*.idx",
    "catalogue": FILE_NAME,
    "write-ahead log": f"{FILE_NAME}-wal",
    "shared memory": f"{FILE_NAME}-shm",
}
CASES = 8


@dataclass
class Known:
    """A data directory that is partly applied, and the records that were published to it."""

    path: Path
    records: dict[str, dict[int, tuple[int, bytes]]] = field(default_factory=dict)
    commits: list[dict[str, list[int]]] = field(default_factory=list)
    """Offsets of the records of each commit, by topic."""
    runs: dict[str, list[tuple[int, int]]] = field(default_factory=dict)


@pytest.fixture(scope="module", params=["killed", "stopped"])
def known(request, tmp_path_factory) -> Known:
    """The first part of every topic is in segments, the rest in the journal unless the store was stopped."""
    path = tmp_path_factory.mktemp(request.param) / "data"
    chance = random.Random(1)
    store = StepStore(tiny(path))
    for number in range(30):
        store.clock.ms += 70
        batches = {}
        for name in NAMES:
            size = {"small": 5, "mixed": 400, "written/w": 40}[name]
            count = chance.randrange(1, 4)
            batches[store.store.topic(name)] = [
                length.to_bytes(4) + chance.randbytes(length)
                for length in (chance.randrange(size) for _ in range(count))
            ]
        store.store.append(batches, lambda: None)
        store.runner.run()
        if number in (6, 11, 17):
            store.rotate()
        if number == 17:
            store.applying = False
        if number == 24:
            store.rotate()
    found = Known(path)
    for name in NAMES:
        found.records[name] = store.content(name)
    for one in store.listener.appended:
        if not found.commits or one.topic.name in found.commits[-1]:
            found.commits.append({})
        ends = [one.offset]
        for record in one.records[:-1]:
            ends.append(ends[-1] + len(record))
        found.commits[-1][one.topic.name] = ends
    ids = {name: store.store.topic(name).id for name in NAMES}
    if request.param == "killed":
        # Copy the directory as it is at this moment, with the files that SQLite keeps beside its own.
        found.path = tmp_path_factory.mktemp("killed") / "data"
        shutil.copytree(path, found.path)
        store.crash()
    else:
        store.close()
    for name, topic_id in ids.items():
        found.runs[name] = [
            (row.offset, row.end)
            for file in store.layout.files(".idx")
            if file.topic_id == topic_id
            for row in decode_rows(file.path.read_bytes()[HEADER_BYTES:])
        ]
    return found


def flip_any(file: Path, chance: random.Random) -> int:
    data = file.read_bytes()
    # Mostly choose a position that is in use.
    used = len(data.rstrip(b"\0")) or len(data)
    position = chance.randrange(used if chance.random() < 0.8 else len(data))
    flip(file, position, chance.randrange(8))
    return position


def cut(file: Path, chance: random.Random) -> int:
    data = file.read_bytes()
    position = chance.randrange(len(data.rstrip(b"\0")) or len(data))
    file.write_bytes(data[:position])
    return position


@pytest.mark.parametrize("case", range(CASES))
@pytest.mark.parametrize("damage", [flip_any, cut])
@pytest.mark.parametrize("kind", KINDS)
def test_damage_takes_nothing_else_with_it(known, tmp_path, caplog, kind, damage, case):
    chance = random.Random(f"{known.path.parent.name[:6]} {kind} {damage.__name__} {case}")
    path = tmp_path / "data"
    shutil.copytree(known.path, path)
    files = sorted(file for file in path.glob(KINDS[kind]) if file.stat().st_size)
    if not files:
        pytest.skip("does not apply: a clean stop leaves no such file")
    file = chance.choice(files)
    position = damage(file, chance)
    print(damage.__name__, file.relative_to(path), position)
    caplog.set_level(logging.ERROR)
    store = StepStore(tiny(path))
    lost: dict[str, set[int]] = {}
    for name in NAMES:
        topic = store.store.topic(name)
        found = store.content(topic.name)
        check_order(name, topic, found)
        assert found.items() <= known.records[name].items(), "never published, or elsewhere"
        lost[name] = set(known.records[name]) - set(found)
    check_loss(known, file, kind, damage, lost)
    if any(lost.values()):
        said = "\n".join([*store.reports, caplog.text])
        assert "damage" in said or "dropped" in said or "lost" in said
    # Whatever was damaged, new records come after everything that clients know of, and are kept.
    for name in NAMES:
        tail = kind == "journal" and max(known.records[name]) in lost[name]
        end = store.store.topic(name).end_offset
        assert end > max(known.records[name]) or tail
        store.append(name, b"after the damage")
    store.settle()
    before = {name: store.content(name) for name in NAMES}
    store.crash()
    store = StepStore(tiny(path))
    assert {name: store.content(name) for name in NAMES} == before
    assert all(store.payloads(name)[-1] == b"after the damage" for name in NAMES)
    store.crash()


def check_loss(known, file, kind, damage, lost) -> None:
    """Check that the damage explains the loss."""
    if kind in ("catalogue", "write-ahead log", "shared memory"):
        assert not any(lost.values())
    elif kind == "journal":
        if known.path.parent.name.startswith("stopped"):
            assert not any(lost.values())
        touched = [
            number
            for number, commit in enumerate(known.commits)
            if any(lost[name] & set(offsets) for name, offsets in commit.items())
        ]
        if damage is flip_any:
            assert len(touched) <= 1
        elif touched:
            # After a cut, commits before the cut and those of the next file are intact.
            assert touched == list(range(touched[0], touched[-1] + 1))
            assert touched[0] >= 18
            assert touched[-1] == 24 or touched[0] >= 25
    else:
        topic_id = int(file.stem.split("-")[0], 16)
        name = NAMES[topic_id - 1]
        assert not any(offsets for other, offsets in lost.items() if other != name)
        runs = [
            (begin, end) for begin, end in known.runs[name] if lost[name] & set(range(begin, end))
        ]
        if damage is flip_any:
            assert len(runs) <= 1
        base = int(file.stem.split("-")[1])
        later = [b for b in bases(known.path, topic_id) if b > base]
        for offset in lost[name]:
            assert base <= offset < min(later, default=1 << 62)
        if kind == "index" and damage is cut:
            assert not runs, "records say where they end themselves"


def bases(path: Path, topic_id: int) -> list[int]:
    return [file.base for file in Layout(path).files(".log") if file.topic_id == topic_id]


def test_the_directory_under_test_holds_every_kind_of_file(known):
    for kind, pattern in KINDS.items():
        if known.path.parent.name.startswith("killed") or kind not in list(KINDS)[-2:]:
            assert list(known.path.glob(pattern))
    assert all(len(runs) > 4 for runs in known.runs.values())
