"""`verify` beside a real server: files that the server writes, recycles or deletes are not damage."""

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from headrace import connect_blocking
from headrace.log.verify.verify import verify
from headrace.model import AUDIT_TOPIC
from headrace.testing import ServerProcess
from tests.system.conftest import Start

# Journal files are full and reused many times a second, and there are soon too many segments.
BUSY = """
[journal]
file_bytes = 65536
files = 3
rotate_s = 0.05
commit_bytes_max = 16384
[segment]
bytes = 8192
[retention]
bytes = 65536
check_s = 0.2
"""
SECONDS = 4.0


def publish_until(server: ServerProcess, stop: threading.Event) -> None:
    with connect_blocking(server.figg_url) as client:
        number = 0
        while not stop.is_set():
            number += 1
            client.publish_nowait(f"topic {number % 3}", b"%d" % number * 50)
            if number % 100 == 0:
                client.flush()


def test_a_directory_a_server_is_writing_to_is_sound_at_every_moment(start: Start) -> None:
    server = start(config=BUSY)
    stop = threading.Event()
    publisher = threading.Thread(target=publish_until, args=(server, stop))
    publisher.start()
    try:
        deadline = time.monotonic() + SECONDS
        checks = records = 0
        forgotten = False
        while time.monotonic() < deadline or not (checks > 3 and records > 100 and forgotten):
            report = verify(server.data_dir)
            assert not report.damaged, report
            checks += 1
            if checks % 5 == 0:
                httpx.delete(server.http_url + "/v1/topic?name=topic 2")
            records = sum(topic.records for topic in report.topics)
            busy = [topic for topic in report.topics if topic.name != AUDIT_TOPIC]
            forgotten = all(topic.ranges[0].offset > 0 for topic in busy)
    finally:
        stop.set()
        publisher.join(30)
    server.kill()
    assert not verify(server.data_dir).damaged


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A place where a directory can be read but not changed, not even by root."""
    path = tmp_path / "read-only"
    path.mkdir()
    command = ["mount", "--bind", str(tmp_path), str(path)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.strip()}")
    subprocess.run(["mount", "-o", "remount,ro,bind", str(path)], check=True)
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.mark.parametrize("how", ["stopped", "killed", "killed and copied", "running"])
def test_a_read_only_directory_can_be_verified(
    start: Start, tmp_path: Path, read_only: Path, how: str
) -> None:
    server = start(config=BUSY)
    with connect_blocking(server.figg_url) as client:
        for number in range(300):
            client.publish_nowait("topic", b"%d" % number)
        client.flush()
    if how == "stopped":
        assert server.terminate() == 0
    elif how != "running":
        server.kill()
    if how == "killed and copied":
        # The applier may have noticed its server's end and closed the catalogue, which removes the file as
        # well.
        (server.data_dir / "catalogue.sqlite-shm").unlink(missing_ok=True)
    with pytest.raises(OSError, match="Read-only"):
        os.mkdir(read_only / "x")
    report = verify(read_only / server.data_dir.relative_to(tmp_path))
    assert not report.damaged
    assert report.topics[0].records == 300
