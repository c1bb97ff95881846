"""`headrace channels`, `explain` and `keep` against a real server whose members come and go."""

import itertools
import json
import re
from contextlib import contextmanager

import httpx
import pytest
from websockets.sync.client import connect

from headrace.printing import quoted
from headrace.testing import ServerProcess, wait_until

CONFIG = """
[channels]
presence_s = 0.2
[[topics]]
prefix = "$channel/brief/"
lease_s = 0.2
[[topics]]
prefix = "$channel/ends/"
grace_s = 0.2
[[topics]]
prefix = "$channel/uploaded/"
reducer = "uploaded"
[[topics]]
prefix = "$channel/waited/"
retention_wait_for = ["group:w"]
[[topics]]
prefix = "$channel/broken/"
reducer = "broken:reduce"
grace_s = 0.2
"""

BROKEN = "def reduce(state, message):\n    raise ValueError('no idea')\n"

_numbers = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("channels")
    (directory / "config.toml").write_text(CONFIG)
    (directory / "broken.py").write_text(BROKEN)
    flags = [f"--config={directory / 'config.toml'}", "--set", "journal.rotate_s=0.2"]
    with ServerProcess(directory / "data", *flags, env={"PYTHONPATH": str(directory)}) as server:
        yield server
        assert "Traceback" not in server.stderr, server.stderr


@pytest.fixture
def run(headrace, at):
    def command(*args, code=0):
        done = headrace("channels", *args, environ=at)
        assert done.returncode == code, done.stderr
        return done

    return command


@pytest.fixture
def api(server):
    with httpx.Client(base_url=server.http_url) as client:
        yield Api(client)


class Api:
    def __init__(self, client):
        self.client = client

    def ask(self, method, path, **query):
        options = {key: query.pop(key) for key in ("json", "content") if key in query}
        answer = self.client.request(method, path, params=query, **options)
        assert answer.is_success, answer.text
        return answer.json()

    def join(self, name, processor):
        return self.ask("POST", "/v1/channel/join", name=name, processor=processor)

    def send(self, name, processor, number, payload="x"):
        query = {"name": name, "processor": processor, "number": number, "json": payload}
        return self.ask("POST", "/v1/channel/messages", **query)["offset"]

    def facts(self, name):
        return self.ask("GET", "/v1/channel", name=name)

    def wait(self, name, condition):
        """Wait until a condition on the facts of a channel holds."""
        wait_until(lambda: condition(self.facts(name)), 30, f"{name}: {self.facts(name)}")


@pytest.fixture
def name():
    return f"doc/{next(_numbers)}"


@contextmanager
def subscriber(server, name, processor, receive="push"):
    host, port = server.ws
    with connect(f"ws://{host}:{port}/v1/channels") as connection:
        for message in (
            {"type": "hello", "processor": processor},
            {"type": "join", "channel": name, "receive": receive},
        ):
            connection.send(json.dumps(message))
            answer = json.loads(connection.recv(30))
            assert answer["type"] in ("welcome", "joined"), answer
        yield connection


def everyone_is_away(told):
    return not any(member["present"] for member in told["members"])


def test_the_list_shows_each_channel_with_its_members(run, api, server, name):
    api.join(name, "b")
    with subscriber(server, name, "a"):
        end = api.send(name, "b", 1) and api.send(name, "b", 2)
        api.join(name, "late")
        api.wait(name, lambda told: sum(one["present"] for one in told["members"]) == 1)
        lines = run("--prefix", name).stdout.splitlines()
    assert lines[0].split() == [
        *("channel", "messages", "size", "snapshot", "destroyed"),
        *("member", "cursor", "lag", "lease"),
    ]
    assert re.fullmatch(rf"{name} +2 +{end} B +- +- +a +0 +2 +here *", lines[1])
    assert re.fullmatch(rf" +b +{end} +0 +\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\dZ *", lines[2])
    assert re.match(r" +late +0 +2 +\d{4}-", lines[3])
    (found,) = map(json.loads, run("--prefix", name, "--json").stdout.splitlines())
    assert found["name"] == name
    assert [one["processor"] for one in found["members"]] == ["a", "b", "late"]


def test_no_channels_is_said_and_no_failure(run):
    done = run("--prefix", "no such prefix")
    assert (done.stdout, done.stderr) == ("", 'no channels begin with "no such prefix"\n')


