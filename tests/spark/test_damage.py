"""Damaged segments: errors name topic, segment and offsets, and the intact rest is readable."""

import random
from pathlib import Path
from typing import Any

import pytest

from headrace.testing import ServerProcess
from tests.spark.conftest import Read, Start
from tests.spark.support import error_of, expected_rows, publish, rows_of, wait_applied

RECORDS = 2000


@pytest.fixture
def stopped(start: Start) -> tuple[Path, list[Any]]:
    """Directory of a stopped server, and the rows of its topic."""
    server: ServerProcess = start()
    chance = random.Random(3)
    payloads = [chance.randbytes(chance.randint(1, 400)) for _ in range(RECORDS)]
    publish(server.figg_url, "orders", payloads)
    publish(server.figg_url, "healthy", [b"%d" % n for n in range(10)])
    wait_applied(server, "orders", "healthy")
    assert server.terminate() == 0
    return server.data_dir, expected_rows("orders", payloads)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x40
    path.write_bytes(data)


def segment_at(data_dir: Path, offset: int) -> tuple[Path, int]:
    """Return the segment file of the large topic that contains an offset, and the file's first offset."""
    found = []
    for path in data_dir.glob("segments/*/*.log"):
        base = int(path.stem.rpartition("-")[2])
        if path.stat().st_size > 1000 and base <= offset:
            found.append((base, path))
    base, path = max(found)
    return path, base


def test_a_flipped_byte_is_named_and_the_rest_is_readable(
    read: Read, stopped: tuple[Path, list[Any]]
) -> None:
    data_dir, rows = stopped
    inside = rows[RECORDS // 2]
    path, base = segment_at(data_dir, inside[1])
    flip(path, inside[1] - base + 4)

    def frame(**options: object) -> Any:
        return read(
            path=str(data_dir), subscribePattern=".*", maxBytesPerPartition=50_000, **options
        )

    said = error_of(lambda: frame().collect())
    assert f"topic 'orders', segment {path.name}, offsets " in said
    assert "a checksum fails; set verifyChecksums to false" in said
    begin, end = map(int, said.partition("offsets ")[2].partition(":")[0].split(" to "))
    assert begin <= inside[1] < inside[2] <= end

    found = rows_of(frame(verifyChecksums=False))
    healthy = [row for row in rows if row[2] <= begin or row[1] >= end]
    assert 0 < len(healthy) < RECORDS
    assert [row for row in found if row[0] == "orders"] == healthy
    assert [row[4] for row in found if row[0] == "healthy"] == [b"%d" % n for n in range(10)]


def test_a_running_server_names_what_is_damaged_too(
    read: Read, start: Start, stopped: tuple[Path, list[Any]]
) -> None:
    data_dir, rows = stopped
    inside = rows[RECORDS // 2]
    path, base = segment_at(data_dir, inside[1])
    flip(path, inside[1] - base + 4)
    with ServerProcess(data_dir) as server:
        said = error_of(lambda: read(url=server.http_url, subscribe="orders").collect())
        assert "topic 'orders'" in said
        begin, end = map(int, said.partition("offsets ")[2].partition(":")[0].split(" to "))
        assert begin <= inside[1] < inside[2] <= end
        found = rows_of(read(url=server.http_url, subscribe="orders", verifyChecksums=False))
    assert found == [row for row in rows if row[2] <= begin or row[1] >= end]
