"""`headrace logux add` and `headrace logux follow` against a real server."""

import itertools
import json

import pytest

_numbers = itertools.count()


@pytest.fixture
def log():
    return f"log {next(_numbers)}/ü"


@pytest.fixture
def run(headrace, at, server):
    ws = "{}:{}".format(*server.ws)

    def command(*args, code=0, **given):
        done = headrace("logux", *args, environ=at | {"HEADRACE_WS": ws}, **given)
        assert done.returncode == code, done.stderr
        return done

    return command


def test_events_are_added_and_followed(run, log):
    assert run("add", log, '{"type": "a", "x": "ö"}').stderr == "added 1 event\n"
    done = run("add", log, "--host", "cli", stdin='{"type": "b"}\n{"type": "c"}\n')
    assert done.stderr == "added 2 events\n"
    lines = run("follow", log, "--until-end").stdout.splitlines()
    assert [json.loads(line)["type"] for line in lines] == ["a", "b", "c"]
    lines = run("follow", log, "--last", 2, "--count", 2, "--json").stdout.splitlines()
    told = [json.loads(line) for line in lines]
    assert [one["event"] for one in told] == [{"type": "b"}, {"type": "c"}]
    assert all(" cli " in one["id"] for one in told)
    assert told[0]["next_offset"] == told[1]["offset"]


def test_what_is_no_event_is_refused(run, log):
    done = run("add", log, stdin='{"type": "a"}\nnope\n', code=1)
    assert "headrace: event 2 is not JSON" in done.stderr
    (line,) = run("follow", log, "--until-end").stdout.splitlines()
    assert json.loads(line) == {"type": "a"}, "the event before it is stored"
    assert "a string `type`" in run("add", log, "{}", code=1).stderr


def test_without_a_server_it_fails_in_one_line(run, log):
    done = run("add", log, '{"type": "a"}', "--ws", "127.0.0.1:1", "--timeout", "0.2", code=1)
    assert done.stderr.count("\n") == 1
    assert "no server at 127.0.0.1:1; is it running?" in done.stderr
    assert "0 events" not in done.stderr
    assert "ftp://x" in run("add", log, "{}", "--ws", "ftp://x", code=2).stderr


def test_help_shows_names_without_types_and_the_group_alone_shows_its_help(run):
    assert "headrace logux add [OPTIONS] LOG [EVENT]" in run("add", "--help").stdout
    assert "<str>" not in run("add", "--help").stdout
    assert "follow  Print the events" in run().stdout
    assert 'there is no command "ad"' in run("ad", code=2).stderr


def test_quiet_leaves_the_count_out(run, log):
    assert run("add", log, '{"type": "a"}', "-q").stderr == ""


def test_what_is_nested_too_deeply_is_refused_in_one_line(run, log):
    done = run("add", log, stdin="[" * 50_000 + "]" * 50_000 + "\n", code=1)
    assert done.stderr == "headrace: event 1 is nested too deeply\n"


def test_the_variable_of_the_address_is_no_wrong_setting(run, headrace):
    assert headrace("config", environ={"HEADRACE_WS": "127.0.0.1:8120"}).returncode == 0
