"""`headrace channels send`, `follow` and `fetch` against a real server."""

import itertools
import json
import signal

import httpx
import pytest

from headrace.cli import channel_messages
from headrace.testing import ServerProcess, wait_until
from tests.system.access.server import Tokens

_numbers = itertools.count()


@pytest.fixture
def name():
    return f"messages/{next(_numbers)}"


@pytest.fixture
def run(headrace, at):
    def command(*args, code=0, **given):
        done = headrace("channels", *args, environ=at, **given)
        assert done.returncode == code, done.stderr
        return done

    return command


@pytest.fixture
def members(server, name):
    def read():
        told = httpx.get(f"{server.http_url}/v1/channel", params={"name": name}).json()
        return {one["processor"]: one for one in told.get("members", ())}

    return read


def test_a_processor_fetches_what_others_have_sent_and_acknowledges_it(run, name, members):
    assert run("fetch", name, "--as", "reader").stdout == ""
    done = run("send", name, "--as", "writer", "--json", '{"a": "ö"}')
    assert done.stderr == "sent 1 message (11 B)\n"
    run("send", name, "--as", "writer", stdin="two\nthree\n")
    assert run("fetch", name, "--as", "reader", "--count", 1).stdout == '{"a":"ö"}\n'
    assert members()["reader"]["lag_messages"] == 2
    lines = run("follow", name, "--as", "reader", "--until-end", "--json").stdout.splitlines()
    first, second = map(json.loads, lines)
    assert first["channel"] == name
    assert (first["processor"], first["number"], first["payload_bytes"]) == ("writer", 2, "two")
    assert (second["number"], second["payload_bytes"]) == (3, "three")
    assert second["next_offset"] > first["next_offset"]
    assert members()["reader"]["lag_messages"] == 0
    assert "writer" not in members()  # it joined only to send


def test_a_follower_prints_messages_as_they_come(run, name, spawn, members):
    run("fetch", name, "--as", "writer")
    follower = spawn("channels", "follow", name, "--as", "follower", "--leave")
    wait_until(lambda: members().get("follower", {}).get("present"))
    run("send", name, "--as", "writer", "--json", "[1]")
    assert follower.stdout.readline() == b"[1]\n"
    assert "writer" in members()  # it was a member before
    follower.send_signal(signal.SIGINT)
    out, err = follower.communicate(timeout=30)
    assert (follower.returncode, out, err) == (0, b"", b"")
    assert "follower" not in members()


def test_a_sender_needs_no_other_grant_than_to_join(headrace, tmp_path):
    Tokens(tmp_path / "data").add("sender", ["join:room/writer"])
    with ServerProcess(tmp_path / "data") as server:
        environ = {"HEADRACE_HTTP": server.http_url, "HEADRACE_TOKEN": "sender"}
        for number in (1, 2):
            done = headrace("channels", "send", "room", "x", "--as", "writer", environ=environ)
            assert (done.returncode, done.stderr) == (0, "sent 1 message (1 B)\n")
            query = {"name": "room", "processor": "writer"}
            shown = {"Authorization": "Bearer sender"}
            url = f"{server.http_url}/v1/channel/join"
            joined = httpx.post(url, params=query, headers=shown).json()
            assert (joined["number"], joined["was_member"]) == (number, number == 2)
        done = headrace("channels", "send", "room", "x", "--as", "other", environ=environ)
        assert done.returncode == 1
        assert "have no grant for join of channel" in done.stderr


def test_a_message_that_is_no_json_is_refused_before_it_is_sent(run, name):
    done = run("send", name, "--as", "writer", "--json", stdin="1\nnope\n", code=1)
    assert "sent 1 message" in done.stderr
    assert "headrace: message 2 is not JSON" in done.stderr


@pytest.mark.parametrize(("messages", "words"), [(3, "3 messages"), (None, "messages")])
def test_a_processor_learns_what_it_missed(monkeypatch, capsys, messages, words):
    joined = {"missed": {"messages": messages, "reason": "trimmed"}}
    answers = {"/v1/channel/join": joined, "/v1/channel/messages": {"messages": [], "more": False}}
    monkeypatch.setattr(channel_messages, "request", lambda api, method, path, **_: answers[path])
    member = channel_messages.MemberFlags("doc/1", "reader")
    channel_messages._print(member, None, until_end=True, leave=False, as_json=False)
    assert capsys.readouterr().err == f"headrace: channel doc/1: missed {words}: trimmed\n"


def test_a_processor_must_be_named(run):
    assert "--as" in run("send", "x", code=2).stderr
