"""`headrace topics`, `inspect`, `delete` and `verify` against a real server and its directory."""

import json
import os
import pty
import re

import httpx
import pytest
from rich.console import Console

from headrace import __version__, connect_blocking
from headrace.cli import topics
from headrace.cli.common import output
from headrace.cli.common.options import HttpFlags
from headrace.testing import ServerProcess


@pytest.fixture
def run(headrace, at):
    def command(*args, code=0):
        done = headrace(*args, environ=at)
        assert done.returncode == code, done.stderr
        return done

    return command


def test_topics_lists_each_topic_with_its_range(run, topic):
    run("publish", topic, "foo")
    run("publish", topic, "bar")
    line = run("topics", topic).stdout.splitlines()[1]
    assert re.match(rf"{topic} +synced +2 +14 B +14 +0 +\d{{4}}-", line)
    (found,) = map(json.loads, run("topics", topic, "--json").stdout.splitlines())
    assert found["name"] == topic
    assert found["end"] == {"offset": 14, "ordinal": 2}


@pytest.mark.parametrize("width", [40, 80, 100])
def test_a_narrow_terminal_does_without_columns_and_breaks_no_cell(capsys, monkeypatch, width):
    name = "a-name/that-is-much/longer-than/the-terminal-is-wide/by-some-characters-more"
    listed = {
        "name": name,
        "durability": "synced",
        "records": 123_456_789_012,
        "bytes": 1_000 << 30,
        "start": {"offset": 0},
        "end": {"offset": 1_234_567_890_123},
        "subscribers": 1234,
        "last_ms": 1_750_000_000_000,
    }
    monkeypatch.setattr(topics, "all_topics", lambda base, prefix: [listed])
    monkeypatch.setattr(output, "console", lambda: Console(width=width))
    topics.topics(server=HttpFlags())
    shown = capsys.readouterr()
    heading, row = shown.out.splitlines()
    assert heading.split() == ["topic", "records", "size", "subs"]
    assert row.split() == [name, "123,456,789,012", "1000", "GiB", "1234"]
    assert "not shown, for lack of width: durability, end, last record" in shown.err


def test_topics_shows_how_far_readers_are_behind(run, topic, server):
    for payload in ("foo", "bar", "car"):
        run("publish", topic, payload)
    run("publish", f"{topic}+", "nobody's")
    for reader, ordinal in (("group:a", 1), ("b\n", 3)):
        place = {"topic": topic, "epoch": 0, "offset": 7 * ordinal, "ordinal": ordinal}
        body = {"reader": reader, "positions": [place]}
        assert httpx.post(server.http_url + "/v1/cursors", json=body).status_code == 200
    lines = run("topics", topic).stdout.splitlines()
    assert lines[0].rstrip().endswith("readers")
    assert lines[1].rstrip().endswith(r'"b\n" 0, group:a -2')
    assert lines[2].rstrip().endswith("Z")
    first, second = map(json.loads, run("topics", topic, "--json").stdout.splitlines())
    assert [(one["reader"], one["lag_records"]) for one in first["cursors"]] == [
        ("b\n", 0),
        ("group:a", 2),
    ]
    assert second["cursors"] == []
    shown = run("inspect", topic).stdout
    assert re.search(r"group:a +7 +1 +2 +14 B +0 ", shown)
    run("delete", topic, "--yes")
    run("publish", topic, "new")
    assert "group:a -1 (2 gone)" in run("topics", topic).stdout


def test_topics_shows_what_log_and_lake_hold(run, topic, server):
    for payload in ("foo", "bar", "car"):
        run("publish", topic, payload)
    for reader, ordinal in (("lake:start", 0), ("lake", 1), ("group:a", 3)):
        place = {"topic": topic, "epoch": 0, "offset": 7 * ordinal, "ordinal": ordinal}
        body = {"reader": reader, "positions": [place]}
        assert httpx.post(server.http_url + "/v1/cursors", json=body).status_code == 200
    heading, row = run("topics", topic).stdout.splitlines()
    assert heading.split()[4:8] == ["end", "log", "lake", "lag"]
    assert re.search(r" 21 +0–21 +0–7 +2 +0 ", row)
    assert row.rstrip().endswith("Z  group:a 0")


