"""The plan of a replay: every record in one cut, the same cuts for any files, and where it continues."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.lake.format import RecordRange
from headrace.pipeline.replay import (
    CUT_BYTES,
    Course,
    TopicFile,
    Wanted,
    course,
    cuts,
    first_open,
    producer_of,
)
from headrace.pipeline.tasks import JobError

WANTED = Wanted("orders", "again", "", None, None, None, None)
JUMP = 1 << 32


def ranges(*ends: int, start: int = 0) -> list[RecordRange]:
    """Return contiguous ranges with one record for each ten bytes."""
    found = []
    for end in ends:
        found.append(RecordRange("orders", 1, start, end, start // 10, end // 10, 0))
        start = end
    return found


@given(
    st.lists(st.integers(1, 999), min_size=1, max_size=8),
    st.integers(0, 400),
    st.integers(0, 400),
    st.integers(1, 300),
    st.data(),
)
def test_every_offset_is_in_one_cut_that_has_its_file(sizes, begin, length, cut_bytes, data):
    ends = sorted(set(sizes))
    found = ranges(*ends)
    files = {f"file{data.draw(st.integers(0, 2))}": [] for _ in found}
    for one in found:
        files[data.draw(st.sampled_from(sorted(files)))].append(one)
    wanted = Course(begin, begin + length, cut_bytes)
    where: dict[int, tuple[str, ...]] = {}
    numbers = []
    for cut in cuts(files, wanted):
        numbers.append(cut.number)
        assert cut.offset == begin + cut.number * cut_bytes
        for offset in range(cut.offset, cut.end):
            assert offset not in where
            where[offset] = cut.files
    assert numbers == sorted(set(numbers))
    for offset in range(begin, min(begin + length, ends[-1])):
        (path,) = (
            path for path, some in files.items() for one in some if one.offset <= offset < one.end
        )
        assert path in where[offset]


def test_files_do_not_change_the_cuts_and_a_jump_makes_none():
    whole = ranges(100, 200)
    behind = [one._replace(offset=one.offset + JUMP, end=one.end + JUMP) for one in whole]
    wanted = Course(0, JUMP + 200, 64)
    many = {str(number): [one] for number, one in enumerate([*whole, *behind])}
    found = [(cut.number, cut.offset, cut.end) for cut in cuts(many, wanted)]
    together = {"one": [*whole, *behind]}
    assert found == [(cut.number, cut.offset, cut.end) for cut in cuts(together, wanted)]
    assert [number for number, _, _ in found] == [0, 1, 2, 3, *range(JUMP // 64, JUMP // 64 + 4)]
    assert [one.number for one in cuts(many, wanted, 3)][:2] == [3, JUMP // 64]


@given(st.integers(0, 10**12), st.integers(1, 10**6), st.data())
def test_it_goes_on_behind_the_last_that_was_decided(length, cut_bytes, data):
    wanted = Course(7, 7 + length, cut_bytes)
    count = -(-length // cut_bytes)
    done = data.draw(st.integers(0, count))
    asked = []

    def is_decided(number: int) -> bool:
        asked.append(number)
        return number < done

    assert first_open(wanted, is_decided) == done
    assert len(asked) <= 41


def files(
    some: list[RecordRange], since: int | None = None, until: int | None = None
) -> list[TopicFile]:
    """Return two files with these ranges; the first offsets at or after the times are in the second."""
    return [TopicFile("1", some[:1], None, None), TopicFile("2", some[1:], since, until)]


def test_a_course_is_a_range_of_offsets_or_times():
    some_ranges = ranges(100, 200, start=50)
    found = files(some_ranges)
    assert course(WANTED, found, None) == Course(50, 200, CUT_BYTES)
    some = WANTED._replace(from_offset=60, to_offset=120)
    assert course(some, found, None) == Course(60, 120, CUT_BYTES)
    times = WANTED._replace(since_ms=1, until_ms=2)
    assert course(times, files(some_ranges, since=70, until=90), None) == Course(70, 90, CUT_BYTES)
    # No record is as late as the end time.
    assert course(times, files(some_ranges, since=70), None) == Course(70, 200, CUT_BYTES)
    assert course(times, found, None) == Course(200, 200, CUT_BYTES)


def test_a_rate_makes_cuts_of_about_a_second():
    found = files(ranges(100, 200))
    assert course(WANTED, found, 3.0).cut_bytes == 30
    assert course(WANTED, found, 0.001).cut_bytes == 1
    assert course(WANTED, found, 1e12).cut_bytes == CUT_BYTES


@pytest.mark.parametrize("given", [{"from_offset": 0}, {"to_offset": 201}])
def test_what_the_lake_does_not_have_is_refused(given):
    with pytest.raises(
        JobError, match="has topic 'orders' from offset 50 to 200, which is not all"
    ):
        course(WANTED._replace(**given), files(ranges(200, start=50)), None)


def test_a_replay_is_known_by_all_that_it_does():
    wanted = Course(0, 10, 5)
    others = [
        producer_of("id", WANTED, wanted),
        producer_of("other", WANTED, wanted),
        producer_of("id", WANTED._replace(topic="x"), wanted),
        producer_of("id", WANTED._replace(target="x"), wanted),
        producer_of("id", WANTED._replace(name="x"), wanted),
        producer_of("id", WANTED, Course(1, 10, 5)),
        producer_of("id", WANTED, Course(0, 11, 5)),
        producer_of("id", WANTED, Course(0, 10, 6)),
    ]
    assert len(set(others)) == len(others)
    assert len({WANTED.key, *(WANTED._replace(**{name: "5"}).key for name in WANTED._fields)}) == 8
    assert all(len(one) < 64 for one in others)
    assert CUT_BYTES == 64 << 20
