"""Promises of every topic store, as tests: the test class of a durability inherits them.

The harness starts the store, lets it finish what was asked of it, and stops it in several ways. The tests
know nothing else about the store: neither files nor journals.
"""

import pytest

from headrace.errors import BadCursorError, BadReaderNameError
from headrace.log.records import pack_record
from headrace.log.store import CURSORS_SET_MAX, Store, StoredAppend, Topic
from headrace.model import Durability, Position
from tests.fakes.store import RecordingListener
from tests.log.conftest import Open

PAYLOADS = [b"first", b"", b"x" * 300, b"fourth", b"\0" * 8, b"the last of them"]
"""Payloads that are short, empty, longer than a segment of the tests, or similar to a record's size field."""


class Harness:
    """A store, for tests of topics with one durability."""

    def __init__(self, open_store: Open, durability: Durability) -> None:
        self._open = open_store
        self._steps = open_store()
        self.prefix = "" if durability is Durability.SYNCED else f"{durability}/"
        """Prefix of topic names that gives topics the durability under test."""
        self.persistent = durability is not Durability.MEMORY
        """True if topics survive a restart of the store."""

    @property
    def store(self) -> Store:
        return self._steps.store

    def flush(self) -> None:
        """Wait until everything that was asked is done and answered."""
        self._steps.runner.run()

    def settle(self) -> None:
        """Flush, and let the store move everything to its final place."""
        self._steps.settle()

    def wait(self, ms: int) -> None:
        """Let time pass."""
        self._steps.clock.ms += ms

    def restart(self, *, clean: bool) -> None:
        """Stop the store cleanly or kill it, then start it again."""
        clock = self._steps.clock
        if clean:
            self._steps.close()
        self._steps = self._open(clock=clock)
        assert self._steps.reports == []

    # Operations for the tests

    def topic(self, name: str = "topic") -> Topic:
        return self.store.topic(self.prefix + name)

    def append(self, *payloads: bytes, name: str = "topic") -> None:
        done: list[bool] = []
        records = [pack_record(payload) for payload in payloads]
        self.store.append({self.topic(name): records}, lambda: done.append(True))
        self.flush()
        assert done == [True], "every append is answered, once"

    def append_once(
        self, producer: str, number: int, *payloads: bytes, name: str = "topic"
    ) -> StoredAppend:
        answers: list[StoredAppend] = []
        records = [pack_record(payload) for payload in payloads]
        self.store.append_once(self.topic(name), records, producer, number, answers.append)
        self.flush()
        assert len(answers) == 1, "every append is answered, once"
        return answers[0]

    def trim(self, position: Position, name: str = "topic") -> None:
        done: list[bool] = []
        self.store.trim(self.topic(name), position, lambda: done.append(True))
        self.flush()
        assert done == [True]

    def destroy(self, name: str = "topic") -> None:
        done: list[bool] = []
        self.store.destroy(self.topic(name), lambda: done.append(True))
        self.flush()
        assert done == [True]

    def set_cursors(self, reader: str, positions: dict[str, Position]) -> None:
        done: list[bool] = []
        named = {self.prefix + name: at for name, at in positions.items()}
        self.store.set_cursors(reader, named, lambda: done.append(True))
        assert done == [], "nobody is told before it is on disk"
        self.flush()
        assert done == [True], "every change of cursors is answered, once"

    def drop_cursors(self, reader: str, *names: str) -> None:
        done: list[bool] = []
        named = [self.prefix + name for name in names]
        self.store.drop_cursors(reader, named, lambda: done.append(True))
        self.flush()
        assert done == [True]

    def cursors(self, **which: str) -> list[tuple[str, str, Position]]:
        """Return topic without its prefix, reader and position of each cursor."""
        if "topic" in which:
            which["topic"] = self.prefix + which["topic"]
        return [
            (one.topic.removeprefix(self.prefix), one.reader, one.position)
            for one in self.store.cursors(**which, limit=CURSORS_SET_MAX)
        ]

    def read(
        self, offset: int = 0, *, name: str = "topic", bytes_max: int = 1 << 16
    ) -> list[tuple[int, int, bytes]]:
        """Return start offset, ordinal and payload of every record from an offset on."""
        found = self._steps.content(self.prefix + name, offset, bytes_max)
        return [(at, ordinal, payload) for at, (ordinal, payload) in found.items()]

    def payloads(self, offset: int = 0, *, name: str = "topic") -> list[bytes]:
        return [payload for _, _, payload in self.read(offset, name=name)]


