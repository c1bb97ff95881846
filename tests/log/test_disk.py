"""Changes to files, and the disk model of the crash tests: it loses whatever a real disk may lose."""

import os
import random

import pytest

from headrace.log import disk as disk_module
from headrace.log.disk import Disk
from tests.fakes.disk import DiskModel, Operation, RecordingDisk


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file"


@pytest.fixture
def opened(path):
    fd = Disk().open(path, create=True)
    yield fd
    Disk().close(fd)


def test_a_file_is_made_only_when_that_is_asked_for(path):
    with pytest.raises(FileNotFoundError):
        Disk().open(path)
    Disk().close(Disk().open(path, create=True))
    assert path.read_bytes() == b""


@pytest.mark.parametrize("synced", [False, True])
@pytest.mark.parametrize("count", [1, 1024, 1025, 5000])
def test_any_number_of_buffers_is_written(opened, path, count, synced):
    parts = [b"%d," % number for number in range(count)]
    Disk().write(opened, parts, 7, synced=synced)
    assert path.read_bytes() == bytes(7) + b"".join(parts)


def test_a_write_that_was_cut_short_goes_on(opened, path, monkeypatch):
    whole = os.pwritev

    def three_bytes(fd, buffers, position, flags=0):
        return whole(fd, [b"".join(buffers)[:3]], position, flags)

    monkeypatch.setattr(disk_module.os, "pwritev", three_bytes)
    Disk().write(opened, [b"first", b"second", b"third"], 2)
    assert path.read_bytes() == bytes(2) + b"firstsecondthird"


def test_cutting_never_makes_a_file_longer(opened, path):
    Disk().write(opened, [b"0123456789"], 0)
    Disk().cut(opened, 20)
    assert path.read_bytes() == b"0123456789"
    Disk().cut(opened, 4)
    assert path.read_bytes() == b"0123"


def test_a_file_that_is_gone_can_be_deleted(path):
    Disk().unlink(path)


def test_the_whole_file_system_can_be_synced(opened, tmp_path):
    Disk().sync(opened)
    Disk().sync_file_system(opened)
    Disk().sync_directory(tmp_path)
    with pytest.raises(OSError, match="Bad file descriptor"):
        Disk().sync_file_system(-1)


class Recorded:
    """Possible results of a few operations, over many crashes."""

    def __init__(self, root) -> None:
        self.root = root / "recorded"
        self.root.mkdir()
        self.disk = RecordingDisk()

    def crashes(self, running: Operation | None = None, count: int = 60) -> set[bytes | None]:
        """Return the different contents that `file` may have; None if it is missing."""
        model = DiskModel(self.root)
        for operation in self.disk.operations:
            model.do(operation)
        found = set()
        for seed in range(count):
            target = self.root.parent / f"{seed}"
            model.crashed(target, running, random.Random(seed))
            file = target / "file"
            found.add(file.read_bytes() if file.exists() else None)
            file.unlink(missing_ok=True)
        return found

    def killed(self) -> bytes:
        model = DiskModel(self.root)
        for operation in self.disk.operations:
            model.do(operation)
        model.killed(self.root.parent / "killed", None, random.Random(0))
        return (self.root.parent / "killed" / "file").read_bytes()

    def make(self, data: bytes) -> int:
        """Create a file that is certainly durable."""
        fd = self.disk.open(self.root / "file", create=True)
        self.disk.write(fd, [data], 0)
        self.disk.sync(fd)
        self.disk.sync_directory(self.root)
        return fd


@pytest.fixture
def recorded(tmp_path):
    return Recorded(tmp_path)


def test_what_is_synced_survives_as_it_is(recorded):
    fd = recorded.make(b"0123456789")
    assert recorded.crashes() == {b"0123456789"}
    recorded.disk.write(fd, [b"ab"], 4, synced=True)
    assert recorded.crashes() == {b"0123ab6789"}
    recorded.disk.close(fd)


def test_what_is_not_synced_is_there_missing_torn_or_zeros(recorded):
    fd = recorded.make(b"0123456789")
    recorded.disk.write(fd, [b"abcd"], 4)
    found = recorded.crashes()
    assert {b"0123456789", b"0123abcd89", b"0123\0\0\0\x0089", b"0123ab6789"} <= found
    assert all(data[:4] == b"0123" and data[8:] == b"89" for data in found)
    assert recorded.killed() == b"0123abcd89"
    recorded.disk.sync(fd)
    assert recorded.crashes() == {b"0123abcd89"}
    recorded.disk.close(fd)


def test_a_synced_write_says_nothing_about_the_ones_before_it(recorded):
    fd = recorded.make(bytes(4))
    recorded.disk.write(fd, [b"a"], 0)
    recorded.disk.write(fd, [b"b"], 1, synced=True)
    assert recorded.crashes() == {b"ab\0\0", b"\0b\0\0"}
    recorded.disk.close(fd)


def test_a_synced_write_that_is_running_may_be_torn(recorded):
    fd = recorded.make(b"0123456789")
    recorded.disk.write(fd, [b"abcd"], 4, synced=True)
    running = recorded.disk.operations.pop()
    assert len(recorded.crashes(running)) > 3
    recorded.disk.close(fd)


def test_sectors_of_one_write_survive_or_not_each_by_itself(recorded):
    fd = recorded.make(bytes(2048))
    recorded.disk.write(fd, [b"x" * 2048], 0)
    found = recorded.crashes(count=200)
    assert bytes(512) + b"x" * 512 + bytes(512) + b"x" * 512 in found
    recorded.disk.close(fd)


def test_a_cut_may_be_lost(recorded):
    fd = recorded.make(b"0123456789")
    recorded.disk.cut(fd, 3)
    assert recorded.crashes() == {b"0123456789", b"012"}
    recorded.disk.close(fd)


def test_names_may_be_lost_until_their_directory_is_synced(recorded):
    disk, root = recorded.disk, recorded.root
    fd = disk.open(root / "new", create=True)
    disk.write(fd, [b"new"], 0)
    disk.sync(fd)
    disk.rename(root / "new", root / "file")
    assert recorded.crashes() == {None, b"new"}
    disk.sync_directory(root)
    assert recorded.crashes() == {b"new"}
    disk.unlink(root / "file")
    assert recorded.crashes() == {None, b"new"}
    disk.sync_directory(root)
    assert recorded.crashes() == {None}
    disk.close(fd)


def test_a_sync_of_everything_is_one_of_names_too(recorded):
    disk = recorded.disk
    fd = disk.open(recorded.root / "file", create=True)
    disk.write(fd, [b"data"], 0)
    disk.sync_file_system(fd)
    assert recorded.crashes() == {b"data"}
    disk.close(fd)


def test_a_file_that_was_there_before_is_safe(recorded):
    (recorded.root / "file").write_bytes(b"before")
    fd = recorded.disk.open(recorded.root / "file")
    assert recorded.crashes() == {b"before"}
    recorded.disk.close(fd)
