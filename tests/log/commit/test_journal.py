"""The journal's format: every written commit is read, and nothing else is ever taken for a commit."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.log.commit import journal
from headrace.log.commit.journal import (
    APPEND,
    BLOCK_BYTES,
    ENTRY_HEADER_BYTES,
    FRAME_HEAD_BYTES,
    FRAMES_POSITION,
    HEADER_POSITIONS,
    LOST,
    Entry,
    JournalFile,
    JournalHeader,
    decode_entry,
    encode_entry,
    encode_frame,
    encode_headers,
    entry_end,
    entry_seed,
    frame_bytes,
    prepare_file,
)
from headrace.log.disk import Disk
from headrace.log.recovery.frames import Frame, Problem, has_commits, read_frames, read_header

FILE_BYTES = 32 * BLOCK_BYTES
GENERATION = 0x0123456789ABCDEF
BOOT = b"a boot of 16 by."

u64 = st.integers(0, (1 << 64) - 1)
entries = st.builds(
    Entry,
    st.integers(1, 5),
    u64,
    st.integers(0, 1 << 62),
    u64,
    st.integers(0, 1000),
    u64,
    st.binary(max_size=20),
    st.binary(max_size=600),
)


def entry(data: bytes, offset: int = 0, topic_id: int = 1, extra: bytes = b"") -> Entry:
    return Entry(APPEND, topic_id, offset, 0, 1, 1_700_000_000_000, extra, data)


class File:
    """A journal file that a test writes and changes."""

    def __init__(self, path, size: int = FILE_BYTES) -> None:
        self.path = path
        prepare_file(Disk(), path, size, GENERATION)
        self.begin(1)

    def begin(self, first: int) -> None:
        """Put the file to use, for the first time or again."""
        number = journal.file_number(self.path)
        header = JournalHeader(GENERATION, number, first, first - 1, FILE_BYTES, BOOT)
        self._writer = JournalFile(Disk(), self.path, header)
        self._next = first

    def commit(self, *entries: Entry) -> tuple[int, int]:
        """Write a frame; return where it begins and ends."""
        begin = self._writer.position
        seed = entry_seed(GENERATION, self._next)
        encoded = [encode_entry(*entry, seed=seed) for entry in entries]
        self._writer.write(self._next, self._next - 1, encoded, sync=False)
        self._next += 1
        return begin, self._writer.position

    def done(self) -> None:
        self._writer.close()

    def change(self, position: int, data: bytes) -> None:
        with self.path.open("r+b") as file:
            file.seek(position)
            file.write(data)

    def flip(self, position: int) -> None:
        self.change(position, bytes([self.path.read_bytes()[position] ^ 0x10]))

    def frames(self, until: int | None = None) -> list[Frame]:
        return [item for item in read_frames(self.path, until) if isinstance(item, Frame)]

    def problems(self, until: int | None = None) -> list[Problem]:
        return [item for item in read_frames(self.path, until) if isinstance(item, Problem)]

    def numbers(self) -> list[int]:
        return [frame.sequence for frame in self.frames()]


@pytest.fixture
def file(tmp_path):
    made = File(tmp_path / "1.journal")
    yield made
    made.done()


@given(entries)
def test_an_entry_comes_back(entry):
    encoded = encode_entry(*entry, seed=0)
    assert decode_entry(encoded) == entry
    assert entry_end(encoded) == entry.end
    assert len(encoded) == ENTRY_HEADER_BYTES + len(entry.extra) + len(entry.data)


@given(st.lists(st.lists(entries, min_size=1, max_size=4), min_size=1, max_size=4))
def test_commits_come_back_in_order(tmp_path_factory, commits):
    path = tmp_path_factory.mktemp("journal") / "1.journal"
    file = File(path)
    for commit in commits:
        file.commit(*commit)
    file.done()
    found = list(read_frames(path))
    assert [frame.entries for frame in found] == commits
    assert [(frame.sequence, frame.synced) for frame in found] == [
        (number, number - 1) for number in range(1, len(commits) + 1)
    ]
    assert not any(frame.problems for frame in found)


def test_a_prepared_file_holds_headers_and_no_commits(file):
    assert file.path.stat().st_size == FILE_BYTES
    assert not any(file.path.read_bytes()[FRAMES_POSITION:])
    assert list(read_frames(file.path)) == []
    header = read_header(file.path)
    assert header is not None
    assert (header.generation, header.first, header.size) == (GENERATION, 0, FILE_BYTES)
    assert not has_commits(file.path)


def test_the_header_goes_with_the_first_commit(file):
    file.commit(entry(b"x"))
    header = read_header(file.path)
    assert (header.first, header.boot_id) == (1, BOOT)


def test_a_commit_takes_whole_blocks_and_the_file_does_not_grow(file):
    for size in (1, 400, 4096, 4097, 20_000):
        body = encode_entry(*entry(bytes(size)), seed=0)
        assert frame_bytes(len(body)) % BLOCK_BYTES == 0
        begin, end = file.commit(entry(bytes(size)))
        assert end - begin == frame_bytes(len(body))
    assert file.path.stat().st_size == FILE_BYTES


def test_frames_of_an_earlier_use_are_not_read(file):
    for _ in range(8):
        file.commit(entry(b"old" * 50))
    file.done()
    file.begin(9)
    assert file.numbers() == [1, 2, 3, 4, 5, 6, 7, 8]  # the new header is not written yet
    file.commit(entry(b"new"))
    assert file.numbers() == [9]
    assert file.problems() == []
    file.commit(entry(b"new"), entry(b"new"))
    assert file.numbers() == [9, 10]
    assert file.problems() == []


@pytest.mark.parametrize("generation", [0, 1, (1 << 64) - 1, GENERATION])
def test_a_payload_made_to_look_like_a_frame_is_not_one(file, generation):
    """The forgery may guess a generation or copy a frame from another place."""
    header = JournalHeader(generation, 1, 1, 0, FILE_BYTES, BOOT)
    forged = encode_entry(
        *entry(b"never published", offset=1 << 40), seed=entry_seed(generation, 9)
    )
    frame = b"".join(encode_frame(header, 20 * BLOCK_BYTES, 9, 8, [forged]))
    # The forged frame is at a position where a frame could begin.
    shift = -(FRAME_HEAD_BYTES + ENTRY_HEADER_BYTES) % BLOCK_BYTES
    begin, _ = file.commit(entry(bytes(shift) + frame))
    file.commit(entry(b"behind it"))
    assert file.path.read_bytes()[begin + BLOCK_BYTES :].startswith(frame[:16])
    assert file.numbers() == [1, 2]
    file.change(begin, bytes(BLOCK_BYTES))
    assert file.numbers() == [1, 2], "its foot still names the frame"
    assert [one.data for frame in file.frames() for one in frame.entries] == [b"behind it"]
    # This holds even when everything that names the true generation is gone.
    file.change(0, bytes(FRAMES_POSITION))
    assert file.numbers() == []


def test_a_copy_of_the_header_that_is_damaged_costs_nothing(file):
    file.commit(entry(b"one"))
    file.commit(entry(b"two"))
    for copy in HEADER_POSITIONS:
        for position in (0, 9, 20, 30, 43):
            file.flip(copy + position)
            assert file.numbers() == [1, 2]
            (problem,) = file.problems()
            assert (problem.position, problem.harmless) == (copy, True)
            file.flip(copy + position)
        whole = file.path.read_bytes()[copy : copy + BLOCK_BYTES]
        file.change(copy, bytes(BLOCK_BYTES))
        assert file.numbers() == [1, 2]
        assert [problem.position for problem in file.problems()] == [copy]
        file.change(copy, whole)


def test_without_a_header_only_a_trusted_generation_finds_frames(file):
    file.commit(entry(b"one"))
    file.commit(entry(b"two"))
    file.change(0, bytes(FRAMES_POSITION))
    assert file.numbers() == []
    found = [one for one in read_frames(file.path, generation=GENERATION) if isinstance(one, Frame)]
    assert [frame.sequence for frame in found] == [1, 2]
    assert list(read_frames(file.path, generation=GENERATION + 1)) == []


def test_the_header_of_another_file_is_not_believed(file, tmp_path):
    file.commit(entry(b"one"))
    other = File(tmp_path / "2.journal")
    other.begin(7)
    other.commit(entry(b"two"))
    other.done()
    file.change(0, other.path.read_bytes()[:BLOCK_BYTES])
    assert read_header(file.path).first == 1
    assert file.numbers() == [1]


def test_a_frame_of_another_file_or_place_is_not_believed(file, tmp_path):
    places = [file.commit(entry(b"%d" % number))[0] for number in range(4)]
    other = File(tmp_path / "2.journal")
    for number in range(4):
        other.commit(entry(b"other %d" % number))
    other.done()
    blocks = {
        "another file": other.path.read_bytes()[places[1] : places[1] + BLOCK_BYTES],
        "another place": file.path.read_bytes()[places[2] : places[2] + BLOCK_BYTES],
    }
    for block in blocks.values():
        file.change(places[1], block)
        assert file.numbers() == [1, 3, 4]
        (problem,) = file.problems()
        assert (problem.position, problem.harmless) == (places[1], False)


def test_a_frame_whose_head_is_damaged_is_found_by_its_foot(file):
    file.commit(entry(b"one"))
    begin, _ = file.commit(entry(b"two" * 200))
    file.commit(entry(b"three"))
    for position in range(begin, begin + FRAME_HEAD_BYTES):
        file.flip(position)
        assert file.numbers() == [1, 2, 3]
        (problem,) = file.frames()[1].problems
        assert problem.harmless
        assert file.frames()[1].entries == [entry(b"two" * 200)]
        file.flip(position)
    assert file.numbers() == [1, 2, 3]


def test_a_frame_that_is_gone_is_skipped_and_named(file):
    file.commit(entry(b"one"))
    begin, end = file.commit(entry(b"two" * 200))
    file.commit(entry(b"three"))
    file.change(begin, b"\xaa" * (end - begin))
    assert file.numbers() == [1, 3]
    (problem,) = file.problems()
    assert (problem.position, problem.length) == (begin, end - begin)
    assert problem.entry is None
    assert not problem.harmless


def test_an_entry_whose_data_is_damaged_is_known_to_be_lost(file):
    good = entry(b"good", offset=0)
    bad = entry(b"damaged", offset=4, extra=b"whose")
    begin, _ = file.commit(good, bad, entry(b"later", offset=11))
    position = begin + FRAME_HEAD_BYTES + len(encode_entry(*good, seed=0)) + ENTRY_HEADER_BYTES + 5
    for at in range(position, position + 7):
        file.flip(at)
        (frame,) = file.frames()
        assert [(one.kind, one.offset, one.end) for one in frame.entries] == [
            (APPEND, 0, 4),
            (LOST, 4, 11),
            (APPEND, 11, 16),
        ]
        assert frame.entries[1].extra == b"whose"
        assert not any(frame.entries[1].data)
        (problem,) = frame.problems
        assert problem.entry == frame.entries[1]
        file.flip(at)
    assert file.frames()[0].problems == []


def test_an_entry_whose_header_is_damaged_takes_no_other_with_it(file):
    good, behind = entry(b"good"), [entry(b"behind it"), entry(b"and more", extra=b"extra")]
    begin, _ = file.commit(good, entry(b"bad", extra=b"extra"), *behind)
    file.commit(entry(b"next commit"))
    position = begin + FRAME_HEAD_BYTES + len(encode_entry(*good, seed=0))
    # The byte between kind and lengths is padding, and the checksum covers it too.
    for at in range(position, position + ENTRY_HEADER_BYTES + 5):
        file.flip(at)
        first, second = file.frames()
        assert first.entries == [good, *behind]
        (problem,) = first.problems
        assert problem.entry is None
        assert (problem.position, problem.length) == (position, ENTRY_HEADER_BYTES + 5 + 3)
        assert second.problems == []
        file.flip(at)


def test_a_header_of_another_place_takes_no_sound_entry_with_it(file):
    """A copy of an entry's header, placed before the entry itself, claims the entry's data."""
    first, second, third = (entry(bytes([n]) * 300, offset=300 * n) for n in range(3))
    begin, _ = file.commit(first, second, third)
    size = len(encode_entry(*first, seed=0))
    place = begin + FRAME_HEAD_BYTES
    copy = file.path.read_bytes()[place + size : place + size + 100]
    file.change(place, copy)
    (frame,) = file.frames()
    assert frame.entries == [second, third]
    assert frame.problems


def test_an_entry_inside_a_payload_is_not_taken_for_one_behind_damage(file):
    forged = encode_entry(*entry(b"never published"), seed=0)
    real = entry(bytes(3) + forged + bytes(5))
    begin, _ = file.commit(real, entry(b"behind it"))
    file.flip(begin + FRAME_HEAD_BYTES + 9)
    assert file.frames()[0].entries == [entry(b"behind it")]


@pytest.mark.parametrize("seed", range(20))
def test_a_frame_that_was_torn_gives_what_holds_of_it(file, seed):
    chance = random.Random(seed)
    file.commit(entry(b"before"))
    kept = [entry(chance.randbytes(chance.randrange(300)), topic_id=n) for n in range(8)]
    begin, end = file.commit(*kept)
    cut = chance.randrange(begin, end)
    file.change(cut, bytes(end - cut))
    assert file.frames()[0].entries == [entry(b"before")]
    if cut < begin + FRAME_HEAD_BYTES:
        return  # the frame itself is gone
    torn = file.frames()[1]
    position = begin + FRAME_HEAD_BYTES
    for number, one in enumerate(kept):
        position += len(encode_entry(*one, seed=0))
        if position <= cut:
            assert torn.entries[number] == one
    if torn.entries != kept:
        assert position > cut
        assert torn.problems


FIRST_END = FRAMES_POSITION + BLOCK_BYTES


@pytest.mark.parametrize("cut", [0, 1, 511, FRAMES_POSITION + 3, FIRST_END + 500, FIRST_END + 4000])
def test_a_file_that_was_cut_gives_what_is_left_of_it(file, cut):
    first, second = entry(bytes(100)), entry(bytes(1000), offset=100)
    file.commit(first)
    _, end = file.commit(second, entry(b"behind it", offset=1100))
    with file.path.open("r+b") as opened:
        opened.truncate(cut)
    found = file.frames()
    assert [one for frame in found for one in frame.entries if one.kind != LOST] == (
        [first, second, entry(b"behind it", offset=1100)][: 3 if cut > FIRST_END + 2000 else 1]
        if cut >= FIRST_END
        else []
    )
    if cut == FIRST_END + 500:
        # The reader reports the entry that it knows, and that an unknown rest is lost.
        lost, rest = found[1].problems
        assert (lost.entry.offset, lost.entry.end) == (100, 1100)
        assert rest.entry is None
    if cut < FIRST_END:
        assert file.problems(end), "a closed file that is too short is noticed"


def test_a_closed_file_must_be_full_of_frames(file):
    file.commit(entry(b"one"))
    begin, end = file.commit(entry(b"two"))
    assert file.problems(end) == []
    file.change(begin, bytes(end - begin))  # no trace of a frame is left
    assert file.problems() == []
    (problem,) = file.problems(end)
    assert (problem.position, problem.length) == (begin, end - begin)


def test_the_last_frame_is_missed_when_only_its_head_and_foot_are_damaged(file):
    file.commit(entry(b"one"))
    begin, end = file.commit(entry(b"two"))
    file.flip(begin + 5)
    file.flip(end - 5)  # a byte of its foot
    (problem,) = file.problems()
    assert problem.position == begin
    assert file.numbers() == [1]


@pytest.mark.parametrize("seed", range(40))
def test_no_flipped_bit_makes_an_entry_that_was_never_written(file, seed):
    chance = random.Random(seed)
    written = []
    for _ in range(6):
        commit = [
            entry(chance.randbytes(chance.randrange(200)), offset=chance.randrange(1 << 30))
            for _ in range(3)
        ]
        written += commit
        file.commit(*commit)
    data = bytearray(file.path.read_bytes())
    bit = chance.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    file.path.write_bytes(data)
    found = [one for frame in file.frames() for one in frame.entries if one.kind != LOST]
    assert all(one in written for one in found)
    assert len(found) >= len(written) - 3
    if len(found) < len(written):
        assert file.problems() or any(frame.problems for frame in file.frames())


def test_a_file_is_complete_before_it_has_its_name(tmp_path):
    path = tmp_path / "1.journal"
    seen = []

    class Watched(Disk):
        def sync(self, fd: int) -> None:
            seen.append(("sync", path.exists(), path.with_suffix(".new").stat().st_size))

        def sync_directory(self, directory) -> None:
            seen.append(("directory", path.exists(), directory))

    path.with_suffix(".new").write_bytes(b"left by a start that was killed" * 10_000)
    prepare_file(Watched(), path, 3 << 20, GENERATION)
    assert seen == [("sync", False, 3 << 20), ("directory", True, tmp_path)]
    headers = encode_headers(JournalHeader.unused(path, 3 << 20, GENERATION))
    assert path.read_bytes() == headers.ljust(3 << 20, b"\0")


def test_the_boot_is_the_same_until_the_next_one():
    assert journal.boot_id() == journal.boot_id()
    assert len(journal.boot_id()) == 16
