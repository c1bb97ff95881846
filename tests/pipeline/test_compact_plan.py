"""Selection of files to merge: small files of one partition, in the order of batches, none of them twice."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from headrace.pipeline.compact import bins, name_after

names = st.builds(
    "{}date=2026-01-{:02}/{}{:08}-0123456789ab-{:04}.parquet".format,
    st.sampled_from(["", "t-00/", "t-01/"]),
    st.integers(1, 3),
    st.sampled_from(["", "c"]),
    st.integers(0, 50),
    st.integers(0, 12),
)


def directory_of(path: str) -> str:
    return path.rpartition("/")[0]


@given(st.dictionaries(names, st.integers(1, 100)), st.integers(1, 120))
def test_a_file_is_in_one_bin_at_most_and_bins_are_of_one_partition(files, file_bytes):
    found = bins(files, file_bytes)
    taken = [path for one in found for path in one.files]
    assert len(taken) == len(set(taken))
    assert set(taken) <= files.keys()
    for one in found:
        assert len(one.files) > 1
        assert len(set(map(directory_of, one.files))) == 1
        assert one.bytes == sum(files[path] for path in one.files) <= file_bytes
        assert all(2 * files[path] < file_bytes for path in one.files)


@given(st.dictionaries(names, st.integers(1, 100)), st.integers(1, 120))
def test_what_is_left_of_a_partition_is_less_than_two_files_could_take(files, file_bytes):
    """Repeated merging ends with files that are at least half full, except for one."""
    found = bins(files, file_bytes)
    merged = {path for one in found for path in one.files}
    left = {path: size for path, size in files.items() if path not in merged}
    after = left | {
        f"{directory_of(one.files[0])}/{name_after(one.files[0], '0' * 12)}.parquet": one.bytes
        for one in found
    }
    by_directory: dict[str, int] = {}
    for path, size in after.items():
        if 2 * size < file_bytes:
            directory = directory_of(path)
            by_directory[directory] = by_directory.get(directory, 0) + 1
    assert all(count <= 2 for count in by_directory.values())


def test_files_are_taken_in_the_order_of_batches_and_tasks():
    def path(name: str) -> str:
        return f"date=2026-01-01/{name}.parquet"

    order = [
        path("00000002-ffffffffffff-0000"),
        path("c00000003-aaaaaaaaaaaa-0000"),
        path("00000007-bbbbbbbbbbbb-0000"),
        path("00000007-aaaaaaaaaaaa-0001"),
    ]
    (one,) = bins(dict.fromkeys(sorted(order), 10), 1000)
    assert list(one.files) == order
    # The merged file takes the place of the first of its files.
    assert name_after(order[1], "123456789abc") == "c00000003-123456789abc-0000"
    assert name_after(order[3], "123456789abc") == "c00000007-123456789abc-0001"


def test_a_task_has_no_more_files_than_it_may_have_open(monkeypatch):
    monkeypatch.setattr(sys.modules["headrace.pipeline.compact"], "FILES_MAX", 3)
    found = bins({f"date=2026-01-01/{number}": 1 for number in range(8)}, 1000)
    assert [len(one.files) for one in found] == [3, 3, 2]
