"""A full disk: publishers wait, everything else works, and nothing acknowledged is lost."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from headrace.testing import LogChecker, ServerFailedError, ServerProcess, wait_until
from tests.fakes.store import block
from tests.log.conftest import QUICK
from tests.system.checked import assert_sound, end_of, in_threads, publisher, subscriber
from tests.system.conftest import SMALL, Start
from tests.system.figg.foreign import Client, Wire
from tests.system.support import FailingServer, get, metrics
from tests.tools import takes_long, tool

MIB = 1024 * 1024
DISK_BYTES = 32 * MIB
COW_DISK_BYTES = 64 * MIB
ROOM_BYTES = 3 * MIB
JOURNAL_FILES = 4
"""Number of journal files in the `SMALL` configuration."""
STALLED_S = 1.5
RECORDS = 1500
COW_RECORDS = 300
FIRST = 20
"""Number of records that are acknowledged before the disk is full."""
PAYLOAD = bytes(8192)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MiB on which journal files can be overwritten without free space."""
    yield from mounted(tmp_path, "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "headrace-test")


@pytest.fixture
def cow_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB on which overwriting needs free space too."""
    mkfs = tool("mkfs.btrfs")
    with TemporaryDirectory(prefix="headrace-", dir=QUICK) as directory:
        image = Path(directory) / "image"
        with image.open("wb") as file:
            file.truncate(COW_DISK_BYTES)
        subprocess.run([mkfs, "--mixed", "--quiet", str(image)], check=True, capture_output=True)
        yield from mounted(tmp_path, "-t", "btrfs", "-o", "loop", str(image))


def mounted(tmp_path: Path, *options: str) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", *options, str(path)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"mounting is not possible here: {result.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def leave(disk: Path, room: int) -> None:
    """Fill the disk with ballast, except for `room` bytes."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with (disk / "ballast").open("wb") as ballast:
        os.posix_fallocate(ballast.fileno(), 0, free - room)


def fill(disk: Path) -> None:
    """Write ballast until the disk is full; this is the only way to find out how much btrfs has free."""
    with (disk / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
        while True:
            ballast.write(bytes(MIB // 4))
            os.fsync(ballast.fileno())


def wait_journal(disk: Path) -> None:
    """Wait until the journal's files exist; they are created in the background."""
    journal = disk / "data" / "journal"
    wait_until(lambda: len(list(journal.glob("*.journal"))) == JOURNAL_FILES, 30, "the journal")


def make_room(disk: Path) -> None:
    (disk / "ballast").unlink()


def publish_all(client: Client, records: int = RECORDS) -> Callable[[], None]:
    def run() -> None:
        for number in range(records):
            client.publish(b"t", b"%d" % number + PAYLOAD, 90)
        client.flush(90)

    return run


def wait_held_back(client: Client) -> None:
    """Wait until a full window of publishes has not been acknowledged for a while."""
    last: tuple[object, float] = (None, 0.0)

    def stalled() -> bool:
        nonlocal last
        now = time.monotonic()
        # The oldest unacknowledged number moves with acknowledgements, but not with further sends.
        oldest = client.oldest_unacknowledged
        if oldest != last[0]:
            last = oldest, now
        return oldest is not None and now - last[1] > STALLED_S

    wait_until(stalled, 60, "publishers to be held back")


def wait_no_space(server: ServerProcess) -> None:
    """Wait until the server reports that publishes are held back for lack of space."""

    def says_so() -> bool:
        status, body = get(server, "/healthz")
        return status == 503 and b"no space left" in body

    wait_until(says_so, 30, "publishes to be held back")


@pytest.mark.parametrize("durability", ["synced", "written"])
def test_publishers_are_held_back_until_there_is_room(
    start: Start, disk: Path, durability: str
) -> None:
    server = start(f"--durability={durability}", config=SMALL, data_dir=disk / "data")
    wait_journal(disk)
    leave(disk, ROOM_BYTES)
    checker = LogChecker()
    with publisher(server, checker, "p") as writer, subscriber(server, checker, "s") as reader:
        reader.attach(b"t", 0)
        with in_threads(publish_all(writer)):
            try:
                wait_held_back(writer)
                with Wire(server.figg) as wire:
                    assert wire.alive(), "PING is answered"
                    end = wire.attach(b"t")
                reader.wait_offset(b"t", end)
                assert get(server, "/healthz")[0] == 503
                pongs = len(writer.latencies_s)
                wait_until(lambda: len(writer.latencies_s) > pongs + 2, 30, "the publisher's PONGs")
                assert (writer.connections, writer.dropped_by_pings) == (1, 0)
            finally:
                make_room(disk)
        reader.wait_offset(b"t", end_of(server, b"t"))
    assert get(server, "/healthz")[0] == 200
    assert_sound(checker)
    assert checker.records("t") == RECORDS
    assert_kept(server, checker)


@pytest.mark.parametrize("durability", ["synced", pytest.param("written", marks=takes_long)])
def test_publishers_are_held_back_where_overwriting_needs_room(
    start: Start, cow_disk: Path, durability: str
) -> None:
    server = start(f"--durability={durability}", config=SMALL, data_dir=cow_disk / "data")
    wait_journal(cow_disk)
    checker = LogChecker()
    with publisher(server, checker, "p") as writer, subscriber(server, checker, "s") as reader:
        reader.attach(b"t", 0)
        publish_all(writer, FIRST)()
        fill(cow_disk)
        with in_threads(publish_all(writer, COW_RECORDS)):
            try:
                wait_no_space(server)
                assert metrics(server)["headrace_held_back"] == 1
                with Wire(server.figg) as wire:
                    assert wire.alive(), "PING is answered"
            finally:
                make_room(cow_disk)
        reader.wait_offset(b"t", end_of(server, b"t"))
    assert get(server, "/healthz")[0] == 200
    assert "publishes are accepted" in server.stderr
    assert_sound(checker)
    assert checker.records("t") == FIRST + COW_RECORDS
    assert_kept(server, checker)


def test_commits_that_find_no_room_are_written_later(tmp_path: Path) -> None:
    checker = LogChecker()
    config = tmp_path / "config.toml"
    config.write_text(SMALL)
    inject = "pwritev2:error=ENOSPC:when=14..15"
    with (
        FailingServer(tmp_path / "data", f"--config={config}", inject=inject) as server,
        publisher(server, checker, "p") as writer,
        subscriber(server, checker, "s") as reader,
    ):
        reader.attach(b"t", 0)
        for _ in range(FIRST):
            writer.publish(b"t", b"x", 30)
            writer.flush(30)
        reader.wait_offset(b"t", end_of(server, b"t"))
        server.wait_stderr("no space left on the disk: publishes are held back until there is room")
        server.wait_stderr("publishes are accepted")
        assert server.terminate() == 0
    assert_sound(checker)
    assert checker.records("t") == FIRST


def test_a_server_stops_without_loss_where_overwriting_needs_room(
    start: Start, cow_disk: Path
) -> None:
    server = start(config=SMALL, data_dir=cow_disk / "data")
    wait_journal(cow_disk)
    checker = LogChecker()
    with publisher(server, checker, "p") as writer:
        publish_all(writer, FIRST)()
        fill(cow_disk)
        with in_threads(publish_all(writer, COW_RECORDS)):
            try:
                wait_no_space(server)
                assert server.terminate() == 0
                assert "stopping while the disk is full" in server.stderr
            finally:
                make_room(cow_disk)
            server.start()
    with subscriber(server, checker, "s") as reader:
        reader.attach(b"t", 0)
        reader.wait_offset(b"t", end_of(server, b"t"))
    assert_sound(checker)
    assert_kept(server, checker)


def test_a_server_killed_on_a_full_disk_has_lost_nothing(start: Start, disk: Path) -> None:
    server = start(config=SMALL, data_dir=disk / "data")
    wait_journal(disk)
    leave(disk, ROOM_BYTES)
    checker = LogChecker()
    with publisher(server, checker, "p") as writer, in_threads(publish_all(writer)):
        try:
            wait_held_back(writer)
            server.kill()
            start_or_say_why(server)
        finally:
            make_room(disk)
        if not server.running:
            server.start()
    with subscriber(server, checker, "s") as reader:
        reader.attach(b"t", 0)
        reader.wait_offset(b"t", end_of(server, b"t"))
    assert_sound(checker)
    assert_kept(server, checker)


def start_or_say_why(server: ServerProcess) -> None:
    """Start on a disk that is still full: the server may start and wait, or refuse in one clear line."""
    before = len(server.stderr)
    try:
        server.start()
    except ServerFailedError:
        last = server.stderr[before:].strip().splitlines()[-1]
        assert "space" in last
        assert str(server.data_dir) in last


def assert_kept(server: ServerProcess, checker: LogChecker) -> None:
    """Check that everything is still there after a stop."""
    assert server.terminate() == 0
    server.start()
    with subscriber(server, checker, "after") as reader:
        reader.attach(b"t", 0)
        reader.wait_offset(b"t", end_of(server, b"t"))
    assert_sound(checker)


def test_a_server_that_starts_on_a_full_disk_says_so(start: Start, disk: Path) -> None:
    leave(disk, 0)
    server = start(config=SMALL, data_dir=disk / "data", start=False)
    server.spawn()
    assert server.wait(30) not in (0, None)
    lines = server.stderr.strip().splitlines()
    assert len(lines) == 1, server.stderr
    assert "space" in lines[0]


def test_an_upload_never_takes_the_room_that_publishers_need(start: Start, disk: Path) -> None:
    server = start(config=SMALL, data_dir=disk / "data")
    answer = httpx.post(f"{server.http_url}/v1/staged", content=block("t", [bytes(1000)]))
    assert answer.status_code == 507
    assert "bytes are free on the disk" in answer.json()["error"]
    with Client(server.figg) as client:
        client.publish(b"t", b"still taken", 10)
        client.flush(10)
    assert not list((disk / "data" / "staged").iterdir())
