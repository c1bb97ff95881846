"""Conclusions of an audit from three accounts of a topic, and their wording. Opens no files."""

from itertools import pairwise

from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from headrace.log.verify.checks import VerifiedRange
from headrace.model import JUMP
from headrace.pipeline.audit.plan import (
    LINES_MAX,
    AuditReport,
    Finding,
    Held,
    TopicAudit,
    common,
    compare,
    cover,
    joined_ranges,
    without,
)

DATA = bytes(range(200)) * 2
"""Bytes of a topic with records of ten bytes each."""


def part(offset: int, end: int, more: int = 0) -> VerifiedRange:
    return VerifiedRange(offset + more, end + more, offset // 10 + more, end // 10 + more)


def held(offset: int, end: int, file: str = "f", epoch: int = 1, crc: int | None = None) -> Held:
    crc = crc32c(DATA[offset:end]) if crc is None else crc
    return Held(epoch, part(offset, end), file, crc)


def found(
    noted: list[Held], files: list[Held], **flags: bool
) -> list[tuple[str, VerifiedRange | None]]:
    findings = list(compare("t", noted, files, **flags))
    assert all(one.topic == "t" for one in findings)
    return [(f"{one.kind}: {one.reason}", one.range) for one in findings]


CUTS = st.lists(st.integers(1, 39), max_size=6, unique=True).map(sorted)


def cut(places: list[int]) -> list[Held]:
    edges = [0, *(10 * place for place in places), 400]
    return [held(one, other) for one, other in pairwise(edges)]


@given(CUTS, CUTS)
def test_what_is_cut_differently_is_the_same(noted, files):
    assert found(cut(noted), cut(files)) == []


@given(CUTS, CUTS, st.data())
def test_a_wrong_checksum_is_found_however_it_is_cut(noted, files, data):
    ours, theirs = cut(noted), cut(files)
    at = data.draw(st.integers(0, len(theirs) - 1))
    bad = theirs[at]
    theirs[at] = bad._replace(crc=bad.crc ^ 1)
    ((reason, where),) = found(ours, theirs)
    assert reason == "damaged: the file has another checksum than the manifest of its batch"
    assert where is not None
    assert where.offset <= bad.range.offset < bad.range.end <= where.end


@given(CUTS, CUTS, st.data())
def test_what_no_file_has_is_named_exactly(noted, files, data):
    theirs = cut(files)
    gone = theirs.pop(data.draw(st.integers(0, len(theirs) - 1)))
    (only,) = found(cut(noted), theirs)
    assert only == ("missing: no file of the lake has these rows", gone.range)


def test_rows_that_are_there_twice_are_found():
    files = [held(0, 100, "a"), held(100, 300, "b"), held(200, 400, "c")]
    (twice,) = list(compare("t", [held(0, 400)], files))
    assert twice.reason == "these rows are in the lake twice"
    assert (twice.file, twice.range) == ("b and c", part(200, 300))
    noted = [held(0, 200), held(0, 200), held(200, 400)]
    assert found(noted, [held(0, 400)]) == [
        ("damaged: two batches have written these records", part(0, 200))
    ]


def test_rows_that_nobody_has_noted_are_found_unless_some_notes_are_damaged():
    noted, files = [held(0, 100)], [held(0, 100), held(100, 200)]
    assert found(noted, files) == [
        ("damaged: no manifest of a batch names these rows", part(100, 200))
    ]
    assert found(noted, files, all_noted=False) == []


def test_other_ordinals_are_found():
    wrong = Held(1, VerifiedRange(0, 100, 1, 11), "f", held(0, 100).crc)
    assert found([held(0, 100)], [wrong]) == [
        ("damaged: the file has other ordinals than the manifest of its batch", part(0, 100))
    ]


# Coverage


def spans(*ranges: VerifiedRange, epoch: int = 1) -> list[Held]:
    return [Held(epoch, one) for one in ranges]


def missing(lake: list[Held], log: list[Held]) -> list[tuple[str, VerifiedRange | None]]:
    return [(one.reason, one.range) for one in cover("t", lake, log).findings]


def is_covered(lake: list[Held], log: list[Held]) -> bool:
    found = cover("t", lake, log)
    return not found.findings and not found.notes


def test_lake_and_log_that_touch_or_overlap_cover_everything():
    lake = spans(part(0, 100), part(100, 200))
    for log in ([], spans(part(200, 300)), spans(part(50, 300)), spans(part(0, 200))):
        assert is_covered(lake, log)
    assert is_covered([], spans(part(0, 200)))


def test_a_gap_between_lake_and_log_is_missing():
    assert missing(spans(part(0, 100)), spans(part(150, 300))) == [
        ("neither the log nor the lake has these records", part(100, 150))
    ]


def test_what_a_log_has_forgotten_to_its_end_is_missing():
    empty = VerifiedRange(300, 300, 30, 30)
    [(_, gone)] = missing([Held(1, VerifiedRange(0, 100, 0, 10))], spans(empty))
    assert gone == VerifiedRange(100, 300, 10, 30)
    assert missing([Held(1, VerifiedRange(0, 300, 0, 30))], spans(empty)) == []


def test_a_gap_in_the_lake_is_missing_and_it_is_said_whether_the_log_has_it():
    lake = spans(part(0, 100), part(200, 300))
    neither, only_log = (
        "neither the log nor the lake has these records",
        "the lake does not have these records, the log still has",
    )
    assert missing(lake, []) == [(neither, part(100, 200))]
    assert missing(lake, spans(part(0, 400))) == [(only_log, part(100, 200))]
    assert missing(lake, spans(part(150, 400))) == [
        (neither, part(100, 150)),
        (only_log, part(150, 200)),
    ]


def test_a_jump_is_no_gap():
    jumped = Held(2, part(100, 200, more=JUMP))
    assert is_covered([*spans(part(0, 100)), jumped], [])
    assert is_covered(spans(part(0, 100)), [jumped])
    twice = Held(2, part(100, 200, more=2 * JUMP))
    assert is_covered(spans(part(0, 100)), [twice])
    # By offsets alone, this range could be anything.
    other = Held(2, VerifiedRange(100 + JUMP, 200 + JUMP, 10, 20))
    assert missing(spans(part(0, 100)), [other]) != []


def test_what_only_the_lake_has_behind_a_crash_is_a_note():
    log = [*spans(part(0, 60), epoch=2), Held(2, part(60, 200, more=JUMP))]
    coverage = cover("t", spans(part(0, 100)), log)
    assert coverage.findings == []
    assert "4 records at offsets 60 to 100 are in the lake only" in coverage.notes[0]
    coverage = cover("t", spans(part(0, 100)), spans(part(0, 60)))
    assert coverage.findings == []
    assert "4 records at offsets 60 to 100 are in the lake only" in coverage.notes[0]
    assert cover("t", spans(part(0, 100)), spans(part(0, 60)), is_later=True).notes == []


def test_a_topic_that_started_over_is_a_note():
    lake = [*spans(part(0, 100)), *spans(part(0, 50), epoch=2)]
    coverage = cover("t", lake, [])
    assert coverage.findings == []
    assert "as topics of durability memory do" in coverage.notes[0]


def test_ranges_are_joined_where_they_touch_or_overlap():
    assert joined_ranges([part(100, 200), part(0, 100), part(50, 120)]) == [part(0, 200)]
    assert joined_ranges([part(0, 50), part(60, 100)]) == [part(0, 50), part(60, 100)]
    assert without([part(20, 80)], [part(0, 50), part(50, 100)]) == []
    assert without([part(20, 80)], [part(60, 100), part(0, 50)]) == [part(50, 60)]
    assert without([part(0, 100), part(200, 300)], [part(20, 40), part(50, 250)]) == [
        *(part(0, 20), part(40, 50), part(250, 300)),
    ]
    assert common([part(0, 50), part(60, 100)], [part(20, 70)]) == [part(20, 50), part(60, 70)]


RANGES = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=6).map(
    lambda found: [part(10 * begin, 10 * (begin + size)) for begin, size in found]
)


