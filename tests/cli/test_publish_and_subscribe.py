"""`headrace publish` and `headrace subscribe` against a real server."""

import base64
import json
import os
import pty
import re
import signal
import subprocess
import time

import pytest

from headrace.testing import ServerProcess


@pytest.fixture
def publish(headrace, at, topic):
    def run(*payloads: bytes) -> None:
        done = headrace(
            "publish", topic, stdin=b"".join(p + b"\n" for p in payloads), text=False, environ=at
        )
        assert done.returncode == 0, done.stderr

    return run


@pytest.fixture
def subscribe(headrace, at, topic):
    def run(*args, text=True, **options):
        done = headrace("subscribe", topic, *args, environ=at, text=text, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_one_record_from_the_command_line(headrace, at, topic, subscribe):
    done = headrace("publish", topic, "hello, wörld", environ=at)
    assert done.returncode == 0
    assert done.stdout == ""
    assert done.stderr.startswith("published 1 record (13 B)")
    assert subscribe("--from-start", "--count", 1) == "hello, wörld\n"


def test_a_record_may_begin_with_a_dash_after_two_dashes(headrace, at, topic, subscribe):
    assert headrace("publish", topic, "--", "-x", environ=at).returncode == 0
    assert subscribe("--from-start", "--count", 1) == "-x\n"


def test_an_argument_keeps_its_bytes(headrace, at, topic, subscribe):
    assert headrace("publish", topic, b"\xff\xfe", environ=at).returncode == 0
    assert subscribe("--from-start", "--count", 1, text=False) == b"\xff\xfe\n"


@pytest.mark.parametrize("dash", [[], ["-"]])
def test_each_line_of_standard_input_is_a_record(headrace, at, topic, subscribe, dash):
    done = headrace("publish", topic, *dash, stdin="one\n\ntwo", environ=at)
    assert done.stderr.startswith("published 3 records (6 B)")
    lines = subscribe("--from-start", "--count", 3, "--json").splitlines()
    assert [json.loads(line)["payload"] for line in lines] == ["one", "", "two"]


def test_no_input_publishes_nothing_and_is_no_failure(headrace, at, topic):
    done = headrace("publish", topic, stdin="", environ=at)
    assert (done.returncode, done.stderr) == (0, "published nothing: there was no input\n")


def test_each_line_of_a_file_is_a_record_in_order(headrace, at, topic, subscribe, tmp_path):
    lines = [f"{n}:{'x' * (n % 300)}" for n in range(20_000)]
    (tmp_path / "lines").write_text("\n".join(lines) + "\n")
    done = headrace("publish", topic, "--file", "lines", environ=at)
    assert done.returncode == 0
    assert done.stderr.startswith("published 20,000 records")
    assert subscribe("--from-start", "--count", 20_000).splitlines() == lines


def test_the_largest_record_fits_and_a_larger_line_is_named(headrace, at, topic, subscribe):
    text = "x" * 262_144
    done = headrace("publish", topic, stdin=f"{text}\nshort\n{text}x\nlost\n", environ=at)
    assert done.returncode == 1
    assert "headrace: line 3 is longer than 262,144 bytes" in done.stderr
    assert "published 2 records" in done.stderr
    assert subscribe("--from-start", "--count", 2) == f"{text}\nshort\n"


def test_a_line_is_published_before_the_next_is_written(spawn, topic, subscribe):
    publisher = spawn("publish", topic, stdin=subprocess.PIPE)
    publisher.stdin.write(b"early\n")
    publisher.stdin.flush()
    assert subscribe("--from-start", "--count", 1) == "early\n"
    assert publisher.poll() is None
    publisher.stdin.close()
    assert publisher.wait(30) == 0
    publisher.stdin = None


def test_a_publisher_that_waits_for_input_can_be_interrupted(spawn, topic, subscribe):
    publisher = spawn("publish", topic, stdin=subprocess.PIPE)
    publisher.stdin.write(b"early\n")
    publisher.stdin.flush()
    subscribe("--from-start", "--count", 1)
    publisher.send_signal(signal.SIGINT)
    assert publisher.wait(30) == 130
    assert b"Traceback" not in publisher.stderr.read()


def test_a_publisher_whose_server_dies_says_what_was_not_acknowledged(
    headrace, environment, tmp_path, spawn
):
    with ServerProcess(tmp_path / "data") as server:
        publisher = spawn(
            "publish", "t", "--url", server.figg_url, "--timeout", 3, stdin=subprocess.PIPE
        )
        publisher.stdin.write(b"one\n")
        publisher.stdin.flush()
        read = headrace("subscribe", "t", "--from-start", "--count", 1, "--url", server.figg_url)
        assert read.stdout == "one\n"
        server.kill()
        publisher.stdin.write(b"two\n")
        publisher.stdin.close()
        assert publisher.wait(30) == 1
        publisher.stdin = None
        errors = publisher.stderr.read().decode()
    assert "only 1 of 2 records acknowledged" in errors
    assert f"headrace: no connection to {server.figg_url} for 3 s" in errors


def test_subscribing_begins_with_what_is_published_later(spawn, publish, topic, headrace, at):
    publish(b"before")
    subscriber = spawn("subscribe", topic, "--count", 1)
    wait_for_subscriber(headrace, at, topic)
    publish(b"after")
    assert subscriber.communicate(timeout=30)[0] == b"after\n"
    assert subscriber.returncode == 0


def test_subscribing_from_an_offset_begins_with_the_record_there(publish, subscribe):
    publish(b"foo", b"bar", b"car")
    assert subscribe("--from-offset", 7, "--count", 2) == "bar\ncar\n"


@pytest.mark.parametrize(
    ("last", "expected"), [(1, "car\n"), (2, "bar\ncar\n"), (9, "foo\nbar\ncar\n")]
)
def test_subscribing_to_the_last_records(publish, subscribe, last, expected):
    publish(b"foo", b"bar", b"car")
    assert subscribe("--last", last, "--count", min(last, 3)) == expected


def test_subscribing_since_a_time(publish, subscribe):
    publish(b"old")
    time.sleep(0.3)  # longer than the maximum duration of a run in the index
    now_ms = time.time_ns() // 1_000_000
    time.sleep(0.01)  # the server's time may be a millisecond behind
    publish(b"new")
    assert subscribe("--since", "1h", "--count", 2) == "old\nnew\n"
    assert subscribe("--since", now_ms, "--count", 1) == "new\n"


def test_json_has_the_offset_just_past_the_record(publish, subscribe, topic):
    publish(b"foo", b'"q"\t\xc3\xa9', b"\xff")
    lines = [
        json.loads(line) for line in subscribe("--from-start", "--count", 3, "--json").splitlines()
    ]
    assert lines == [
        {"topic": topic, "offset": 0, "next_offset": 7, "payload": "foo"},
        {"topic": topic, "offset": 7, "next_offset": 17, "payload": '"q"\té'},
        {
            "topic": topic,
            "offset": 17,
            "next_offset": 22,
            "payload_base64": base64.b64encode(b"\xff").decode(),
        },
    ]


def test_what_an_offset_past_the_end_missed_is_said(spawn, publish, topic):
    publish(b"foo")
    subscriber = spawn("subscribe", topic, "--from-offset", 1000)
    line = subscriber.stderr.readline().decode()
    assert line == f"headrace: missed on {topic}: offset 1000 is past the end; going on at 7\n"


def test_an_offset_inside_a_record_is_said(spawn, publish, topic):
    publish(b"foo", b"bar")
    subscriber = spawn("subscribe", topic, "--from-offset", 3)
    line = subscriber.stderr.readline().decode()
    assert re.fullmatch(
        rf"headrace: missed on {topic}: asked for offset 3, going on at \d+: "
        r"expired, lost, or not the start of a record\n",
        line,
    )


def test_a_topic_that_does_not_exist_is_said_and_waited_for(spawn, publish, topic):
    subscriber = spawn("subscribe", topic, "--from-start", "--count", 1)
    line = subscriber.stderr.readline().decode()
    assert line == f'headrace: topic "{topic}" does not exist yet: waiting\n'
    publish(b"foo")
    assert subscriber.communicate(timeout=30) == (b"foo\n", b"")


def test_until_end_prints_what_there_is_and_ends(publish, subscribe):
    publish(b"foo", b"bar", b"car")
    assert subscribe("--until-end") == "foo\nbar\ncar\n"
    assert subscribe("--until-end", "--from-start") == "foo\nbar\ncar\n"
    assert subscribe("--until-end", "--last", 1) == "car\n"
    assert subscribe("--until-end", "--from-offset", 7, "--count", 1) == "bar\n"
    assert subscribe("--until-end", "--from-offset", 21) == ""
    assert subscribe("--until-end", "--last", 0) == ""


def test_until_end_of_an_unknown_topic_says_so_and_fails(headrace, at):
    done = headrace("subscribe", "unknown/topic", "--until-end", environ=at)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == 'headrace: there is no topic "unknown/topic"\n'


def test_what_subscribe_prints_as_json_can_be_published(headrace, at, topic, publish, subscribe):
    payloads = [b"plain", b'{"a": 1}', "wörld".encode(), b"\xff\x00", b""]
    publish(*payloads)
    lines = subscribe("--until-end", "--json")
    copy = f"{topic}-copy"
    done = headrace("publish", copy, "--json", stdin=lines, environ=at)
    assert done.returncode == 0, done.stderr
    args = ("--until-end", "--json")
    copied = headrace("subscribe", copy, *args, environ=at).stdout.splitlines()
    wanted = [json.loads(line) | {"topic": copy} for line in lines.splitlines()]
    assert [json.loads(line) for line in copied] == wanted
    # Without TOPIC, each line names its topic. With --quiet, the command prints nothing about it.
    done = headrace("publish", "--json", "--quiet", stdin=lines, environ=at)
    assert (done.returncode, done.stderr) == (0, "")
    assert subscribe("--until-end", text=False).count(b"\n") == 2 * len(payloads)


def test_a_wrong_line_of_json_is_named_and_those_before_it_are_published(
    headrace, at, topic, subscribe
):
    lines = '{"payload": "one"}\n\n{"payload": 5}\n{"payload": "two"}\n'
    done = headrace("publish", topic, "--json", stdin=lines, environ=at)
    assert done.returncode == 1
    assert "headrace: line 3: payload must be a string" in done.stderr
    assert subscribe("--until-end") == "one\n"


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [("figg", "the server broke the protocol"), ("wombat", r"the server answered \d+")],
)
def test_a_port_that_speaks_something_else_is_given_up_in_time(headrace, at, scheme, reason):
    url = f"{scheme}://" + at["HEADRACE_HTTP"].removeprefix("http://")
    done = headrace("publish", "t", "x", "--url", url, "--timeout", 2)
    assert done.returncode == 1
    assert re.fullmatch(
        rf"headrace: no connection [^\n]+ within 2 s: {reason}: [^\n]+"
        r"; is it the server's address for this protocol\?\n",
        done.stderr,
    )


