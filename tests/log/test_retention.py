"""Retention: records that are too old or too many are removed by whole segments, and no others ever are."""

from itertools import groupby

import pytest

from headrace.config.settings import PrefixRule, Retention, Segment
from headrace.config.values import ReaderNames
from headrace.log import retention
from headrace.log.retention import RetentionSweep as Retainer
from headrace.log.retention import TrimPoint, trimming
from headrace.log.store import Hold
from headrace.model import JUMP, Durability, Position
from tests.log.conftest import tiny

DAY_S = 86_400.0
WEEK_S = 7 * DAY_S


class Kept:
    """A store whose clock a test moves."""

    def __init__(self, open_store, path, *rules: PrefixRule, **retention: float) -> None:
        self._open = open_store
        self.config = tiny(
            path,
            segment=Segment(bytes=1 << 20),
            retention=Retention(check_s=60, **retention),
            topics=rules,
        )
        self.elapsed_s = 1000.0
        self.clock = None
        self.start()

    def start(self, **options) -> None:
        self.store = self._open(
            self.config, **({"clock": self.clock} if self.clock else {}), **options
        )
        self.clock = self.store.clock
        self.retention = Retainer(
            self.config, self.store.layout, self.store.store, self.store.runner
        )
        self.tick()

    def append(self, topic: str, payload: bytes = b"x") -> None:
        self.store.append(topic, payload)
        self.store.rotate()

    def wait(self, seconds: float) -> None:
        self.clock.ms += int(seconds * 1000)
        self.elapsed_s += seconds
        self.tick()

    def tick(self) -> None:
        self.retention.tick(self.clock.ms, self.elapsed_s)
        self.store.runner.run()
        self.store.settle()

    def ages_s(self, topic: str) -> list[float]:
        """Return the age of each readable record, in seconds."""
        handle = self.store.store.topic(topic)
        reader, at, ages = self.store.store.reader(handle), handle.start_offset, []
        while at < handle.end_offset:
            chunk = reader.read(at, 1)
            for run in chunk.runs:
                ages += [(self.clock.ms - run.ms) / 1000] * run.record_count
            at = chunk.next_offset
        return ages


@pytest.fixture
def keep(open_store, tmp_path):
    return lambda *rules, **retention: Kept(open_store, tmp_path / "data", *rules, **retention)


def test_a_record_outlives_its_window_by_at_most_a_tenth(keep):
    kept = keep(age_s=WEEK_S)
    for _ in range(200):
        kept.append("topic")
        kept.wait(7000)
        ages = kept.ages_s("topic")
        assert max(ages) <= 1.1 * WEEK_S + 7000
    assert max(ages) > 0.99 * WEEK_S, "nothing goes before its time"
    assert len(ages) >= int(WEEK_S / 7000)


def test_the_last_segment_of_an_idle_topic_expires_too(keep):
    kept = keep(age_s=WEEK_S)
    kept.append("topic", b"the only one")
    end = kept.store.store.topic("topic").end
    kept.wait(WEEK_S - 100)
    assert kept.store.payloads("topic") == [b"the only one"]
    kept.wait(200)
    assert kept.store.payloads("topic") == []
    topic = kept.store.store.topic("topic")
    assert topic.exists
    assert topic.start == topic.end == end
    assert list(kept.store.layout.files(".log")) == []
    kept.append("topic", b"another")
    assert kept.store.read("topic") == [(end.offset + 11, b"another")]


def test_names_of_logux_and_channels_are_never_touched(keep):
    kept = keep(age_s=DAY_S, bytes=100)
    for name in ("$logux/log", "$channel/c", "topic"):
        kept.append(name, b"x" * 80)
        kept.append(name, b"y" * 80)
        kept.append(name, b"z" * 80)
    kept.wait(30 * DAY_S)
    assert len(kept.store.payloads("$logux/log")) == 3
    assert len(kept.store.payloads("$channel/c")) == 3
    assert kept.store.payloads("topic") == []


def test_the_longest_prefix_says_how_long(keep):
    kept = keep(
        PrefixRule(prefix="a/", retention_age_s=10 * DAY_S),
        PrefixRule(prefix="a/for-ever/", retention_age_s=0),
        age_s=DAY_S,
    )
    names = ["other", "a/some", "a/for-ever/x"]
    for name in names:
        kept.append(name)
    for days, left in ((2, names[1:]), (9, names[2:]), (300, names[2:])):
        kept.wait(days * DAY_S)
        assert [name for name in names if kept.store.payloads(name)] == left