@given(RANGES, RANGES)
def test_ranges_are_sets_of_records(these, those):
    def records(ranges: list[VerifiedRange]) -> set[int]:
        return {ordinal for one in ranges for ordinal in range(one.ordinal, one.end_ordinal)}

    ours, others = joined_ranges(these), joined_ranges(those)
    assert records(ours) == records(these)
    assert records(common(ours, others)) == records(these) & records(those)
    left = without(these, those)
    assert records(left) == records(these) - records(those)
    assert left == joined_ranges(left)


# Wording


def topic(name: str, *findings: Finding) -> TopicAudit:
    return TopicAudit(name, 7, [part(60, 200)], [part(0, 100)], 20, 40, list(findings))


def report(*topics: TopicAudit, notes: tuple[str, ...] = ()) -> list[str]:
    lost = any(one.findings for one in topics)
    return list(AuditReport("/d", "/l", list(topics), [], list(notes), 2, 3, lost).lines())


def test_what_is_covered_is_said_of_one_topic():
    assert report(topic("orders")) == [
        "nothing lost: orders: lake offsets 0 to 100, log offsets 60 to 200, ordinals 0 to 20"
    ]


def test_what_is_covered_is_said_of_each_topic_and_summed_up_for_very_many():
    *each, verdict = report(topic("a"), topic("b\n"))
    assert each[1] == '  "b\\n": lake offsets 0 to 100, log offsets 60 to 200, ordinals 0 to 20'
    assert verdict == (
        "nothing lost: 2 topics, 40 records, 2 segments, 3 files of the lake, 80 bytes the same in both"
    )
    lines = report(*(topic(str(number)) for number in range(LINES_MAX + 1234)))
    assert len(lines) == LINES_MAX + 2
    assert lines[-2] == "  and 1,234 other topics (--json names them all)"


def test_what_is_lost_is_said_exactly():
    damaged = Finding("damaged", "the checksum is wrong", "segments/x.log", "a", 7, part(0, 20))
    gone = Finding("missing", "the file is gone", "date=2025-11-15/f.parquet")
    where = "topic a, epoch 7, offsets 0 to 20, ordinals 0 to 2: segments/x.log"
    assert report(topic("a", damaged, gone), notes=("so it is",)) == [
        f"damaged: {where}: the checksum is wrong",
        "missing: date=2025-11-15/f.parquet: the file is gone",
        "note: so it is",
        "lost: 1 missing, 1 damaged",
    ]
