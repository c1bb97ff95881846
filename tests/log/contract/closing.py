"""Promises of every store about topics without records, ends of changes, and closed topics, on disk.

The harness is the one of `topics.py`.
"""

import pytest

from headrace.errors import ClosedTopicError
from headrace.log.records import pack_record
from headrace.log.store import Note
from headrace.model import Position
from tests.log.contract.notes import ALL, change, listed, stages


def ends(harness, *payloads, **parts):
    """Ask for a change; return the list that collects the end of its records."""
    found: list[Position] = []
    change(harness, *payloads, ends_at=found.append, **parts)
    return found


def close(harness, *payloads, **parts):
    change(harness, *payloads, close=True, **parts)
    harness.flush()


class ClosingContract:
    """Tests of these parts of a change. A subclass provides a `harness` fixture with topics on disk."""

    # Topics without records

    def test_a_topic_is_created_without_records(self, harness):
        done = change(harness, create_above=0, notes=[Note(b"key", b"value")])
        assert done == []
        harness.flush()
        assert done == [True]
        epoch = harness.topic().epoch
        assert epoch
        for stage in stages(harness):
            topic = harness.topic()
            assert topic.exists and topic.epoch == epoch and topic.start == topic.end, stage
            assert [one.name for one in harness.store.topics("", "", ALL)] == [topic.name], stage
            assert harness.store.note(b"key") is not None, stage
            assert harness.payloads() == []
        harness.append(b"first")
        for stage in stages(harness):
            assert harness.payloads() == [b"first"], stage
            assert harness.topic().epoch == epoch, stage

    def test_the_epoch_of_a_topic_is_above_the_one_that_was_given(self, harness):
        harness.append(b"x", name="source")
        source = harness.topic("source").epoch
        change(harness, create_above=source)
        harness.flush()
        assert harness.topic().epoch > source
        change(harness, destroy=True)
        change(harness, b"records too", create_above=source + 1000)
        harness.flush()
        for stage in stages(harness):
            assert harness.topic().epoch == source + 1001, stage

    def test_a_topic_that_exists_is_not_created_again(self, harness):
        harness.append(b"x")
        epoch, version = harness.topic().epoch, harness.store.version
        change(harness, create_above=0)
        harness.flush()
        assert (harness.topic().epoch, harness.store.version) == (epoch, version)
        assert harness.payloads() == [b"x"]

    def test_who_waits_for_changes_is_told_of_a_topic_without_records(self, harness):
        told: list[bool] = []
        harness.store.watch(lambda: told.append(True))
        version = harness.store.version
        change(harness, create_above=0)
        harness.flush()
        assert told and harness.store.version != version

    def test_the_next_life_of_a_topic_is_created_without_records(self, harness):
        harness.append(b"x")
        first = harness.topic().end
        change(harness, destroy=True)
        change(harness, create_above=0)
        harness.flush()
        for stage in stages(harness):
            topic = harness.topic()
            assert topic.exists and topic.epoch > first.epoch, stage
            assert topic.start[1:] == topic.end[1:] == first[1:], stage

    def test_a_topic_that_is_created_and_destroyed_at_once_is_gone(self, harness):
        change(harness, create_above=0)
        change(harness, destroy=True)
        harness.flush()
        for stage in stages(harness):
            assert not harness.topic().exists, stage
            assert harness.store.topics("", "", ALL) == [], stage

    # Ends

    def test_each_change_of_a_commit_learns_the_end_of_its_own_records(self, harness):
        first = ends(harness, b"1", b"22")
        harness.store.append({harness.topic(): [pack_record(b"other")]}, lambda: None)
        second = ends(harness, b"333")
        nothing = ends(harness, notes=[Note(b"key", b"value")])
        third = ends(harness, b"4", b"5", b"6")
        assert not (first or second or nothing or third)
        harness.flush()
        epoch, start, _ = harness.topic().start
        assert first == [Position(epoch, start + 11, 2)]
        assert second == nothing == [Position(epoch, start + 27, 4)]
        assert third == [Position(epoch, start + 42, 7)] == [harness.topic().end]
        assert ends(harness, b"7") != third
        harness.flush()

    def test_the_end_is_told_before_the_answer_and_when_it_can_be_read(self, harness):
        heard: list[object] = []
        harness.store.change(
            harness.topic(),
            records=[pack_record(b"x")],
            done=lambda: heard.append("done"),
            ends_at=lambda at: heard.append(at == harness.topic().end),
        )
        harness.flush()
        assert heard == [True, "done"]

    # Closing

    def test_a_closed_topic_takes_no_more_records(self, harness):
        close(harness, b"1", b"last")
        for stage in stages(harness):
            topic = harness.topic()
            assert topic.is_closed and harness.store.closed(["other", topic.name]) == topic.name
            record = [pack_record(b"late")]
            with pytest.raises(ClosedTopicError, match="is closed"):
                harness.store.append({topic: record}, lambda: None)
            with pytest.raises(ClosedTopicError):
                harness.store.append_once(topic, record, "p", 1, lambda _: None)
            with pytest.raises(ClosedTopicError):
                harness.store.change(topic, records=record, done=lambda: None)
            harness.flush()
            assert harness.payloads() == [b"1", b"last"], stage

    def test_it_is_closed_from_when_this_is_asked_and_other_topics_stay_open(self, harness):
        harness.append(b"x", name="other")
        assert harness.store.closed([harness.prefix + "other"]) == ""
        change(harness, b"last", close=True)
        with pytest.raises(ClosedTopicError):
            harness.store.append({harness.topic(): [pack_record(b"late")]}, lambda: None)
        assert harness.store.closed([harness.prefix + "other"]) == ""
        harness.append(b"y", name="other")
        assert harness.payloads() == [b"last"]
        assert harness.payloads(name="other") == [b"x", b"y"]

    def test_what_was_given_before_a_close_comes_before_its_records(self, harness):
        topic = harness.topic()
        harness.append(b"0")
        harness.store.append_once(topic, [pack_record(b"1")], "p", 1, lambda _: None)
        harness.store.append({topic: [pack_record(b"2")]}, lambda: None)
        end = ends(harness, b"last", close=True)
        harness.flush()
        assert harness.payloads() == [b"0", b"2", b"1", b"last"]
        assert end == [harness.topic().end]

    def test_a_topic_is_created_closed(self, harness):
        close(harness, create_above=0)
        for stage in stages(harness):
            assert harness.topic().exists and harness.topic().is_closed, stage

    @pytest.mark.parametrize("way", ["destroy", "change"])
    def test_the_next_life_of_a_closed_topic_is_open(self, harness, way):
        close(harness, b"last")
        if way == "destroy":
            harness.store.destroy(harness.topic(), lambda: None)
        else:
            change(harness, destroy=True)
        change(harness, b"new")
        harness.flush()
        for stage in stages(harness):
            assert harness.payloads() == [b"new"], stage
            assert not harness.topic().is_closed, stage
            assert listed(harness) == [], stage
        harness.append(b"more")
        assert harness.payloads() == [b"new", b"more"]

    def test_a_closed_topic_can_be_trimmed_and_keeps_notes(self, harness):
        close(harness, b"1", b"2")
        second = harness.read()[1]
        at = Position(harness.topic().epoch, *second[:2])
        change(harness, notes=[Note(b"key", b"value")], trim=at)
        harness.flush()
        for stage in stages(harness):
            assert harness.payloads() == [b"2"], stage
            assert harness.topic().is_closed, stage
