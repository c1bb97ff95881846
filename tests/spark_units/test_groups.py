"""One query for each groupId: another query is noticed by its lock, or by the cursor that it moves."""

import itertools
from contextlib import closing
from typing import Any

import pytest

from headrace.model import Position
from headrace.reader.planning import SourceOptions
from headrace.spark import progress
from headrace.spark.options import parse_source
from headrace.spark.progress import Group, GroupInUseError, encode_offset
from headrace.spark.source import HeadraceSource
from headrace.spark.stream import StreamReader
from tests.reader.conftest import Filled, state_of
from tests.spark.support import send

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LOCK_WAIT_S", 0.0)
    monkeypatch.setattr(progress, "CHECK_S", 0.0)


@pytest.fixture
def group() -> str:
    return f"group {next(_numbers)}"


def options(filled: Filled, group: str, topics: str = "many", **place: str) -> SourceOptions:
    given = place or {"url": filled.server.http_url}
    return parse_source({**given, "subscribe": topics, "groupId": group}, streaming=True)


def move(filled: Filled, group: str, ordinal: int) -> None:
    """Move the cursor as the tracker of a query does that has read up to there."""
    record = filled.records["many"][ordinal]
    at = Position(state_of(filled.server, "many").end.epoch, record.offset, record.ordinal)
    body = {"reader": f"group:{group}", "positions": [{"topic": "many", **at._asdict()}]}
    send(filled.server, "POST", "/v1/cursors", body)


def at(ordinal: int) -> dict[str, Position]:
    return {"many": Position(1, 0, ordinal)}


@pytest.mark.parametrize("place", ["url", "path"])
def test_a_second_query_on_this_machine_is_refused_until_the_first_ends(filled, group, place):
    given = {"path": str(filled.path)} if place == "path" else {}
    wanted = options(filled, group, **given)
    with closing(Group(wanted)):
        with pytest.raises(GroupInUseError, match=f"another query on this machine has .*'{group}'"):
            Group(wanted)
        # Cursors belong to topics, so a query of other topics does not conflict.
        Group(options(filled, group, "one", **given)).close()
        Group(options(filled, f"{group}x", **given)).close()
    Group(wanted).close()


def test_a_cursor_that_another_query_moves_ahead_is_noticed(filled, group):
    with closing(Group(options(filled, group))) as ours:
        ours.check(at(0))
        move(filled, group, 5)  # our own tracker does this
        ours.check(at(5))
        ours.check(at(9))
        move(filled, group, 30)
        with pytest.raises(GroupInUseError) as error:
            ours.check(at(9))
    assert str(error.value) == (
        f"another query has the groupId '{group}': it has moved the cursor in topic 'many' to ordinal 30, "
        "and this query is at 9. Give each query a groupId of its own"
    )


def test_a_query_that_begins_anew_or_after_a_crash_goes_on(filled, group):
    move(filled, group, 30)
    # The query has a new or an older checkpoint, and no other query moves the cursor.
    with closing(Group(options(filled, group))) as ours:
        ours.check(at(0))
        move(filled, group, 3)
        ours.check(at(3))
    # The tracker was killed before it could report the last batch.
    with closing(Group(options(filled, group))) as ours:
        ours.check(at(40))


def reader(filled: Filled, group: str) -> StreamReader:
    source = HeadraceSource(
        {"url": filled.server.http_url, "subscribe": "many", "groupId": group}
        | {"startingOffsets": "earliest"}
    )
    made: Any = source.streamReader(source.schema())
    return made


def test_a_reader_of_a_query_is_refused_and_one_of_a_task_is_not(filled, group):
    first, second = reader(filled, group), reader(filled, group)
    begin = first.initialOffset()
    with pytest.raises(GroupInUseError):
        second.initialOffset()
    end = first.latestOffset(begin, first.getDefaultReadLimit())
    (part, *_) = first.partitions(begin, end)
    assert sum(batch.num_rows for batch in second.read(part)) > 0
    first.stop()
    assert second.initialOffset() == begin
    move(filled, group, 30)
    with pytest.raises(GroupInUseError):
        second.latestOffset(encode_offset(at(9), group), second.getDefaultReadLimit())
    second.stop()