def test_every_protocol_can_be_spoken(headrace, server, at, topic):
    for url, data in ((server.figg_url, "one"), (server.wombat_url, "two")):
        assert headrace("publish", topic, data, "--url", url).returncode == 0
    for url in (server.figg_url, server.wombat_url):
        everything = headrace("subscribe", topic, "--from-start", "--count", 2, "--url", url)
        assert (everything.returncode, everything.stdout) == (0, "one\ntwo\n")
        last = headrace("subscribe", topic, "--last", 1, "--count", 1, "--url", url, environ=at)
        assert (last.stdout, last.stderr) == ("two\n", "")


def test_ctrl_c_ends_a_subscriber_quietly(spawn, publish, topic, headrace, at):
    publish(b"before")
    subscriber = spawn("subscribe", topic)
    wait_for_subscriber(headrace, at, topic)
    subscriber.send_signal(signal.SIGINT)
    assert subscriber.communicate(timeout=30) == (b"", b"")
    assert subscriber.returncode == 0


def test_a_subscriber_ends_when_nobody_reads_its_output(spawn, publish, topic):
    publish(b"foo")
    subscriber = spawn("subscribe", topic, "--from-start")
    assert subscriber.stdout.readline() == b"foo\n"
    subscriber.stdout.close()
    assert subscriber.wait(30) == 0
    assert subscriber.stderr.read() == b""
    subscriber.stdout = None


