"""Files of a lake: by date or topic, sorted, with the ranges they hold; and reading them back."""

import datetime
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from crc32c import crc32c

from headrace.lake.deduped import DedupedWriter
from headrace.lake.files import writing
from headrace.lake.files.reading import RANGES_KEY, check_file
from headrace.lake.format import LakeError, RecordRange, decode_ranges
from headrace.lake.storage.storage import storage_of
from headrace.log.records import pack_record
from tests.lake.rows import DAY_MS, NOON_MS, rows, write


def packed(*payloads: bytes) -> bytes:
    return b"".join(map(pack_record, payloads))


def test_records_that_follow_each_other_are_one_range(tmp_path):
    (file,) = write(
        tmp_path,
        rows("a", [b"x", b"yy"]),
        rows("a", [b"zzz"], offset=11, ordinal=2),
        rows("b", [b""], offset=7, ordinal=3, epoch=2),
    )
    assert file.ranges == (
        RecordRange("a", 1, 0, 18, 0, 3, crc32c(packed(b"x", b"yy", b"zzz"))),
        RecordRange("b", 2, 7, 11, 3, 4, crc32c(packed(b""))),
    )
    assert (file.path, file.rows) == (f"date=2024-10-04/{file.path[16:]}", 4)
    assert file.bytes == (tmp_path / file.path).stat().st_size
    table = pq.ParquetFile(tmp_path / file.path).read()
    assert table["topic"].to_pylist() == ["a", "a", "a", "b"]
    assert table["offset"].to_pylist() == [0, 5, 11, 7]
    assert table["ordinal"].to_pylist() == [0, 1, 2, 3]
    assert table["epoch"].to_pylist() == [1, 1, 1, 2]
    assert table["payload"].to_pylist() == [b"x", b"yy", b"zzz", b""]
    assert not any(field.nullable for field in table.schema)


@pytest.mark.parametrize("jump", [0, 1 << 32])
def test_where_a_topic_jumps_ahead_a_range_ends(tmp_path, jump):
    (file,) = write(
        tmp_path, rows("a", [b"x"]), rows("a", [b"y"], offset=5 + jump, ordinal=1 + jump)
    )
    assert len(file.ranges) == (2 if jump else 1)


def test_midnight_inside_a_run_divides_it(tmp_path):
    midnight = NOON_MS + DAY_MS // 2
    some = rows("a", [b"1", b"2", b"3"], ms=[midnight - 1, midnight, midnight + DAY_MS])
    first, second, third = write(tmp_path, some, rows("b", [b"4"], ms=[midnight - 2]))
    assert [one.partition["date"] for one in (first, second, third)] == [
        "2024-10-04",
        "2024-10-05",
        "2024-10-06",
    ]
    assert [(one.topic, one.offset, one.end) for one in first.ranges] == [("a", 0, 5), ("b", 0, 5)]
    assert [(one.offset, one.end, one.ordinal) for one in second.ranges] == [(5, 10, 1)]
    assert first.statistics.most.timestamp == "2024-10-04T23:59:59.999Z"
    assert second.statistics.least.timestamp == "2024-10-05T00:00:00.000Z"
    moment = pq.ParquetFile(tmp_path / first.path).read()["timestamp"].to_pylist()[0]
    assert moment == datetime.datetime(2024, 10, 4, 23, 59, 59, 999000, datetime.UTC)


def test_ten_thousand_topics_are_one_file_or_a_directory_each(tmp_path):
    many = [rows(f"t{number:03}/../x", [b"1"]) for number in range(200)]
    (file,) = write(tmp_path, *many)
    assert len(file.ranges) == 200
    files = write(tmp_path, *many[:20], by_topic=True)
    assert len({one.path.split("/")[0] for one in files}) == 20
    assert files[3].partition == {"topic": "t003/../x", "date": "2024-10-04"}
    assert "topic" not in pq.ParquetFile(tmp_path / files[3].path).schema_arrow.names
    check_file(storage_of(tmp_path).file(files[3].path), files[3].ranges)


def test_large_records_make_small_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "ROW_GROUP_BYTES", 1000)
    some = [rows("a", [b"x" * 600], offset=604 * n, ordinal=n) for n in range(5)]
    (file,) = write(tmp_path, *some)
    assert pq.read_metadata(tmp_path / file.path).num_row_groups == 3
    assert len(file.ranges) == 1


def test_what_is_not_what_it_should_be_is_found_when_it_is_read_back(tmp_path):
    (file,) = write(tmp_path, rows("a", [b"x", b"yy"]), rows("b", [b"z"]))
    storage, path, (one, other) = storage_of(tmp_path), tmp_path / file.path, file.ranges
    check_file(storage.file(file.path), file.ranges)
    for wrong, said in (
        ([one], "has 3 rows instead of 2"),
        ([one, other._replace(crc=1)], "has a footer that names other records"),
    ):
        with pytest.raises(LakeError, match=said):
            check_file(storage.file(file.path), wrong)
    table = pq.ParquetFile(path).read()
    for column, value, said in (
        ("payload", [b"x", b"yz", b"z"], "offsets 0 to 11: a checksum fails"),
        ("offset", [0, 6, 0], "rows are not in their places"),
        ("ordinal", [0, 2, 0], "rows are not in their places"),
        ("epoch", [1, 1, 2], "topic 'b'"),
        ("topic", ["a", "b", "b"], "topic 'a'"),
        ("payload", [b"x", b"yy", b"z longer"], "a checksum fails"),
    ):
        number = table.schema.get_field_index(column)
        field = table.schema.field(number)
        changed = table.set_column(number, field, [pa.array(value, field.type)])
        metadata = {RANGES_KEY: pq.read_metadata(path).metadata[RANGES_KEY.encode()]}
        bad = tmp_path / "bad.parquet"
        pq.write_table(changed.replace_schema_metadata(metadata), bad)
        assert decode_ranges(pq.read_metadata(bad).metadata[RANGES_KEY.encode()])
        with pytest.raises(LakeError, match=said):
            check_file(storage.file("bad.parquet"), file.ranges)


PAYLOAD = random.Random(1).randbytes(600)


class DamagingWriter(pq.ParquetWriter):
    """Writer of the library whose file has one wrong bit in a payload."""

    def __init__(self, where, *arguments, **options):
        super().__init__(where, *arguments, **options)
        self._file = where

    def close(self):
        if self.is_open:
            super().close()
            self._file.seek(0)
            at = self._file.read().index(PAYLOAD)
            self._file.seek(at)
            self._file.write(bytes([PAYLOAD[0] ^ 1]))


def write_deduped(directory, some):
    writer = DedupedWriter(storage_of(directory), "file", some.columns.schema)
    writer.add(some.columns)
    writer.finish()


@pytest.mark.parametrize("write_to", [write, write_deduped])
def test_a_file_with_a_wrong_bit_is_not_kept(tmp_path, monkeypatch, write_to):
    monkeypatch.setattr(pq, "ParquetWriter", DamagingWriter)
    with pytest.raises(LakeError, match=r"date=2024-10-04/.*\.parquet"):
        write_to(tmp_path, rows("a", [PAYLOAD]))
    assert not list(tmp_path.rglob("*-????????.parquet")), "no file has got its name"