def test_without_a_limit_nothing_goes(keep):
    kept = keep(age_s=0)
    kept.append("topic")
    kept.wait(10_000 * DAY_S)
    assert kept.store.payloads("topic") == [b"x"]


def test_a_topic_outgrows_its_bytes_by_at_most_a_tenth(keep):
    kept = keep(PrefixRule(prefix="sized/", retention_bytes=2000), age_s=0)
    for number in range(80):
        kept.append("sized/topic", b"%02d" % number + b"x" * 44)
        kept.append("other", b"x" * 46)
        kept.wait(60)
        kept_bytes = 50 * len(kept.store.payloads("sized/topic"))
        assert kept_bytes <= 2200 + 50
        assert kept_bytes >= min(2000, 50 * (number + 1)), "not less than it may keep"
    assert kept.store.payloads("sized/topic")[-1].startswith(b"79")
    assert len(kept.store.payloads("other")) == 80


def test_offsets_that_were_skipped_do_not_count_as_bytes(keep):
    rule = PrefixRule(prefix="", durability=Durability.WRITTEN, retention_bytes=2000)
    kept = keep(rule, age_s=0)
    kept.append("topic", b"x" * 100)
    kept.start(boot_id=b"after the crash.")
    kept.append("topic", b"y" * 100)
    assert kept.store.store.topic("topic").end_offset > JUMP
    kept.wait(60)
    assert kept.store.payloads("topic") == [b"x" * 100, b"y" * 100]


def test_checks_come_no_more_often_than_they_should(keep):
    kept = keep(age_s=DAY_S)
    kept.append("topic")
    kept.wait(DAY_S - 30)
    for _ in range(5):
        kept.wait(10)
        assert kept.store.payloads("topic") == [b"x"]
    kept.wait(10)
    assert kept.store.payloads("topic") == []


def test_a_short_window_is_checked_more_often(keep):
    kept = keep(age_s=100)
    kept.append("topic")
    kept.wait(100)
    kept.wait(2)
    assert kept.store.payloads("topic") == []


def test_what_was_forgotten_stays_so_after_a_crash(keep):
    kept = keep(age_s=DAY_S)
    kept.append("topic", b"old")
    kept.wait(2 * DAY_S)
    kept.append("topic", b"new")
    kept.start()
    assert kept.store.payloads("topic") == [b"new"]


def test_a_topic_made_anew_meanwhile_is_left_alone(keep):
    kept = keep(age_s=DAY_S)
    kept.append("topic", b"old")
    kept.clock.ms += int(2 * DAY_S * 1000)
    kept.elapsed_s += 2 * DAY_S
    kept.retention.tick(kept.clock.ms, kept.elapsed_s)
    topic = kept.store.store.topic("topic")
    found = kept.store.runner._steps.pop()  # the search has started; the topic is recreated now
    kept.store.destroy("topic")
    kept.store.append("topic", b"new")
    kept.store.runner.soon(found)
    kept.store.runner.run()
    assert kept.store.payloads("topic") == [b"new"]
    assert topic.exists


def test_a_store_that_failed_is_left_alone(keep, monkeypatch):
    kept = keep(age_s=DAY_S)
    kept.append("topic", b"old")
    kept.store.store._fail("the disk is gone")
    kept.clock.ms += int(2 * DAY_S * 1000)
    kept.elapsed_s += 2 * DAY_S
    kept.retention.tick(kept.clock.ms, kept.elapsed_s)
    kept.store.runner.run()
    assert kept.store.payloads("topic") == [b"old"]


def test_many_topics_are_forgotten_a_few_at_a_time(keep, monkeypatch):
    monkeypatch.setattr(retention, "_TRIMMED_AT_ONCE", 3)
    kept = keep(age_s=WEEK_S)
    names = [f"topic/{number}" for number in range(8)]
    for name in names:
        kept.append(name)
    store, steps = kept.store.store, []
    trim = store.trim
    monkeypatch.setattr(store, "trim", lambda *given: (steps.append(given[0].name), trim(*given)))
    soon = kept.store.runner.soon
    monkeypatch.setattr(kept.store.runner, "soon", lambda call: (steps.append(None), soon(call)))
    kept.wait(2 * WEEK_S)
    assert sorted(filter(None, steps)) == names
    assert all(kept.store.payloads(name) == [] for name in names)
    runs = [len(list(run)) for name, run in groupby(steps, bool) if name]
    assert max(runs) <= 3, "others have their turn in between"


# Readers that retention waits for