def test_a_subscriber_goes_on_after_its_server_comes_back(headrace, spawn, tmp_path):
    with ServerProcess(tmp_path / "data") as server:
        url = ["--url", server.figg_url]
        assert headrace("publish", "t", "one", *url).returncode == 0
        subscriber = spawn("subscribe", "t", "--from-start", "--count", 2, *url)
        assert subscriber.stdout.readline() == b"one\n"
        server.kill()
        server.start()
        assert headrace("publish", "t", "two", *url).returncode == 0
        out, errors = subscriber.communicate(timeout=30)
    assert out == b"two\n"
    assert subscriber.returncode == 0
    assert errors.decode().endswith("; trying again\n")


def test_a_long_file_shows_its_progress_on_a_terminal(spawn, topic, tmp_path):
    (tmp_path / "lines").write_bytes((b"x" * 99 + b"\n") * 600_000)
    primary, secondary = pty.openpty()
    publisher = spawn("publish", topic, "--file", "lines", stderr=secondary)
    os.close(secondary)
    shown = b""
    while True:
        try:
            shown += os.read(primary, 65536)
        except OSError:  # the terminal reports in this way that its other end is closed
            break
    os.close(primary)
    assert publisher.wait(30) == 0
    assert b"MiB" in shown
    assert b"published 600,000 records" in shown


