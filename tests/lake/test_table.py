"""Tables of every format: batches count once, files are replaced once, and others see every row once."""

import os
import shutil

import pytest

from headrace.lake.deduped import DedupedTable
from headrace.lake.files.reading import read_topic
from headrace.lake.format import LakeError, Shape
from headrace.lake.states import StatesTable
from headrace.lake.storage.storage import HIDDEN, storage_of
from headrace.lake.table import find_table, make_table, open_table
from tests.lake.others import KINDS, seen_by_others
from tests.lake.rows import DAY_MS, NOON_MS, rows, token, write

APP = "test"
OLD = 1_600_000_000


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def lake(kind, tmp_path):
    return make_table(storage_of(tmp_path / "a lake"), kind, Shape())


def batch(lake, number, *some):
    """Write the records of one batch, and return its files."""
    given = some or (rows("a", [b"%d" % number], offset=5 * number, ordinal=number),)
    return write(lake._storage, *given, by_topic=lake.shape.by_topic, layout=lake.layout)


def merged(lake, *numbers):
    """Write the records of the batches with these numbers into one file."""
    some = [rows("a", [b"%d" % number], offset=5 * number, ordinal=number) for number in numbers]
    return batch(lake, 0, *some)


def payloads(lake):
    return sorted(seen_by_others(lake._storage)["payload"].to_pylist())


def three_batches(lake):
    """Commit three batches, and return their files in order."""
    paths = []
    for number in range(3):
        (made,) = batch(lake, number)
        assert lake.commit(APP, number, [made], token())
        paths.append(made.path)
    return paths


def test_a_batch_counts_once_however_often_it_is_committed(lake):
    assert lake.last(APP) is None
    assert lake.commit(APP, 0, batch(lake, 0), token())
    assert not lake.commit(APP, 0, batch(lake, 0), token())
    assert lake.commit(APP, 1, batch(lake, 1), 7)
    assert not lake.commit(APP, 0, batch(lake, 0), token())
    assert lake.commit("other", 0, [], token())
    assert lake.last(APP) == (1, 7)
    assert lake.last("other").number == 0
    assert payloads(lake) == [b"0", b"1"]
    assert sorted(lake.files().values()) == sorted(
        lake._storage.size(path) for path in lake.files()
    )
    again = open_table(lake._storage)
    assert (again.kind, again.id, again.last(APP)) == (lake.kind, lake.id, (1, 7))


def test_a_batch_may_hold_nothing(lake):
    assert lake.commit(APP, 0, [], 0)
    assert not lake.commit(APP, 0, [], 1)
    assert (lake.last(APP), lake.files()) == ((0, 0), {})


def test_a_commit_is_recognised_by_its_token_when_its_outcome_was_unknown(lake):
    most = 0xFFFF_FFFF
    for number, ours in ((0, most), (1, 0), (2, most)):
        assert lake.commit(APP, number, batch(lake, number), ours)
        assert lake.commit(APP, number, batch(lake, number), ours)
        assert not lake.commit(APP, number, batch(lake, number), ours ^ 1)
        assert lake.last(APP) == (number, ours)
    assert payloads(lake) == [b"0", b"1", b"2"]
    paths = list(lake.files())
    assert lake.commit("merge", 0, merged(lake, 0, 1, 2), most, replaced=paths)
    assert lake.commit("merge", 0, merged(lake, 0, 1, 2), most, replaced=paths)
    assert payloads(lake) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("by_topic", [False, True])