def read_to(kept: Kept, reader: str, topic: str, ordinal: int) -> None:
    store = kept.store.store
    at = store.locate_ordinal(store.topic(topic), ordinal)
    store.set_cursors(reader, {topic: at}, lambda: None)
    kept.store.runner.run()


def five_days(kept: Kept, topic: str = "topic") -> None:
    """Append one record a day, each to its own segment."""
    for number in range(5):
        kept.append(topic, b"%d" % number)
        kept.wait(DAY_S)


def test_records_are_kept_for_a_reader_until_it_has_passed_them(keep):
    kept = keep(age_s=5.5 * DAY_S, wait_for=ReaderNames(["group:a"]), wait_s=30 * DAY_S)
    five_days(kept)
    read_to(kept, "group:a", "topic", 2)
    kept.wait(10 * DAY_S)
    assert kept.store.payloads("topic") == [b"2", b"3", b"4"]
    read_to(kept, "group:a", "topic", 4)
    kept.wait(60)
    assert kept.store.payloads("topic") == [b"4"]
    read_to(kept, "group:a", "topic", 5)
    kept.wait(60)
    assert kept.store.payloads("topic") == []


def test_what_is_not_past_its_time_is_kept_whoever_has_read_it(keep):
    kept = keep(age_s=5.5 * DAY_S, wait_for=ReaderNames(["group:a"]))
    five_days(kept)
    read_to(kept, "group:a", "topic", 5)
    kept.wait(60)
    assert len(kept.store.payloads("topic")) == 5


def test_other_readers_and_readers_without_a_cursor_hold_nothing_back(keep):
    kept = keep(age_s=5.5 * DAY_S, wait_for=ReaderNames(["group:a", "group:never"]))
    five_days(kept)
    five_days(kept, "other")
    read_to(kept, "group:b", "topic", 0)
    read_to(kept, "group:a", "other", 0)
    kept.wait(6 * DAY_S)
    assert kept.store.payloads("topic") == []
    assert len(kept.store.payloads("other")) == 5


def test_the_lake_is_waited_for_also_before_its_first_export(keep, caplog):
    kept = keep(age_s=5.5 * DAY_S, wait_for=ReaderNames(["lake"]), wait_s=6 * DAY_S)
    five_days(kept)
    kept.wait(5 * DAY_S)
    assert len(kept.store.payloads("topic")) == 5
    read_to(kept, "lake", "topic", 2)
    kept.wait(60)
    assert kept.store.payloads("topic") == [b"2", b"3", b"4"]
    five_days(kept, "never exported")
    kept.wait(12 * DAY_S)
    assert 'reader "lake" will miss' in caplog.text


def test_a_cursor_that_was_dropped_lets_go(keep):
    kept = keep(age_s=5.5 * DAY_S, wait_for=ReaderNames(["group:a"]))
    five_days(kept)
    read_to(kept, "group:a", "topic", 0)
    kept.wait(3 * DAY_S)
    assert len(kept.store.payloads("topic")) == 5
    kept.store.store.drop_cursors("group:a", ["topic"], lambda: None)
    kept.store.runner.run()
    kept.wait(3 * DAY_S)
    assert kept.store.payloads("topic") == []


def test_a_reader_is_waited_for_no_longer_than_so_and_it_is_said_what_it_misses(keep, caplog):
    kept = keep(age_s=5.5 * DAY_S, wait_for=ReaderNames(["group:a"]), wait_s=DAY_S)
    five_days(kept)
    read_to(kept, "group:a", "topic", 1)
    kept.wait(DAY_S)
    assert kept.store.payloads("topic") == [b"1", b"2", b"3", b"4"]
    assert "will miss" not in caplog.text
    kept.wait(2 * DAY_S)
    assert kept.store.payloads("topic") == [b"2", b"3", b"4"]
    kept.wait(60)
    kept.wait(60)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    (warning,) = warnings
    assert warning.startswith('topic "topic": reader "group:a" will miss 1 records')
    kept.wait(DAY_S)
    assert kept.store.payloads("topic") == [b"3", b"4"]


def test_what_is_being_forgotten_is_not_forgotten_again(keep, caplog):
    kept = keep(age_s=5.5 * DAY_S, wait_for=ReaderNames(["group:a"]), wait_s=0)
    five_days(kept)
    read_to(kept, "group:a", "topic", 0)
    store, take = kept.store.store, kept.store.store._gathering.take
    store._gathering.take = lambda: None  # commits wait
    for _ in range(3):
        kept.wait(6 * DAY_S)
    assert caplog.text.count("will miss 5 records") == 1
    store._gathering.take = take
    kept.store.runner.soon(store._begin)
    kept.store.runner.run()
    assert kept.store.payloads("topic") == []
    kept.append("topic", b"new")
    kept.wait(6 * DAY_S)
    assert kept.store.payloads("topic") == []