def test_more_channels_than_one_page_are_all_listed(run, api):
    names = [f"many/{number:03}" for number in range(205)]
    for one in names:
        api.join(one, "a")
    listed = run("--prefix", "many/", "--json").stdout.splitlines()
    assert [json.loads(line)["name"] for line in listed] == names


def test_control_characters_cannot_reach_the_terminal(run, api, name):
    name = f"{name}\x1b[31m"
    api.join(name, "a")
    api.send(name, "a", 1)  # only a channel with a log can be kept
    for args in (["--prefix", name], ["explain", name], ["keep", name]):
        done = run(*args)
        assert "\x1b" not in done.stdout + done.stderr
    assert quoted(name) in run("explain", name).stdout


def test_explain_says_who_is_there_and_whose_cursor_holds_the_log(run, api, server, name):
    api.join(name, "away")
    with subscriber(server, name, "here", "signal"):
        api.send(name, "away", 1)
        api.wait(name, lambda told: sum(one["present"] for one in told["members"]) == 1)
        text = run("explain", name).stdout
    assert f"{name} has 1 message (" in text
    assert re.search(
        r"^away is away; its cursor is at \d+, with nothing behind it; it counts ",
        text,
        re.MULTILINE,
    )
    assert (
        "here is there (signal); its cursor is at 0, 1 message behind, and holds the log while"
        in text
    )
    assert "There is no snapshot yet; the reducer is last." in text
    assert "needed from offset 0 on" in text
    assert "1 subscriber there: when the last is gone for 5 min" in text


def test_explain_says_until_when_a_lease_holds_the_log(run, api, name):
    api.join(name, "a")
    api.join(name, "b")
    api.send(name, "a", 1)
    api.wait(name, everyone_is_away)
    text = run("explain", name).stdout
    assert re.search(
        r"^b is away; its cursor is at 0, 1 message behind, and holds the log until its lease ends at "
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ \(in [67] days\)\.$",
        text,
        re.MULTILINE,
    )


def test_explain_tells_of_a_lease_that_has_ended_and_of_what_was_missed(run, api, server):
    name = "brief/1"
    api.join(name, "b")
    api.wait(name, everyone_is_away)
    with subscriber(server, name, "a"):
        end = api.send(name, "a", 1)
        api.wait(name, lambda told: told["start"] == end)
        text = run("explain", name).stdout
        assert re.search(r" ended *$", run("--prefix", name).stdout, re.MULTILINE)
    assert re.search(
        r"^b is away, and its lease ended at .* ago\): it holds nothing; ", text, re.MULTILINE
    )
    assert "it will be told of 1 message that it missed." in text
    assert f"reaches offset {end}; 0 messages behind it." in text


def test_explain_names_the_readers_that_hold_the_log(run, api):
    name = "waited/1"
    api.join(name, "a")
    end = api.send(name, "a", 1)
    epoch = api.facts(name)["epoch"]
    for place, words in ((0, " and holds the log."), (end, ".")):
        position = {"topic": f"$channel/{name}", "epoch": epoch, "offset": place}
        position["ordinal"] = 1 if place else 0
        api.ask("POST", "/v1/cursors", json={"reader": "group:w", "positions": [position]})
        api.wait(name, lambda told, place=place: told["needed_from"] == place)
        text = run("explain", name).stdout
        assert f"Reader group:w, of retention.wait_for, is at {place}{words}\n" in text
        api.wait(name, lambda told: told["destroyed_ms"])
        waits = "It waits for group:w to read to the end." in run("explain", name).stdout
        assert waits is (place == 0)


def test_explain_says_what_an_upload_is_missing(run, api):
    name = "uploaded/1"
    api.join(name, "a")
    first, end = api.send(name, "a", 1), api.send(name, "a", 2)
    text = run("explain", name).stdout
    assert "until an upload covers more than offset 0, nothing behind that is forgotten" in text
    assert f"One for offset {end} would cover everything." in text
    upload = {"name": name, "processor": "a", "json": {}}
    api.ask("PUT", "/v1/channel/snapshot", offset=first, **upload)
    text = run("explain", name).stdout
    assert f"until an upload covers more than offset {first}," in text
    assert f"reaches offset {first}; 1 message behind it." in text
    api.wait(name, lambda told: told["destroyed_ms"])
    assert "destroyed if an upload covers it then, else trimmed" in run("explain", name).stdout
    api.join(name, "a")
    api.ask("PUT", "/v1/channel/snapshot", offset=end, **upload)
    assert "until an upload covers" not in run("explain", name).stdout