def test_a_directory_shows_readers_without_a_server(tmp_path, headrace):
    with ServerProcess(tmp_path / "data") as server:
        headrace("publish", "t", "foo", environ={"HEADRACE_URL": server.figg_url})
        place = {"topic": "t", "epoch": 0, "offset": 0, "ordinal": 0}
        body = {"reader": "group:a", "positions": [place]}
        assert httpx.post(server.http_url + "/v1/cursors", json=body).status_code == 200
        online = httpx.get(server.http_url + "/v1/topic?name=t").json()["cursors"]
        server.terminate()
    found = headrace("inspect", "t", "--data-dir", tmp_path / "data", "--json")
    assert json.loads(found.stdout)["cursors"] == online


def test_topics_can_be_narrowed_to_a_prefix(run, topic):
    for name in (f"{topic}/a", f"{topic}/b", f"{topic}+c"):
        run("publish", name, "x")
    names = [
        json.loads(line)["name"]
        for line in run("topics", f"{topic}/", "--json").stdout.splitlines()
    ]
    assert names == [f"{topic}/a", f"{topic}/b"]


def test_a_prefix_is_an_option_too(run, topic):
    run("publish", f"{topic}/a", "x")
    assert run("topics", "--prefix", f"{topic}/").stdout == run("topics", f"{topic}/").stdout
    assert run("topics", "--prefix", "no such prefix", "--quiet").stderr == ""


def test_status_is_one_screen_about_the_server(run, topic, server):
    run("publish", topic, "foo")
    shown = run("status").stdout
    assert re.search(rf"^server +headrace {re.escape(__version__)}, up \d+", shown, re.MULTILINE)
    assert re.search(r"^health +ok *$", shown, re.MULTILINE)
    for name, address in (("figg", server.figg), ("ws", server.ws), ("http", server.http)):
        assert re.search(rf"^listen\.{name} +{address[0]}:{address[1]}", shown, re.MULTILINE)
    assert re.search(r"^log +[\d,]+ topics?, [\d,]+ records?, [\d.,]+ \w+", shown, re.MULTILINE)
    assert re.search(r"^retention +7d", shown, re.MULTILINE)
    told = json.loads(run("status", "--json").stdout)
    assert told["health"] == {"status": "ok"}
    assert told["topics"] >= 1
    assert told["records"] >= 1
    assert set(told["connections"]) == {"figg", "wombat", "logux", "channel"}


def test_the_health_alone_is_one_word(run):
    assert run("status", "--health").stdout == "ok\n"


def test_a_shell_can_complete_topics(headrace, at, run, topic):
    run("publish", f"{topic}-completed", "x")
    environ = {"_HEADRACE_COMPLETE": "complete_bash", "COMP_CWORD": "2"}
    words = {"COMP_WORDS": f"headrace inspect {topic}-com"}
    assert headrace(environ=at | environ | words).stdout.split() == [f"{topic}-completed"]
    nowhere = {"HEADRACE_HTTP": "127.0.0.1:1"}
    assert headrace(environ=at | environ | words | nowhere).stdout.strip() == ""


def test_no_topics_is_said_and_no_failure(run):
    done = run("topics", "no such prefix")
    assert (done.stdout, done.stderr) == ("", 'no topics begin with "no such prefix"\n')


def test_more_topics_than_one_page_are_all_listed(headrace, tmp_path):
    with ServerProcess(tmp_path / "data", "--durability=memory") as server:
        publish_to_many(server, 2500)
        done = headrace("topics", "--json", "--http", server.http_url)
        names = [json.loads(line)["name"] for line in done.stdout.splitlines()]
    assert names == [f"many-{n:04}" for n in range(2500)]


def test_a_name_with_control_characters_cannot_reach_the_terminal(run, topic):
    run("publish", f"{topic}\x1b[31m", "x")
    shown = run("topics", topic).stdout
    assert "\x1b" not in shown
    assert f'"{topic}\\u001b[31m"' in shown


