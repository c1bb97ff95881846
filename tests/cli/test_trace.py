"""`headrace trace` against a real server: what it prints, and what it refuses."""

import json
import re
import signal

from headrace import connect_blocking


def following(spawn, *args):
    """Start a trace, and wait until it follows."""
    process = spawn("trace", *args, text=True)
    assert process.stderr.readline() == "following: Ctrl-C ends it\n"
    return process


def test_what_a_topic_sees_is_printed_without_payloads(spawn, server, topic):
    trace = following(spawn, "--topic", topic)
    with connect_blocking(server.figg_url) as client:
        client.publish(topic, b"secret")
    first = trace.stdout.readline()
    answer = next(line for line in trace.stdout if "ack" in line)
    peer = r"\d\d:\d\d:\d\d\.\d{3}Z 127\.0\.0\.1:\d+"
    assert re.fullmatch(rf"{peer} → figg publish {topic} bytes=6 number=0\n", first)
    assert re.fullmatch(rf"{peer} ← figg ack number=0\n", answer)
    trace.send_signal(signal.SIGINT)
    assert trace.wait(timeout=60) == 130


def test_payloads_cannot_control_the_terminal(spawn, server, topic):
    trace = following(spawn, "--topic", topic, "--payloads")
    with connect_blocking(server.figg_url) as client:
        client.publish(topic, b"a\x1b[31m\nb")
    trace.stdout.readline()
    assert trace.stdout.readline() == "    a\\u001b[31m\\nb\n"


def test_a_line_of_json_has_every_field(spawn, server, topic):
    trace = following(spawn, "--topic", topic, "--peer", "127.0.0.1", "--json")
    with connect_blocking(server.figg_url) as client:
        client.publish(topic, b"foo")
    line = json.loads(trace.stdout.readline())
    assert line.pop("ms") > 0
    assert line.pop("peer").startswith("127.0.0.1:")
    assert (line.pop("protocol"), line.pop("direction")) == ("figg", "in")
    assert line == {"kind": "publish", "topic": topic, "bytes": 3, "number": 0}


def test_somebody_must_be_followed(headrace, at):
    done = headrace("trace", environ=at)
    assert done.returncode == 2
    assert "--topic NAME, --peer NAME" in done.stderr


def test_a_server_that_is_not_there_is_named(headrace):
    done = headrace("trace", "--topic", "t", "--http", "127.0.0.1:1")
    assert done.returncode == 1
    assert "127.0.0.1:1" in done.stderr
