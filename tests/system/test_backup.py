"""A backup of a server under load, and a server that is started on the restored directory."""

import itertools
import json
import threading

from headrace.client import connect_blocking
from headrace.log.verify.verify import verify
from headrace.model import JUMP
from headrace.testing import ServerProcess

TOPICS = ("a", "b", "c")
ENOUGH = 2000
"""Number of records that are acknowledged before the backup begins."""


class Publisher(threading.Thread):
    """Publishes numbers to each topic until a test stops it, and counts acknowledgements."""

    def __init__(self, url):
        super().__init__()
        self._url = url
        self._stop_now = threading.Event()
        self.acknowledged = 0
        self.enough = threading.Event()

    def run(self):
        with connect_blocking(self._url) as client:
            number = 0
            while not self._stop_now.is_set():
                for _ in range(100):
                    for topic in TOPICS:
                        client.window()
                        client.publish_nowait(topic, b"%d" % number)
                    number += 1
                client.flush()
                self.acknowledged = number
                if number >= ENOUGH:
                    self.enough.set()

    def stop(self):
        self._stop_now.set()
        self.join()


def numbers(client, topic, count):
    """Return the first `count` numbers in a topic."""
    subscription = client.subscribe(topic, offset=0)
    return [int(message.payload) for message in itertools.islice(subscription, count)]


def test_a_backup_under_load_has_what_was_acknowledged_before(headrace, tmp_path):
    settings = ("--set", "segment.bytes=65536", "--set", "journal.rotate_s=0.2")
    with ServerProcess(tmp_path / "data", *settings) as server:
        publisher = Publisher(server.figg_url)
        publisher.start()
        try:
            assert publisher.enough.wait(60)
            before = publisher.acknowledged
            done = headrace("backup", tmp_path / "backup", "--data-dir", server.data_dir, "--json")
        finally:
            publisher.stop()
        assert done.returncode == 0, done.stderr
        made = json.loads(done.stdout)
        assert made["topics"] == len(TOPICS)
        assert made["records"] >= before * len(TOPICS)
        with connect_blocking(server.figg_url) as client:
            end = client.subscribe("a").attached()
    done = headrace("restore", tmp_path / "backup", "--data-dir", tmp_path / "new", "--no-verify")
    assert done.returncode == 0, done.stderr
    assert "restored" in done.stderr
    missed = []
    with (
        ServerProcess(tmp_path / "new", *settings) as server,
        connect_blocking(server.figg_url) as client,
    ):
        client.on("missed", missed.append)
        for topic in TOPICS:
            assert numbers(client, topic, before) == list(range(before))
        # A client that has seen more than the backup learns so, and never gets other records at those
        # offsets.
        client.unsubscribe("a")
        client.subscribe("a", offset=end).attached()
        (told,) = missed
        assert (told.topic, told.asked) == ("a", end)
        assert told.got >= JUMP
    assert not verify(tmp_path / "new").damaged
