"""Data directories of earlier versions, after clean stops and kills: this version serves all their content.

The archives hold directories with journals of 64 KiB and their expected content; `kept_format.py` made them.
"""

from pathlib import Path
from typing import Any

import pytest

from headrace.log.verify.verify import verify
from headrace.model import Position
from tests.fakes.store import BOOT_ID, StepStore
from tests.log.damage_matrix.worlds import small
from tests.log.expected import check_order
from tests.log.old_versions.kept_format import unpack

ARCHIVES = sorted(Path(__file__).parent.glob("format*/*.tar.xz"))


@pytest.fixture(params=ARCHIVES, ids=lambda path: f"{path.parent.name}-{path.name.split('.')[0]}")
def expected(request, tmp_path) -> dict[str, Any]:
    return unpack(request.param, tmp_path)


@pytest.fixture(params=["same boot", "other boot"])
def boot(request, expected) -> bytes:
    return bytes.fromhex(expected["boot"]) if request.param == "same boot" else BOOT_ID


def start(tmp_path: Path, expected: dict[str, Any], boot: bytes) -> StepStore:
    return StepStore(small(tmp_path / "data", expected["journal_files"]), boot_id=boot)


def test_archives_of_every_state_are_there():
    states = {path.name.split(".")[0] for path in ARCHIVES if path.parent.name == "format3"}
    assert states == {"clean", "unapplied", "mixed", "recycled", "many", "batches"}


def test_nothing_in_it_is_damaged(expected, tmp_path):
    report = verify(tmp_path / "data")
    assert not report.damaged, report
    checked = {topic.name: topic for topic in report.topics}
    for name, topic in expected["topics"].items():
        for offset, _, _ in topic["records"]:
            assert any(part.offset <= offset < part.end for part in checked[name].ranges)


def test_everything_is_served_at_its_offsets(expected, tmp_path, boot):
    store = start(tmp_path, expected, boot)
    crashed = [line for line in store.reports if "a crash of the machine" not in line]
    assert crashed == []
    check(store, expected)
    store.crash()
    # The first start has converted the directory to the present format, which the second start finds.
    store = start(tmp_path, expected, boot)
    assert store.reports == []
    check(store, expected)
    store.close()
    assert not verify(tmp_path / "data").damaged


def test_it_goes_on_where_it_ended(expected, tmp_path, boot):
    store = start(tmp_path, expected, boot)
    for name, producer, number, payload in expected["producers"]:
        assert store.append_once(name, producer, number, payload.encode()).duplicate
    for name, topic in expected["topics"].items():
        store.append(name, b"written by this version")
        one = store.listener.appended[-1]
        assert (one.offset, one.ordinal) >= tuple(topic["end"])
        assert one.topic.epoch >= topic["epoch"]
    before = {name: store.content(name) for name in expected["topics"]}
    store.crash()
    store = start(tmp_path, expected, boot)
    assert {name: store.content(name) for name in expected["topics"]} == before
    check(store, expected)
    store.crash()


def check(store: StepStore, expected: dict[str, Any]) -> None:
    for name, topic in expected["topics"].items():
        handle = store.store.topic(name)
        found = store.content(handle.name)
        check_order(name, handle, found)
        end = tuple(topic["end"])
        old = [
            [offset, ordinal, payload.decode()]
            for offset, (ordinal, payload) in found.items()
            if offset < end[0]
        ]
        assert old == topic["records"], name
        assert (handle.end_offset, handle.end_ordinal) >= end
        assert handle.epoch >= topic["epoch"]
    served = {
        name: [payload for _, payload in store.content(name).values()]
        for name in expected["topics"]
    }
    for name, payloads in expected["pending"]:
        assert all(served[name].count(payload.encode()) == 1 for payload in payloads)
    cursors = {(one.topic, one.reader): one.position for one in store.store.cursors(limit=1000)}
    assert cursors == {
        (name, reader): Position(*position) for name, reader, *position in expected["cursors"]
    }
    for key, value in expected["notes"].items():
        note = store.store.note(key.encode())
        assert note is not None and note.value == value.encode()