def wait_for_subscriber(headrace, at, topic) -> None:
    for _ in range(50):
        listed = headrace("topics", topic, "--json", environ=at).stdout
        if any(json.loads(line)["subscribers"] for line in listed.splitlines()):
            return
    raise AssertionError("no subscriber appeared")


def test_positions_are_not_asked_of_another_server_than_the_messages(headrace):
    done = headrace("subscribe", "t", "--last", "1", "--url", "wombat://example.test:8120")
    assert done.returncode == 2
    assert "name it as well as --url, with --http" in " ".join(done.stderr.split())


def test_a_reader_goes_on_where_it_stopped_and_its_lag_is_shown(headrace, at, topic, publish):
    publish(b"a", b"b", b"c")

    def read(*args):
        done = headrace("subscribe", topic, "--reader", "billing", *args, environ=at)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert read("--count", 2) == "a\nb\n"
    assert "billing -1" in headrace("topics", topic, environ=at).stdout
    (line,) = map(json.loads, read("--until-end", "--json").splitlines())
    assert (line["payload"], line["ordinal"], line["offset"], line["next_offset"]) == (
        "c",
        2,
        10,
        15,
    )
    assert line["epoch"] > 0 and line["time"] > 1.7e9
    assert "billing 0" in headrace("topics", topic, environ=at).stdout
    assert read("--until-end") == ""


def test_a_second_process_of_a_reader_waits_and_takes_over(spawn, topic, publish):
    publish(b"a")
    first = spawn("subscribe", topic, "--reader", "r")
    assert first.stdout.readline() == b"a\n"
    second = spawn("subscribe", topic, "--reader", "r", "--count", "1")
    assert b"another process reads as r: waiting" in second.stderr.readline()
    first.send_signal(signal.SIGINT)
    assert first.wait(30) == 0
    publish(b"b")
    assert second.communicate(timeout=30)[0] == b"b\n"


def test_what_cannot_be_meant_of_a_reader_is_refused(headrace, at, topic, publish):
    publish(b"a")
    for args, words in (
        (("--reader", "r", "--from-start"), "exclude each other"),
        (("--reader", "r", "--start", "now"), "--start"),
        (("--reader", "lake"), "choose another name"),
        (("--reader", "lake", "--until-end"), "choose another name"),
        (("--reader", ""), "must not be empty"),
    ):
        done = headrace("subscribe", topic, *args, environ=at)
        assert done.returncode != 0
        assert words in done.stderr
