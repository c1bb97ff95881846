"""Commands on a restored, damaged log: counts are those of kept records, and gaps are reported."""

import json

import pytest

from headrace.client import connect_blocking
from headrace.log.layout import Layout
from headrace.testing import ServerProcess

RECORDS = 1000
RECORD_BYTES = 10


@pytest.fixture(scope="module")
def restored(tmp_path_factory):
    """A server on a directory without its catalogue; two topics are damaged at one end."""
    directory = tmp_path_factory.mktemp("restored") / "data"
    with ServerProcess(directory) as server:
        at = {"HEADRACE_URL": server.figg_url, "HEADRACE_HTTP": server.http_url}
        with connect_blocking(server.figg_url) as client:
            for topic in ("kept", "head", "tail"):
                # One damaged byte costs a run. Two commits of this size are two runs.
                for half in (lines(0, RECORDS // 2), lines(RECORDS // 2, RECORDS)):
                    for line in half.splitlines():
                        client.publish_nowait(topic, line.encode())
                    client.flush()
        server.terminate()
        head, tail = (path_of(directory, topic) for topic in ("head", "tail"))
        damage(head, 8)
        damage(tail, tail.stat().st_size - 2)
        (directory / "catalogue.sqlite").unlink()
        server.start()
        yield at


def path_of(directory, topic):
    layout = Layout(directory)
    (found,) = (one for one in layout.files(".idx") if topic.encode() in one.path.read_bytes())
    return found.path.with_suffix(".log")


def damage(path, position):
    with path.open("r+b") as file:
        file.seek(position)
        file.write(b"?")


def lines(first, last):
    return "".join(f"{number:06d}\n" for number in range(first, last))


def test_until_end_tells_of_damage_at_the_beginning(headrace, restored):
    done = headrace("subscribe", "head", "--until-end", environ=restored)
    first = RECORDS - done.stdout.count("\n")
    assert 0 < first < RECORDS
    assert done.stdout == lines(first, RECORDS)
    missed = (
        f"missed on head: asked for offset 0, going on at {first * RECORD_BYTES}: expired, lost"
    )
    assert missed in done.stderr
    assert done.returncode == 0


def test_until_end_tells_of_damage_at_the_end_and_ends(headrace, restored):
    done = headrace("subscribe", "tail", "--until-end", environ=restored)
    kept = done.stdout.count("\n")
    assert 0 < kept < RECORDS
    assert done.stdout == lines(0, kept)
    missed = f"missed on tail: asked for offset {kept * RECORD_BYTES}, going on at 4294977296:"
    assert f"{missed} expired, lost" in done.stderr
    assert done.returncode == 0


def test_a_restored_topic_counts_and_prints_what_it_keeps(headrace, restored):
    done = headrace("subscribe", "kept", "--until-end", environ=restored)
    assert (done.stdout, done.stderr) == (lines(0, RECORDS), "")
    assert headrace("publish", "kept", "after", environ=restored).returncode == 0
    done = headrace("inspect", "kept", "--json", environ=restored)
    found = json.loads(done.stdout)
    assert (found["records"], found["bytes"]) == (RECORDS + 1, RECORDS * 10 + 9)
    done = headrace("subscribe", "kept", "--last", 2, "--count", 2, environ=restored)
    assert done.stdout == lines(RECORDS - 1, RECORDS) + "after\n"
    assert "expired" not in done.stderr
    assert "no record is known to be missing" in done.stderr