def test_inspect_shows_segments_and_subscribers(run, spawn, topic):
    run("publish", topic, "foo")
    subscriber = spawn("subscribe", topic, "--from-start")
    assert subscriber.stdout.readline() == b"foo\n"
    shown = run("inspect", topic).stdout
    assert re.search(rf"^topic +{topic} *$", shown, re.MULTILINE)
    assert re.search(r"^offsets +0 to 7 \(7 B\) *$", shown, re.MULTILINE)
    assert re.search(r"^ordinals +0 to 1 \(1 record\) *$", shown, re.MULTILINE)
    assert re.search(r"^127\.0\.0\.1:\d+ +figg +7 +live *$", shown, re.MULTILINE)


def test_inspect_reads_the_directory_where_no_server_runs(headrace, tmp_path):
    with ServerProcess(tmp_path / "data") as server:
        assert headrace("publish", "t", "foo", "--url", server.figg_url).returncode == 0
        online = json.loads(headrace("inspect", "t", "--json", "--http", server.http_url).stdout)
        assert server.terminate() == 0
    done = headrace("inspect", "t", "--json", "--data-dir", "data")
    assert done.returncode == 0, done.stderr
    offline = json.loads(done.stdout)
    assert offline["end"] == online["end"] == {"offset": 7, "ordinal": 1}
    assert [segment["records"] for segment in offline["segments"]] == [1]


@pytest.mark.parametrize("command", [["inspect"], ["delete", "--yes"]])
def test_an_unknown_topic_is_one_clear_line(run, command):
    done = run(*command, "no such topic", code=1)
    assert re.fullmatch(r"headrace: [^\n]*no such topic[^\n]*\n", done.stderr)


def test_a_deleted_topic_is_gone_and_its_name_goes_on_where_it_ended(run, topic):
    run("publish", topic, "foo")
    assert run("delete", topic, "--yes").stderr == f"deleted {topic}, which ended at offset 7\n"
    assert run("topics", topic).stdout == ""
    run("publish", topic, "bar")
    line = run("subscribe", topic, "--from-start", "--count", 1, "--json").stdout
    assert json.loads(line) == {"topic": topic, "offset": 7, "next_offset": 14, "payload": "bar"}


def test_verify_finds_a_sound_log_sound_and_a_damaged_one_damaged(headrace, tmp_path):
    with ServerProcess(tmp_path / "data") as server:
        for topic in ("sound", "hurt"):
            done = headrace("publish", topic, "payload of " + topic, "--url", server.figg_url)
            assert done.returncode == 0
        assert server.terminate() == 0
    done = headrace("verify", "--data-dir", "data")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("nothing damaged\n")

    damage(tmp_path / "data", b"payload of hurt")
    done = headrace("verify", "--data-dir", "data")
    assert done.returncode == 1
    assert re.search(r"^hurt: damaged", done.stdout, re.MULTILINE)
    assert re.search(r"^sound: ok", done.stdout, re.MULTILINE)
    assert headrace("verify", "sound", "--data-dir", "data").returncode == 0
    report = json.loads(headrace("verify", "--json", "--data-dir", "data").stdout)
    assert report["damaged"] is True


def test_deleting_an_unknown_topic_asks_nothing(spawn):
    primary, secondary = pty.openpty()
    deleting = spawn("delete", "no such topic", stdin=secondary)
    os.close(secondary)
    _, errors = deleting.communicate(timeout=30)
    os.close(primary)
    assert deleting.returncode == 1
    assert re.fullmatch(r"headrace: [^\n]*no such topic[^\n]*\n", errors.decode())


def test_verify_of_a_directory_that_is_none_is_one_clear_line(headrace, tmp_path):
    done = headrace("verify", "--data-dir", "missing")
    assert done.returncode == 1
    assert re.fullmatch(r"headrace: [^\n]*missing[^\n]*\n", done.stderr)


def damage(directory, payload: bytes) -> None:
    """Flip one bit of a payload wherever the log stores it, including the journal."""
    hits = 0
    for file in directory.rglob("*"):
        if file.is_file() and payload in (data := file.read_bytes()):
            at = data.index(payload)
            with file.open("r+b") as out:
                out.seek(at)
                out.write(bytes([data[at] ^ 1]))
            hits += 1
    assert hits


def publish_to_many(server: ServerProcess, count: int) -> None:
    with connect_blocking(server.figg_url) as client:
        for n in range(count):
            client.publish_nowait(f"many-{n:04}", b"x")
            if n % 100 == 99:
                client.flush()
