"""`headrace backup` and `headrace restore`: data deleted since the backup, and readers that resume."""

import json

import pytest

from headrace.testing import ServerProcess


@pytest.fixture
def backed_up(headrace, tmp_path):
    """A stopped server's directory, and an earlier backup of it."""
    with ServerProcess(tmp_path / "data", "--set", "journal.rotate_s=0.2") as server:
        at = {"HEADRACE_URL": server.figg_url, "HEADRACE_HTTP": server.http_url}
        assert headrace("publish", "kept", stdin="1\n2\n3\n", environ=at).returncode == 0
        assert headrace("publish", "doomed", "x", environ=at).returncode == 0
        read = headrace("subscribe", "kept", "--reader", "r", "--count", 2, environ=at)
        assert read.stdout == "1\n2\n"
        made = headrace("backup", "backup", "--data-dir", "data", "-q")
        assert (made.returncode, made.stderr) == (0, "")
        assert headrace("delete", "doomed", "--yes", environ=at).returncode == 0
        server.terminate()


def names(done):
    return [json.loads(line)["name"] for line in done.stdout.splitlines()]


def test_what_was_given_up_since_is_restored_only_without_old(headrace, tmp_path, backed_up):
    done = headrace("restore", "backup", "--data-dir", "new", "--old", "data")
    assert done.returncode == 0, done.stderr
    assert "not restored, since data has given them up: 1 topic, " in done.stderr
    with ServerProcess(tmp_path / "new") as server:
        at = {"HEADRACE_URL": server.figg_url, "HEADRACE_HTTP": server.http_url}
        assert names(headrace("topics", "--json", environ=at)) == ["kept"]
        # The reader resumes after what it has acknowledged, and misses nothing.
        read = headrace("subscribe", "kept", "--reader", "r", "--until-end", environ=at)
        assert (read.stdout, read.stderr) == ("3\n", "")
        assert "ERROR" not in server.stderr
    done = headrace("restore", "backup", "--data-dir", "all")
    assert "since the backup is back, and" in done.stderr
    with ServerProcess(tmp_path / "all") as server:
        at = {"HEADRACE_HTTP": server.http_url}
        assert names(headrace("topics", "--json", environ=at)) == ["doomed", "kept"]


def test_another_log_is_not_taken_for_the_old_one(headrace, tmp_path, backed_up):
    with ServerProcess(tmp_path / "other") as server:
        server.terminate()
    done = headrace("restore", "backup", "--data-dir", "new", "--old", "other")
    assert done.returncode == 1
    assert "other is not the log that the backup was made of" in done.stderr
    assert not (tmp_path / "new").exists()
