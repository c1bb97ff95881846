"""`inspect_topic` on a directory: it reports a topic's content on disk, and changes nothing."""

from pathlib import Path

import pytest

from headrace.config.settings import Config, Journal, Segment
from headrace.errors import BadTopicNameError, DataDirectoryError, UnknownTopicError
from headrace.log.catalogue.catalogue import DamagedCatalogueError
from headrace.log.verify.verify import inspect_topic
from tests.fakes.store import StepStore

MS = 1_700_000_000_000


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def store(data: Path) -> StepStore:
    journal = Journal(file_bytes=65_536, files=2)
    return StepStore(Config(data_dir=data, segment=Segment(bytes=64), journal=journal))


def test_a_topic_is_shown_with_its_segments_and_their_times(store, data):
    for _ in range(2):
        store.clock.ms += 1000
        store.append("t", b"foo", bytes(60))
        store.settle()
    store.close()
    found = inspect_topic(data, "t")
    epoch = found["epoch"]
    assert found == {
        "name": "t",
        "epoch": epoch,
        "durability": "synced",
        "start": {"offset": 0, "ordinal": 0},
        "end": {"offset": 142, "ordinal": 4},
        "records": 4,
        "bytes": 142,
        "last_ms": MS + 2000,
        "segments": [
            {
                "base": 71 * number,
                "end": 71 * (number + 1),
                "first_ordinal": 2 * number,
                "records": 2,
                "bytes": 71,
                "first_ms": MS + 1000 * (number + 1),
                "last_ms": MS + 1000 * (number + 1),
                "epoch": epoch,
            }
            for number in range(2)
        ],
        "cursors": [],
    }
    assert epoch == MS + 1000


def test_a_running_server_s_topic_is_shown_as_far_as_it_is_applied(store, data):
    store.append("t", b"foo")
    store.settle()
    store.append("t", b"bar")
    assert inspect_topic(data, "t")["end"] == {"offset": 7, "ordinal": 1}
    store.settle()
    assert inspect_topic(data, "t")["end"] == {"offset": 14, "ordinal": 2}
    store.close()


def test_a_segment_whose_index_is_damaged_is_shown_without_its_epoch(store, data):
    store.append("t", b"foo")
    store.close()
    (index,) = data.glob("segments/*/*.idx")
    index.write_bytes(b"damaged")
    assert [one["epoch"] for one in inspect_topic(data, "t")["segments"]] == [None]
    index.unlink()
    assert [one["epoch"] for one in inspect_topic(data, "t")["segments"]] == [None]


def test_looking_leaves_nothing_behind(store, data):
    store.append("t", b"foo")
    store.close()
    before = sorted(data.rglob("*"))
    inspect_topic(data, "t")
    assert sorted(data.rglob("*")) == before


def test_what_is_no_topic_is_said(store, data, tmp_path):
    store.close()
    with pytest.raises(UnknownTopicError, match="there is no topic 't'"):
        inspect_topic(data, "t")
    with pytest.raises(BadTopicNameError):
        inspect_topic(data, "")
    with pytest.raises(DataDirectoryError, match="there is no such directory"):
        inspect_topic(tmp_path / "missing", "t")


def test_a_catalogue_that_may_not_be_read_is_not_called_damaged(store, data):
    store.close()
    (data / "catalogue.sqlite").rename(data / "elsewhere")
    (data / "catalogue.sqlite").mkdir()
    with pytest.raises(DataDirectoryError, match="unable to open") as raised:
        inspect_topic(data, "t")
    assert not isinstance(raised.value, DamagedCatalogueError)