class StoreContract:
    """Tests of a store. A subclass provides a `harness` fixture."""

    # Appending and reading

    def test_a_topic_that_was_never_made_is_empty_and_does_not_exist(self, harness):
        topic = harness.topic()
        assert not topic.exists
        assert topic.start == topic.end
        assert harness.read() == []
        assert harness.store.topics(harness.prefix, "", 10) == []

    def test_what_was_appended_is_read_in_order(self, harness):
        for payload in PAYLOADS:
            harness.append(payload)
        assert harness.payloads() == PAYLOADS

    def test_records_of_one_append_stay_together_and_in_order(self, harness):
        topic = harness.topic()
        harness.store.append({topic: [pack_record(b"a"), pack_record(b"b")]}, lambda: None)
        harness.store.append({topic: [pack_record(b"c")]}, lambda: None)
        harness.flush()
        assert harness.payloads() == [b"a", b"b", b"c"]

    def test_offsets_are_byte_positions_and_ordinals_count_records(self, harness):
        harness.append(*PAYLOADS)
        start = harness.topic().start
        begin = start.offset
        for number, (offset, ordinal, payload) in enumerate(harness.read()):
            assert (offset, ordinal) == (begin, start.ordinal + number)
            begin += 4 + len(payload)
        assert harness.topic().end[1:] == (begin, start.ordinal + len(PAYLOADS))

    def test_topics_do_not_mix(self, harness):
        harness.append(b"a1", name="a")
        harness.append(b"b1", name="b")
        harness.append(b"a2", name="a")
        harness.settle()
        assert harness.payloads(name="a") == [b"a1", b"a2"]
        assert harness.payloads(name="b") == [b"b1"]

    def test_nothing_is_shown_before_it_is_committed(self, harness):
        topic = harness.topic()
        done = []
        harness.store.append({topic: [pack_record(b"early")]}, lambda: done.append(True))
        assert not done
        assert topic.start == topic.end
        assert harness.read() == []
        harness.flush()
        assert done
        assert harness.payloads() == [b"early"]

    def test_the_listener_hears_of_each_append_when_it_is_readable(self, harness):
        listener = harness.store.listener = RecordingListener()
        harness.append(b"one", b"two")
        harness.append(b"three")
        name = harness.prefix + "topic"
        start = harness.topic().start_offset
        assert [(one.topic.name, one.offset, one.records) for one in listener.appended] == [
            (name, start, [pack_record(b"one"), pack_record(b"two")]),
            (name, start + 14, [pack_record(b"three")]),
        ]
        assert listener.prepared == listener.appended

    def test_reading_is_the_same_wherever_records_lie(self, harness):
        for payload in PAYLOADS:
            harness.append(payload)
        before = harness.read()
        harness.settle()
        assert harness.read() == before
        harness.append(b"more")
        assert harness.payloads() == [*PAYLOADS, b"more"]

    @pytest.mark.parametrize("bytes_max", [1, 20, 1000])
    def test_reads_of_any_size_and_from_any_record_give_the_same(self, harness, bytes_max):
        for number in range(20):
            harness.append(b"%d" % number * number)
            if number == 10:
                harness.settle()
        everything = harness.read()
        for number, (offset, _, _) in enumerate(everything):
            assert harness.read(offset, bytes_max=bytes_max) == everything[number:]

    def test_a_reader_goes_on_when_there_is_more(self, harness):
        harness.append(b"one")
        reader = harness.store.reader(harness.topic())
        first = reader.read(harness.topic().start_offset, 1000)
        harness.settle()
        harness.append(b"two")
        second = reader.read(first.next_offset, 1000)
        assert [run.data for run in first.runs + second.runs] == [
            pack_record(b"one"),
            pack_record(b"two"),
        ]
        assert second.lost == 0
        assert reader.read(second.next_offset, 1000).runs == []

    def test_the_largest_payload_comes_back(self, harness):
        large = b"large" * 52_428 + b"1234"
        harness.append(b"before")
        harness.append(large)
        harness.append(b"after")
        harness.settle()
        assert harness.payloads() == [b"before", large, b"after"]

    # Finding a position

    def test_every_offset_is_answered_with_the_next_boundary(self, harness):
        for number, payload in enumerate(PAYLOADS):
            harness.append(payload)
            if number == 2:
                harness.settle()
        topic, store = harness.topic(), harness.store
        boundaries = [(offset, ordinal) for offset, ordinal, _ in harness.read()]
        boundaries.append(topic.end[1:])
        for offset in range(topic.start_offset, topic.end_offset + 1):
            wanted = next(boundary for boundary in boundaries if boundary[0] >= offset)
            assert store.locate_offset(topic, offset)[1:] == wanted

    def test_an_offset_past_the_end_is_the_end(self, harness):
        harness.append(*PAYLOADS)
        for beyond in (1, 1 << 40, (1 << 64) - 1 - harness.topic().end_offset):
            found = harness.store.locate_offset(
                harness.topic(), harness.topic().end_offset + beyond
            )
            assert found == harness.topic().end

    def test_every_ordinal_is_found(self, harness):
        for number, payload in enumerate(PAYLOADS):
            harness.append(payload)
            if number == 2:
                harness.settle()
        topic, store = harness.topic(), harness.store
        for offset, ordinal, _ in harness.read():
            assert store.locate_ordinal(topic, ordinal)[1:] == (offset, ordinal)
        assert store.locate_ordinal(topic, topic.end_ordinal) == topic.end
        assert store.locate_ordinal(topic, 1 << 62) == topic.end
        assert store.locate_ordinal(topic, 0) == topic.start

    def test_a_time_is_found_at_its_first_record(self, harness):
        store = harness.store
        moments = []
        for number in range(6):
            harness.wait(1000)
            moments.append((harness.topic().end_ordinal, number))
            harness.append(b"%d" % number)
            if number == 3:
                harness.settle()
        topic = harness.topic()
        times = [run.ms for run in self._runs(harness)]
        assert times == sorted(times)
        for ms, (ordinal, _) in zip(times, moments, strict=True):
            assert store.locate_time(topic, ms).ordinal == ordinal
            assert store.locate_time(topic, ms - 500).ordinal == ordinal
        assert store.locate_time(topic, 0) == topic.start
        assert store.locate_time(topic, times[-1] + 1) == topic.end
        assert topic.last_ms == times[-1]

    def test_times_never_decrease_when_the_clock_does(self, harness):
        for step in (5000, -3000, 200, -10, 4000):
            harness.append(b"x")
            harness.wait(step)
        harness.append(b"x")
        harness.settle()
        times = [run.ms for run in self._runs(harness)]
        assert times == sorted(times)

    # Trimming

    def test_what_was_trimmed_is_not_read_any_more(self, harness):
        for payload in PAYLOADS:
            harness.append(payload)
        everything = harness.read()
        for offset, ordinal, _ in everything[1:4]:
            harness.trim(Position(harness.topic().epoch, offset, ordinal))
            assert harness.topic().start[1:] == (offset, ordinal)
            assert harness.read() == [one for one in everything if one[0] >= offset]
            harness.settle()
            assert harness.read() == [one for one in everything if one[0] >= offset]

    def test_an_old_offset_is_answered_with_the_oldest_record(self, harness):
        harness.append(*PAYLOADS)
        offset, ordinal, _ = harness.read()[3]
        harness.trim(Position(harness.topic().epoch, offset, ordinal))
        topic, store = harness.topic(), harness.store
        assert store.locate_offset(topic, 0) == topic.start
        assert store.locate_ordinal(topic, 0) == topic.start
        assert store.locate_time(topic, 0) == topic.start
        chunk = store.reader(topic).read(0, 1 << 16)
        assert chunk.runs[0].offset == offset

    def test_trimming_backwards_changes_nothing(self, harness):
        harness.append(*PAYLOADS)
        positions = [Position(harness.topic().epoch, *one[:2]) for one in harness.read()]
        harness.trim(positions[3])
        harness.trim(positions[1])
        assert harness.topic().start == positions[3]

    def test_a_topic_that_was_trimmed_to_its_end_goes_on_there(self, harness):
        harness.append(*PAYLOADS)
        end = harness.topic().end
        harness.trim(end)
        harness.settle()
        assert harness.topic().exists
        assert harness.topic().start == harness.topic().end == end
        harness.append(b"next")
        assert harness.read() == [(end.offset, end.ordinal, b"next")]

    # Destroying

    def test_a_destroyed_topic_is_gone(self, harness):
        harness.append(*PAYLOADS)
        harness.append(b"other", name="other")
        harness.destroy()
        assert not harness.topic().exists
        assert harness.read() == []
        names = [topic.name for topic in harness.store.topics(harness.prefix, "", 10)]
        assert names == [harness.prefix + "other"]

    @pytest.mark.parametrize("settled", [False, True])
    def test_a_new_life_starts_where_the_last_one_ended(self, harness, settled):
        harness.append(*PAYLOADS)
        end = harness.topic().end
        harness.destroy()
        if settled:
            harness.settle()
        harness.append(b"new")
        assert harness.read() == [(end.offset, end.ordinal, b"new")]
        assert harness.topic().epoch > end.epoch
        harness.settle()
        assert harness.read() == [(end.offset, end.ordinal, b"new")]

    def test_appends_asked_for_after_a_destruction_belong_to_the_next_life(self, harness):
        harness.append(b"old")
        topic = harness.topic()
        harness.store.append({topic: [pack_record(b"still old")]}, lambda: None)
        harness.store.destroy(topic, lambda: None)
        harness.store.append({topic: [pack_record(b"new")]}, lambda: None)
        harness.flush()
        assert harness.payloads() == [b"new"]
        harness.settle()
        assert harness.payloads() == [b"new"]

    def test_a_life_of_every_length_can_follow_another(self, harness):
        ends = []
        for _ in range(4):
            harness.append(b"a life")
            ends.append(harness.topic().end)
            harness.destroy()
            harness.settle()
        assert [end.offset for end in ends] == sorted({end.offset for end in ends})
        assert [end.epoch for end in ends] == sorted({end.epoch for end in ends})

    # Many topics

    def test_topics_are_listed_in_the_order_of_their_bytes(self, harness):
        names = ["b", "a", "é", "z", "a/2", "a/10", "日本", "B"]
        for number, name in enumerate(names):
            harness.append(b"x", name=name)
            if number == 4:
                harness.settle()
        sorted_names = [harness.prefix + name for name in sorted(names, key=str.encode)]
        listed = harness.store.topics(harness.prefix, "", 100)
        assert [topic.name for topic in listed] == sorted_names
        under = [name for name in sorted_names if name.startswith(harness.prefix + "a")]
        found = harness.store.topics(harness.prefix + "a", "", 100)
        assert [topic.name for topic in found] == under

    @pytest.mark.parametrize("settled", [False, True])
    def test_a_list_in_pages_misses_nothing(self, harness, settled):
        for number in range(7):
            harness.append(b"x", name=f"{number}")
        harness.settle()
        for number in (0, 1, 4):
            harness.destroy(name=f"{number}")
        harness.append(b"x", name="22")
        if settled:
            harness.settle()
        after, names = "", []
        while page := harness.store.topics(harness.prefix, after, 2):
            names += [topic.name.removeprefix(harness.prefix) for topic in page]
            after = page[-1].name
        assert names == ["2", "22", "3", "5", "6"]

    def test_a_handle_nobody_holds_can_be_forgotten_at_any_time(self, harness):
        topic = harness.topic()
        harness.store.forget(topic)
        assert not harness.topic().exists
        topic = harness.topic()
        harness.store.append({topic: [pack_record(b"on its way")]}, lambda: None)
        harness.store.forget(topic)
        harness.append(b"second")
        assert harness.payloads() == [b"on its way", b"second"]
        end = harness.topic().end
        harness.destroy()
        harness.store.forget(harness.topic())
        assert not harness.topic().exists
        harness.append(b"third")
        assert harness.read() == [(end.offset, end.ordinal, b"third")]
        harness.settle()
        assert harness.read() == [(end.offset, end.ordinal, b"third")]

    # Idempotence

    def test_a_number_is_stored_once(self, harness):
        first = harness.append_once("p", 1, b"one", b"two")
        assert first == StoredAppend(harness.topic().end_offset, duplicate=False)
        again = harness.append_once("p", 1, b"one", b"two")
        assert again == StoredAppend(first.offset, duplicate=True)
        harness.settle()
        assert harness.append_once("p", 1, b"one", b"two") == again
        assert harness.payloads() == [b"one", b"two"]

    def test_a_lower_number_is_a_duplicate_and_a_higher_one_is_new(self, harness):
        harness.append_once("p", 5, b"five")
        assert harness.append_once("p", 3, b"three") == StoredAppend(None, duplicate=True)
        assert not harness.append_once("p", 9, b"nine").duplicate
        assert harness.payloads() == [b"five", b"nine"]

    def test_producers_and_topics_are_told_apart(self, harness):
        assert not harness.append_once("p", 1, b"a").duplicate
        assert not harness.append_once("q", 1, b"b").duplicate
        assert not harness.append_once("p", 1, b"c", name="other").duplicate

    def test_an_append_that_comes_again_while_it_is_written_is_answered_with_it(self, harness):
        answers = []
        topic = harness.topic()
        for _ in range(3):
            harness.store.append_once(topic, [pack_record(b"x")], "p", 1, answers.append)
        assert answers == []
        harness.flush()
        end = harness.topic().end_offset
        assert answers == [
            StoredAppend(end, False),
            StoredAppend(end, True),
            StoredAppend(end, True),
        ]
        assert harness.payloads() == [b"x"]

    def test_numbered_and_plain_appends_keep_their_order(self, harness):
        topic = harness.topic()
        store = harness.store
        store.append({topic: [pack_record(b"plain")]}, lambda: None)
        store.append_once(topic, [pack_record(b"numbered")], "p", 1, lambda _: None)
        harness.flush()
        store.append_once(topic, [pack_record(b"numbered 2")], "p", 2, lambda _: None)
        harness.flush()
        harness.append(b"plain 2")
        assert harness.payloads() == [b"plain", b"numbered", b"numbered 2", b"plain 2"]
        ordinals = [ordinal for _, ordinal, _ in harness.read()]
        assert ordinals == list(range(ordinals[0], ordinals[0] + 4))

    def test_numbers_outlive_trim_and_destruction(self, harness):
        harness.append_once("p", 1, b"one")
        harness.trim(harness.topic().end)
        harness.settle()
        assert harness.append_once("p", 1, b"one").duplicate
        harness.destroy()
        harness.settle()
        assert harness.append_once("p", 1, b"one").duplicate
        assert not harness.append_once("p", 2, b"two").duplicate

    # Restarting

    @pytest.mark.parametrize("settled", [False, True])
    @pytest.mark.parametrize("clean", [False, True])
    def test_records_outlive_the_store(self, harness, clean, settled):
        for payload in PAYLOADS:
            harness.append(payload)
        before, topic = harness.read(), harness.topic()
        span = topic.start, topic.end, topic.last_ms
        if settled:
            harness.settle()
        harness.restart(clean=clean)
        self._skip_unless_persistent(harness)
        topic = harness.topic()
        assert (topic.start, topic.end, topic.last_ms) == span
        assert harness.read() == before
        harness.append(b"more")
        assert harness.read() == [*before, (span[1].offset, span[1].ordinal, b"more")]

    @pytest.mark.parametrize("settled", [False, True])
    @pytest.mark.parametrize("clean", [False, True])
    def test_trims_and_destructions_outlive_the_store(self, harness, clean, settled):
        harness.append(*PAYLOADS)
        harness.append(*PAYLOADS, name="other")
        offset, ordinal, _ = harness.read()[2]
        harness.trim(Position(harness.topic().epoch, offset, ordinal))
        end = harness.topic("other").end
        harness.destroy(name="other")
        if settled:
            harness.settle()
        harness.restart(clean=clean)
        self._skip_unless_persistent(harness)
        assert harness.topic().start[1:] == (offset, ordinal)
        assert harness.payloads() == PAYLOADS[2:]
        assert not harness.topic("other").exists
        assert harness.topic("other").end[1:] == end[1:]
        harness.append(b"new", name="other")
        assert harness.read(name="other") == [(end.offset, end.ordinal, b"new")]
        assert harness.topic("other").epoch > end.epoch

    @pytest.mark.parametrize("settled", [False, True])
    @pytest.mark.parametrize("clean", [False, True])
    def test_numbers_outlive_the_store(self, harness, clean, settled):
        stored = harness.append_once("p", 7, b"seven")
        if settled:
            harness.settle()
        harness.restart(clean=clean)
        self._skip_unless_persistent(harness)
        assert harness.append_once("p", 7, b"seven") == StoredAppend(stored.offset, duplicate=True)
        assert harness.append_once("p", 6, b"six").duplicate
        assert not harness.append_once("p", 8, b"eight").duplicate
        assert harness.payloads() == [b"seven", b"eight"]

    # Cursors

    def test_a_reader_s_place_is_kept(self, harness):
        harness.append(*PAYLOADS)
        end = harness.topic().end
        harness.wait(500)
        harness.set_cursors("group:a", {"topic": end})
        assert harness.cursors() == [("topic", "group:a", end)]
        (one,) = harness.store.cursors(limit=1)
        assert one.ms >= harness.topic().last_ms + 500

    @pytest.mark.parametrize("settled", [False, True])
    @pytest.mark.parametrize("clean", [False, True])
    def test_cursors_outlive_the_store(self, harness, clean, settled):
        """This includes cursors of topics that do not outlive the store."""
        harness.append(*PAYLOADS)
        harness.append(b"x", name="other")
        places = {"topic": harness.topic().start, "other": harness.topic("other").end}
        harness.set_cursors("a", places)
        harness.set_cursors("b", places)
        harness.set_cursors("a", {"topic": harness.topic().end})
        harness.drop_cursors("b", "other")
        before = harness.cursors()
        assert len(before) == 3
        if settled:
            harness.settle()
        assert harness.cursors() == before
        harness.restart(clean=clean)
        assert harness.cursors() == before

    def test_cursors_are_listed_by_topic_and_by_reader(self, harness):
        for name in ("t1", "t2", "t3"):
            harness.append(b"x", name=name)
        for reader in ("b", "é", "a"):
            harness.set_cursors(
                reader, {name: harness.topic(name).end for name in ("t3", "t1", "t2")}
            )
        harness.drop_cursors("b", "t2")
        assert [one[:2] for one in harness.cursors(topic="t2")] == [("t2", "a"), ("t2", "é")]
        assert [one[:2] for one in harness.cursors(reader="b")] == [("t1", "b"), ("t3", "b")]
        assert [one[:2] for one in harness.cursors(topic="t1", reader="b")] == [("t1", "b")]
        assert harness.cursors(topic="t2", reader="b") == []
        assert harness.cursors(topic="nope") == harness.cursors(reader="nope") == []

    @pytest.mark.parametrize("which", [{}, {"topic": "t2"}, {"reader": "a"}])
    def test_pages_of_cursors_make_up_the_whole(self, harness, which):
        for name in ("t1", "t2", "t3"):
            harness.append(b"x", name=name)
            for reader in ("a", "b", "c"):
                harness.set_cursors(reader, {name: harness.topic(name).end})
        whole = harness.cursors(**which)
        if "topic" in which:
            which = {"topic": harness.prefix + which["topic"]}
        pages, after = [], ("", "")
        while page := harness.store.cursors(**which, after=after, limit=2):
            pages += page
            after = (page[-1].topic, page[-1].reader)
        assert [(one.topic.removeprefix(harness.prefix), one.reader) for one in pages] == [
            one[:2] for one in whole
        ]

    def test_a_cursor_may_go_back(self, harness):
        harness.append(*PAYLOADS)
        for at in (harness.topic().end, harness.topic().start):
            harness.set_cursors("a", {"topic": at})
        assert harness.cursors() == [("topic", "a", harness.topic().start)]

    def test_what_is_asked_together_is_done_in_order(self, harness):
        harness.append(*PAYLOADS)
        start, end = harness.topic().start, harness.topic().end
        name = harness.topic().name
        for at in (start, end):
            harness.store.set_cursors("a", {name: at}, lambda: None)
        harness.store.set_cursors("b", {name: at}, lambda: None)
        harness.store.drop_cursors("b", [name], lambda: None)
        harness.flush()
        assert harness.cursors() == [("topic", "a", end)]
        harness.settle()
        harness.restart(clean=True)
        assert harness.cursors() == [("topic", "a", end)]

    @pytest.mark.parametrize("settled", [False, True])
    def test_a_cursor_outlives_the_topic(self, harness, settled):
        harness.append(*PAYLOADS)
        at = harness.topic().start
        harness.set_cursors("a", {"topic": at})
        harness.destroy()
        if settled:
            harness.settle()
        assert harness.cursors() == [("topic", "a", at)]
        harness.append(b"new")
        assert harness.cursors(topic="topic") == [("topic", "a", at)]

    def test_a_name_without_a_topic_has_cursors_where_one_would_begin(self, harness):
        start = harness.topic("not yet").start
        harness.set_cursors("a", {"not yet": start})
        assert harness.cursors() == [("not yet", "a", start)]
        assert not harness.topic("not yet").exists

    def test_a_place_that_no_topic_gave_is_refused(self, harness):
        harness.append(*PAYLOADS)
        end = harness.topic().end
        for bad in (
            end._replace(offset=end.offset + 1),
            end._replace(ordinal=end.ordinal + 1),
            end._replace(epoch=end.epoch + 1),
            end._replace(offset=(1 << 64) - 1),
        ):
            with pytest.raises(BadCursorError):
                harness.set_cursors("a", {"other": harness.topic("other").end, "topic": bad})
            assert harness.cursors() == [], "all or none"

    @pytest.mark.parametrize("name", ["", "x" * 256, "é" * 128, "\ud800"])
    def test_a_name_that_no_reader_can_have_is_refused(self, harness, name):
        with pytest.raises(BadReaderNameError):
            harness.set_cursors(name, {"topic": harness.topic().end})

    def test_dropping_what_is_not_there_is_harmless(self, harness):
        harness.append(b"x")
        harness.set_cursors("a", {"topic": harness.topic().end})
        harness.drop_cursors("b", "topic")
        harness.drop_cursors("a", "other")
        assert len(harness.cursors()) == 1
        harness.restart(clean=True)
        assert len(harness.cursors()) == 1

    # The version

    def test_the_version_changes_with_the_topics_and_with_nothing_else(self, harness):
        told: list[int] = []
        harness.store.watch(lambda: told.append(harness.store.version))
        seen = [harness.store.version]

        def changed() -> bool:
            seen.append(harness.store.version)
            assert told == sorted(set(told))
            return seen[-1] > seen[-2] and told[-1] == seen[-1]

        harness.append(*PAYLOADS)
        assert changed()
        harness.append_once("p", 1, b"once")
        assert changed()
        harness.append_once("p", 1, b"once")
        assert not changed()
        harness.set_cursors("a", {"topic": harness.topic().end})
        harness.settle()
        assert not changed()
        harness.trim(harness.store.locate_ordinal(harness.topic(), 2))
        assert changed()
        harness.destroy()
        assert changed()

    def test_a_version_does_not_come_again(self, harness):
        harness.append(b"x")
        before = harness.store.version
        harness.wait(1)
        harness.restart(clean=True)
        assert harness.store.version > before

    def test_a_store_starts_empty_after_topics_in_memory(self, harness):
        harness.append(*PAYLOADS)
        harness.append_once("p", 1, b"numbered", name="other")
        harness.restart(clean=True)
        if harness.persistent:
            pytest.skip("does not apply: these topics outlive the store")
        assert not harness.topic().exists
        assert not harness.topic("other").exists
        assert harness.store.topics("", "", 10) == []

    def _runs(self, harness):
        topic = harness.topic()
        reader, at, runs = harness.store.reader(topic), topic.start_offset, []
        while at < topic.end_offset:
            chunk = reader.read(at, 1)
            runs += chunk.runs
            at = chunk.next_offset
        return runs

    def _skip_unless_persistent(self, harness):
        if not harness.persistent:
            pytest.skip("does not apply: these topics end with the store")