def test_a_topic_outgrows_its_bytes_for_a_reader_by_no_more_than_so(keep, caplog):
    kept = keep(age_s=0, bytes=1000, wait_for=ReaderNames(["group:a"]), wait_bytes=1000)
    kept.append("topic", b"%02d" % 0 + b"x" * 44)
    read_to(kept, "group:a", "topic", 0)
    for number in range(1, 60):
        kept.append("topic", b"%02d" % number + b"x" * 44)
        kept.wait(60)
        held = 50 * len(kept.store.payloads("topic"))
        assert held <= 2000 + 200
        if number < 40:
            assert held == 50 * (number + 1)
    assert 'reader "group:a" will miss' in caplog.text
    read_to(kept, "group:a", "topic", 60)
    kept.wait(60)
    assert 50 * len(kept.store.payloads("topic")) <= 1200


def test_who_is_waited_for_depends_on_the_topic(keep):
    kept = keep(
        PrefixRule(prefix="a/", retention_wait_for=ReaderNames(["group:a"])),
        PrefixRule(prefix="a/free/", retention_wait_for=ReaderNames()),
        age_s=5.5 * DAY_S,
    )
    names = ["a/topic", "a/free/topic", "other"]
    for name in names:
        kept.append(name)
        read_to(kept, "group:a", name, 0)
    kept.wait(6 * DAY_S)
    assert [name for name in names if kept.store.payloads(name)] == ["a/topic"]


def test_readers_are_waited_for_after_a_crash_too(keep):
    kept = keep(age_s=5.5 * DAY_S, wait_for=ReaderNames(["group:a"]))
    five_days(kept)
    read_to(kept, "group:a", "topic", 3)
    kept.start()
    kept.wait(6 * DAY_S)
    assert kept.store.payloads("topic") == [b"3", b"4"]


def test_a_reader_of_an_earlier_life_holds_the_next_one(keep):
    kept = keep(age_s=5.5 * DAY_S, wait_for=ReaderNames(["group:a"]))
    kept.append("topic", b"old")
    read_to(kept, "group:a", "topic", 1)
    kept.store.destroy("topic")
    kept.append("topic", b"new")
    kept.wait(6 * DAY_S)
    assert kept.store.payloads("topic") == [b"new"]


# Trim points


def at(number: int, epoch: int = 5) -> Position:
    """Return the position after `number` records of ten bytes."""
    return Position(epoch, 10 * number, number)


def places(*numbers: int, overdue: int = 0) -> list[TrimPoint]:
    return [TrimPoint(at(number), number <= overdue) for number in numbers]


@pytest.mark.parametrize(
    ("overdue", "holds", "start", "missed"),
    [
        (0, {}, 6, {}),
        (0, {"a": 6}, 6, {}),
        (0, {"a": 9}, 6, {}),
        (0, {"a": 5}, 4, {}),
        (0, {"a": 5, "b": 3}, 2, {}),
        (0, {"a": 1}, 0, {}),
        (2, {"a": 1}, 2, {"a": 1}),
        (4, {"a": 1, "b": 3, "c": 4}, 4, {"a": 3, "b": 1}),
        (6, {"a": 9}, 6, {}),
        (2, {"a": 5}, 4, {}),
    ],
)
def test_a_topic_is_trimmed_to_where_the_slowest_reader_is_unless_it_is_overdue(
    overdue, holds, start, missed
):
    held = [Hold(reader, at(number)) for reader, number in holds.items()]
    found = trimming(places(2, 4, 6, overdue=overdue), held, at(0))
    assert found == (at(start), list(missed.items()))


def test_the_order_of_places_does_not_matter():
    assert trimming(reversed(places(2, 4, 6)), [Hold("a", at(5))], at(0)) == (at(4), [])


def test_what_is_gone_already_is_not_missed_again():
    found = trimming(places(2, 4, 6, overdue=6), [Hold("a", at(1))], at(4))
    assert found == (at(6), [("a", 2)])
    found = trimming(places(2, 4, overdue=4), [Hold("a", at(1))], at(4))
    assert found == (at(4), []), "nothing goes, so nothing is missed"


def test_a_reader_from_an_earlier_life_holds_all_of_this_one():
    found = trimming(places(2, 4, 6), [Hold("a", at(1, epoch=3))], at(1))
    assert found == (at(1), [])