def test_a_scheduled_destruction_is_explained_and_cancelled(run, api, name):
    api.join(name, "a")
    api.send(name, "a", 1)
    api.wait(name, lambda told: told["destroyed_ms"])
    text = run("explain", name).stdout
    assert re.search(
        r"^Nobody is there: at .*Z \(in 4 min\) the log is destroyed\. Whoever joins ",
        text,
        re.MULTILINE,
    )
    assert re.search(
        rf"^{name} .* \d{{4}}-\d\d-\d\d \S+Z +a ", run("--prefix", name).stdout, re.MULTILINE
    )
    assert run("keep", name).stderr == f"cancelled: the log of {name} is not destroyed\n"
    assert api.facts(name)["destroyed_ms"] is None
    assert "an operator keeps the log" in run("explain", name).stdout
    assert re.search(rf"^{name} .* kept +a ", run("--prefix", name).stdout, re.MULTILINE)
    assert run("keep", name).stderr == f"nothing was scheduled: the log of {name} is kept\n"


def test_nothing_is_cancelled_while_someone_is_there(run, server, name):
    with subscriber(server, name, "a") as connection:
        message = {"type": "send", "channel": name, "number": 1, "payload": 1}
        connection.send(json.dumps(message))
        assert json.loads(connection.recv(30))["type"] == "sent"
        assert run("keep", name).stderr == "nothing is scheduled: 1 subscriber there\n"


def test_a_destroyed_log_is_explained_and_cannot_be_kept(run, api):
    name = "ends/1"
    api.join(name, "a")
    end = api.send(name, "a", 1)
    api.wait(name, lambda told: not told["exists"])
    text = run("explain", name).stdout
    assert f"{name} has no log now; the next message begins at offset {end}.\n" in text
    assert f"reaches offset {end}; 0 messages behind it." in text
    assert "Nobody is there" not in text
    done = run("keep", name, code=1)
    assert done.stderr == f'headrace: channel "{name}" has no log that could be kept\n'


def test_the_trouble_of_a_reducer_is_told_also_when_nobody_is_there(run, api):
    name = "broken/1"
    api.join(name, "a")
    api.send(name, "a", 1)
    api.wait(name, lambda told: told["trouble"])
    api.wait(name, everyone_is_away)
    text = run("explain", name).stdout
    assert re.search(
        r'^Trouble: the reducer "broken:reduce" fails: .*no idea.* Nothing is forgotten ',
        text,
        re.MULTILINE,
    )
    lines = run("--prefix", name).stdout.splitlines()
    assert lines[0].rstrip().endswith("trouble")
    assert "no idea" in lines[1]


def test_explain_prints_the_facts_as_json(run, api, name):
    api.join(name, "a")
    api.wait(name, everyone_is_away)
    told = json.loads(run("explain", name, "--json").stdout)
    assert told | {"now_ms": 0} == api.facts(name) | {"now_ms": 0}


def test_a_channel_is_destroyed_with_its_state_when_that_is_confirmed(run, api, server, name):
    with subscriber(server, name, "a") as connection:
        api.join(name, "b")
        api.send(name, "b", 1)
        assert json.loads(connection.recv(30))["type"] == "messages"
        refused = run("destroy", name, code=2)
        assert "add --yes" in refused.stderr
        assert api.facts(name)["exists"]
        assert run("destroy", name, "--yes").stderr == (
            f"destroyed {name}, with 1 message and 2 members\n"
        )
        left = json.loads(connection.recv(30))
        assert left == {"type": "left", "channel": name, "reason": "destroyed"}
    assert run("explain", name, code=1).stderr
    assert api.join(name, "b")["number"] == 1
    assert "snapshot" not in api.join(name, "c")


@pytest.mark.parametrize("command", ["explain", "keep"])
def test_an_unknown_channel_is_one_clear_line(run, command):
    done = run(command, "no such channel", code=1)
    assert done.stderr == 'headrace: there is no channel "no such channel"\n'
    done = run(command, "", code=1)
    assert done.stderr == "headrace: a channel's name must not be empty\n"


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["frobnicate"], 2, "there is no command"),
        (["explain"], 2, "NAME"),
        (["--json", "explain", "x"], 2, "options go behind `explain`"),
        (["--http", "127.0.0.1:1"], 1, "is it running?"),
    ],
)
def test_a_command_that_cannot_be_done_is_one_clear_line(run, args, code, words):
    done = run(*args, code=code)
    assert re.fullmatch(r"headrace: [^\n]+\n", done.stderr)
    assert words in done.stderr
