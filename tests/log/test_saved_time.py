"""The file with the server's time: every save can be read, and no damage makes another time."""

from pathlib import Path

import msgspec
import pytest
from crc32c import crc32c

from headrace.log.disk import Disk
from headrace.log.layout import Layout
from headrace.log.saved_time import (
    SAVE_MS,
    DamagedTimeError,
    SavedTime,
    SeenOffset,
    TimeFile,
    read_time,
)
from tests.fakes.store import StepRunner

STATE = SavedTime("boot", 1000, 5000, None, hour=SeenOffset(990, 3000))
DOUBTS = {"jump": SeenOffset(99_000, 4000), "gap": SeenOffset(1000, 20)}


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path)


def later(state: SavedTime, ms: int, **changes: SeenOffset | None) -> SavedTime:
    return msgspec.structs.replace(state, now_ms=state.now_ms + ms, **changes)


def test_the_time_is_saved_every_minute(layout: Layout) -> None:
    runner = StepRunner()
    file = TimeFile(layout, Disk(), runner)
    assert read_time(layout) is None
    for state, is_saved in [
        (STATE, True),
        (later(STATE, SAVE_MS // 2), False),
        (later(STATE, SAVE_MS), True),
        (later(STATE, SAVE_MS + 1), False),
        (later(STATE, 0), True),
    ]:
        file.save(state)
        runner.run()
        assert (read_time(layout) == state) == is_saved


@pytest.mark.parametrize("doubt", DOUBTS)
def test_a_doubt_is_saved_when_it_begins_and_when_it_ends(layout: Layout, doubt: str) -> None:
    runner = StepRunner()
    file = TimeFile(layout, Disk(), runner)
    for state in [STATE, later(STATE, 1, **{doubt: DOUBTS[doubt]}), later(STATE, 2)]:
        file.save(state)
        runner.run()
        assert read_time(layout) == state


def test_a_file_of_an_earlier_version_is_read(layout: Layout) -> None:
    line = b'{"boot_id":"x","offset_ms":5,"now_ms":7,"jump":[3,4]}\n'
    (layout.root / "clock").write_bytes(b"%08x " % crc32c(line) + line)
    assert read_time(layout) == SavedTime("x", 5, 7, SeenOffset(3, 4))


@pytest.mark.parametrize(
    "data", [b"", bytes(512), b"\xff\xfe", b"[1]", b'00000000 {"boot_id":"x"}']
)
def test_a_damaged_file_is_refused(layout: Layout, data: bytes) -> None:
    (layout.root / "clock").write_bytes(data)
    with pytest.raises(DamagedTimeError, match="/clock: the file is damaged"):
        read_time(layout)


def test_a_file_that_says_something_else_is_refused(layout: Layout) -> None:
    line = b'{"boot_id":"x","offset_ms":5,"now_ms":7,"jump":null,"more":1}\n'
    (layout.root / "clock").write_bytes(b"%08x " % crc32c(line) + line)
    with pytest.raises(DamagedTimeError, match="/clock: the file is of another version"):
        read_time(layout)


def test_no_flipped_bit_makes_another_time(layout: Layout) -> None:
    TimeFile(layout, Disk(), StepRunner()).write(msgspec.structs.replace(STATE, **DOUBTS))
    sound = (layout.root / "clock").read_bytes()
    for at in range(8 * len(sound)):
        data = bytearray(sound)
        data[at // 8] ^= 1 << at % 8
        (layout.root / "clock").write_bytes(data)
        with pytest.raises(DamagedTimeError):
            read_time(layout)