def test_a_topic_is_read_in_its_order_from_any_offset(tmp_path, kind, by_topic):
    path = tmp_path / "lake"
    lake = make_table(storage_of(path), kind, Shape(by_topic))
    names = ["it's/../a", "it's a long name, with a long beginning", "it's a long name, with ü"]
    for number in range(4):
        ms = [NOON_MS + number * DAY_MS // 4] * 2
        some = [
            rows(name, [b"%d" % number, b"!"], offset=10 * number, ordinal=2 * number, ms=ms)
            for name in sorted(names)
        ]
        lake.commit(APP, number, batch(lake, number, *some), token())
    found = find_table(storage_of(path), kind, Shape(by_topic))
    every = [(10 * n + end, text) for n in range(4) for end, text in ((5, b"%d" % n), (10, b"!"))]
    for name in names:
        for offset in (0, 1, 5, 20, 39, 40):
            got = [
                one for some in read_topic(storage_of(path), found, name, offset) for one in some
            ]
            assert got == [one for one in every if one[0] - 5 >= offset]
    assert list(read_topic(storage_of(path), found, "c")) == []
    assert found.files_of(names[0], 41) == []
    seen = seen_by_others(path)
    assert len(set(seen["date"].to_pylist())) == 2
    assert sorted(seen["topic"].to_pylist()) == sorted(names * 8)


@pytest.mark.parametrize("by_topic", [False, True])
def test_it_says_what_is_in_its_files(tmp_path, kind, by_topic):
    lake = make_table(storage_of(tmp_path), kind, Shape(by_topic))
    names = ["a long name, which is cut at its end", "ü"]
    some = [rows(name, [b"x", b"y"], offset=70, ordinal=3, ms=[NOON_MS] * 2) for name in names]
    lake.commit(APP, 0, batch(lake, 0, *some), token())
    assert lake.bounds().keys() == lake.files().keys()
    found = sorted(lake.bounds().values(), key=lambda one: one["topic"])
    files = [[name] for name in names] if by_topic else [names]
    for one, inside in zip(found, files, strict=True):
        least, most = one["topic"]
        assert inside[0].startswith(least[:16])
        assert least <= inside[0] <= inside[-1] <= most
        assert one["offset"] == (None if kind == "parquet" else 70, 75)
        if kind != "parquet":
            count = 2 * len(inside)
            assert (one["rows"], one["ordinal"]) == ((count, count), (3, 4))
            assert (one["timestamp"], one["date"]) == ((NOON_MS * 1000,) * 2, (20_000,) * 2)
    assert list(lake.oddities()) == []


def test_files_are_replaced_in_one_step_and_only_if_all_are_there(lake):
    paths = three_batches(lake)
    assert lake.commit("merge", 0, merged(lake, 0, 1), token(), replaced=paths[:2])
    assert payloads(lake) == [b"0", b"1", b"2"]
    assert len(lake.files()) == 2
    # The number of a merge is not that of a batch.
    assert (lake.last(APP).number, lake.last("merge").number) == (2, 0)
    before = lake.files()
    assert not lake.commit("merge", 1, merged(lake, 1, 2), token(), replaced=paths[1:])
    assert not lake.commit("merge", 0, merged(lake, 2), token(), replaced=paths[2:])
    assert lake.files() == before
    assert payloads(lake) == [b"0", b"1", b"2"]
    assert lake.commit(APP, 3, batch(lake, 3), token())
    assert payloads(lake) == [b"0", b"1", b"2", b"3"]


def test_what_was_not_named_for_so_long_is_swept(lake):
    paths = three_batches(lake)
    for path in paths:
        # The time of the replacement counts, not the age of a file.
        os.utime(lake._storage.root / path, (OLD, OLD))
    assert lake.commit("merge", 0, merged(lake, 0, 1), token(), replaced=paths[:2])
    (orphan,) = batch(lake, 9)
    kept = [
        lake._storage.root / name
        for name in (
            "_headrace/batches/x.parquet",
            "notes.txt",
            "sub/x.parquet",
            "date=x/y.parquet",
            "date=2024-10-04/orders-20260101.parquet",
            "date=2024-10-04/part-00000-deadbeef.parquet",
            "metadata/mine.avro",
            "metadata/mine.metadata.json",
            "_headrace/files/date=2024-10-04/mine.data",
        )
    ]
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    lake.sync()
    assert lake.sweep(7200, dry_run=False) == 0
    for path in (lake._storage.root / orphan.path, *kept):
        os.utime(path, (OLD, OLD))
    assert lake.sweep(7200, dry_run=True) == 1
    assert (lake._storage.root / orphan.path).exists()
    assert lake.sweep(7200, dry_run=False) == 1
    assert not (lake._storage.root / orphan.path).exists()
    assert lake.sweep(0, dry_run=True) == lake.sweep(0, dry_run=False) >= 2
    assert all(path.exists() for path in kept)
    for path in kept:
        path.unlink()
    assert payloads(lake) == [b"0", b"1", b"2"]
    assert not any((lake._storage.root / path).exists() for path in paths[:2])
    assert all((lake._storage.root / path).exists() for path in lake.files())
    assert lake.commit(APP, 3, batch(lake, 3), token())


def test_a_file_that_is_gone_before_it_is_looked_at_does_not_end_a_sweep(lake):
    (path,) = batch(lake, 0)
    (lake._storage.root / path.path).unlink()
    (lake._storage.root / path.path).symlink_to("nowhere")
    assert lake.sweep(0, dry_run=False) == 0


def test_one_that_another_process_has_made_first_keeps_its_shape(tmp_path, kind):
    storage = storage_of(tmp_path)
    made = make_table(storage, kind, Shape(by_topic=True))
    with pytest.raises(LakeError, match="is partitioned by topic and date: give --by-topic"):
        make_table(storage, kind, Shape())
    again = make_table(storage, kind, Shape(by_topic=True))
    assert (again.id, again.shape) == (made.id, made.shape)


def test_one_that_was_left_while_it_was_made_is_made_again(tmp_path, kind):
    lake = make_table(storage_of(tmp_path), kind, Shape())
    assert find_table(storage_of(tmp_path), kind, Shape())
    left = {
        "delta": ("_delta_log", "*.json"),
        "parquet": (HIDDEN, "files.db"),
        "iceberg": (HIDDEN, "catalog.db"),
    }
    directory, pattern = left[lake.kind]
    for path in (tmp_path / directory).glob(pattern):
        if path.suffix == ".json":
            path.unlink()
        else:
            path.write_bytes(b"")
    for other in KINDS:
        assert find_table(storage_of(tmp_path), other, Shape()) is None
    made = make_table(storage_of(tmp_path), kind, Shape())
    assert made.last(APP) is None
    assert made.commit(APP, 0, batch(made, 0), token())
    assert payloads(made) == [b"0"]


def test_a_directory_of_something_else_or_another_format_is_left_alone(tmp_path, kind):
    def refused(path, shape=Shape(), kind=kind):  # noqa: B008
        before = sorted(map(str, tmp_path.rglob("*")))
        with pytest.raises(LakeError) as error:
            find_table(storage_of(path), kind, shape)
        assert sorted(map(str, tmp_path.rglob("*"))) == before
        return str(error.value)

    assert find_table(storage_of(tmp_path / "new"), kind, Shape()) is None
    (tmp_path / "metadata").mkdir()
    assert "holds something else than a lake of Headrace (metadata)" in refused(tmp_path)
    ours = tmp_path / "ours"
    make_table(storage_of(ours), kind, Shape(by_topic=True))
    assert refused(ours).startswith(f"{ours} is partitioned by topic and date: give --by-topic")
    for other in KINDS:
        if other != kind:
            assert refused(ours, Shape(by_topic=True), other) == (
                f"{ours} is a lake of the format {kind}: give --format {kind}, or name another directory"
            )


@pytest.mark.parametrize(
    "name", ["100%", "a%20b", "nr #1", "what?", "a\\b", "a\nb", "\x7f", os.fsdecode(b"\xff")]
)
def test_a_path_that_libraries_take_for_another_one_is_refused(tmp_path, kind, name):
    for asked in (
        lambda path: find_table(storage_of(path), kind, Shape()),
        lambda path: open_table(storage_of(path)),
        lambda path: DedupedTable.open(storage_of(path), Shape()),
        lambda path: StatesTable.open(storage_of(path)),
    ):
        for path in (tmp_path / name, tmp_path / name / "lake"):
            with pytest.raises(
                LakeError, match="in it, which means something else in addresses"
            ) as no:
                asked(path)
            assert str(no.value).isprintable()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a b", "ü", "a:b", "it's", 'a"b', "a[b]*", "date=1", "a+b&c"])
def test_any_other_path_is_right(tmp_path, kind, name):
    lake = make_table(storage_of(tmp_path / name), kind, Shape())
    assert lake.commit(APP, 0, batch(lake, 0), token())
    assert list(tmp_path.iterdir()) == [tmp_path / name]
    found = open_table(storage_of(tmp_path / name))
    assert list(found.files_of("a", 0)) == list(lake.files())
    assert [
        one for some in read_topic(storage_of(tmp_path / name), found, "a") for one in some
    ] == [(5, b"0")]


@pytest.mark.parametrize("kind", ["parquet", "iceberg"])
def test_a_damaged_database_is_one_sentence(tmp_path, kind):
    lake = make_table(storage_of(tmp_path), kind, Shape())
    (database,) = (tmp_path / HIDDEN).glob("*.db")
    content = database.read_bytes()
    database.write_bytes(b"no database at all" * 100)
    with pytest.raises(LakeError, match=f"{database} cannot be read: "):
        open_table(storage_of(tmp_path))
    with pytest.raises(LakeError, match=f"{database} cannot be read: "):
        lake.commit(APP, 0, [], token())
    database.write_bytes(content)
    assert lake.commit(APP, 0, [], token())


@pytest.mark.parametrize("kind", ["delta", "parquet"])
def test_it_is_the_same_wherever_it_is_moved_or_copied(tmp_path, kind):
    lake = make_table(storage_of(tmp_path / "lake"), kind, Shape())
    paths = three_batches(lake)
    moved = shutil.copytree(tmp_path / "lake", tmp_path / "copy")
    shutil.rmtree(tmp_path / "lake")
    lake = open_table(storage_of(moved))
    lake.sync()
    assert payloads(lake) == [b"0", b"1", b"2"]
    assert lake.commit("merge", 0, merged(lake, 0, 1), token(), replaced=paths[:2])
    assert payloads(lake) == [b"0", b"1", b"2"]
