"""Channels of the JavaScript client in Node, against a real server that is killed."""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from headrace.testing import ServerProcess, wait_until
from tests.js.channel_checks import channel_url, check_contents, check_crash, describe, keep
from tests.js.support import CLIENT, NODE_FLAGS, node
from tests.js.test_node import run
from tests.tools import node_tool

GRACE_S = 0.2


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "data") as server:
        yield server


@pytest.mark.parametrize("way", ["Push", "Signal", "Poll"])
def test_each_message_is_stored_and_received_once_when_the_server_is_killed(
    server: ServerProcess, way: str
) -> None:
    keep(server, "crash")
    with node(f"channel{way}", channel_url(server)) as reports:
        check_crash(server, reports)


def test_channels_that_share_a_connection_lose_nothing_when_the_server_is_killed(
    server: ServerProcess,
) -> None:
    keep(server, "crash")
    with node("channelSharedCrash", channel_url(server)) as reports:
        check_crash(server, reports)


def test_one_connection_serves_many_channels(server: ServerProcess) -> None:
    with node("channelShared", channel_url(server)) as reports:
        assert reports.expect("done") == {
            "opened": 1,
            "got": list(range(20)),
            "echoed": "echo",
            "again": 'channel "room/3" is already joined on this connection',
            "later": "later",
            "over": "ClientClosedError",
        }
    with urlopen(f"{server.http_url}/v1/channel?name=room/4") as answer:
        channel = json.load(answer)
    (until_ms,) = [
        one["leased_until_ms"] for one in channel["members"] if one["processor"] == "many"
    ]
    assert until_ms - channel["now_ms"] <= 60_000, "its lease was lost when it was closed"


def test_contents_are_the_same_on_the_other_side(server: ServerProcess) -> None:
    keep(server, "contents")
    with node("channelContents", channel_url(server)) as reports:
        check_contents(server, reports)


def test_who_returns_to_a_destroyed_channel_gets_the_state_and_then_what_is_new(
    tmp_path: Path,
) -> None:
    settings = ("--set=channels.reducer=merge", f"--set=channels.grace_s={GRACE_S}")
    with ServerProcess(tmp_path / "data", *settings) as server:
        with node("channelAbsence", channel_url(server)) as reports:
            assert reports.expect("done") == {"read": {"title": "x"}}
        wait_until(lambda: is_destroyed(server), 30, "the end of the log")
        with node("channelReturn", channel_url(server)) as reports:
            calls = reports.expect("done")["calls"]
    [restored, snapshot], *others = calls
    assert restored == "restore"
    assert snapshot["payload"] == {"title": "x", "body": "z"}
    assert snapshot["missed"] == {"messages": 2, "reason": "destroyed"}
    # The state is acknowledged, so it does not come again.
    assert others == [["message", {"title": "w"}], ["message", {"title": "v"}]]


def is_destroyed(server: ServerProcess) -> bool:
    [channel] = describe(server)["channels"]
    return bool(channel["snapshot"] and channel["bytes"] == 0)


def test_who_is_replaced_or_not_let_in_hears_why(tmp_path: Path) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text(
        f"""
        [[access.token]]
        name = "test"
        sha256 = "{hashlib.sha256(b"secret").hexdigest()}"
        grants = ["$channel/c"]
        """,
        "utf-8",
    )
    with (
        ServerProcess(tmp_path / "data", f"--config={config}") as server,
        node("channelReplaced", channel_url(server)) as reports,
    ):
        assert reports.expect("replaced") == {
            "error": [
                "ChannelError",
                "replaced",
                'another connection of "a" has joined the channel',
            ],
            "state": "closed",
            "second": "connected",
        }
        assert reports.expect("done") == {
            "refused": "wrong-credentials",
            "denied": "forbidden",
            "state": "closed",
        }


def test_a_state_that_was_uploaded_is_there_for_the_next(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path / "data", "--set=channels.reducer=uploaded") as server,
        node("channelUploads", channel_url(server)) as reports,
    ):
        done = reports.expect("done")
    assert done["before"] is None
    assert done["uploaded"] == done["offset"]
    assert done["wrong"] == "bad-offset"
    assert done["bytes"] == [1, 2, 255]
    assert done["calls"] == [[done["offset"], [1, 2, 255], None]]
    assert done["last"] == "y"


def test_the_examples_of_the_manual_run_one_after_the_other(
    server: ServerProcess, tmp_path: Path
) -> None:
    page = (CLIENT / "channels.md").read_text("utf-8")
    blocks = re.findall(r"^```js\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert blocks
    program = tmp_path / "program.mjs"
    url = channel_url(server)
    program.write_text("\n".join(blocks).replace("channel://127.0.0.1:8120", url), "utf-8")
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "headrace").symlink_to(CLIENT)
    run(node_tool(), *NODE_FLAGS, str(program), cwd=tmp_path)


def test_the_manual_has_every_option_with_its_default() -> None:
    source = (CLIENT / "channel_session.js").read_text("utf-8")
    block = re.search(r"^export const DEFAULTS = \{\n(.*?)^\};", source, re.MULTILINE | re.DOTALL)
    assert block is not None
    defaults = {
        name: eval(value.replace("_", ""), {})
        for name, value in re.findall(r"(\w+): ([\d_* ]+),", block[1])
    }
    page = (CLIENT / "channels.md").read_text("utf-8").partition("## Options")[2]
    table = dict(re.findall(r"^\| `(\w+)` \| ([\d,]+(?: MiB)?) \|", page, re.MULTILINE))
    mebi = 1024 * 1024
    assert defaults == {
        name: int(value.split()[0].replace(",", "")) * (mebi if value.endswith("MiB") else 1)
        for name, value in table.items()
    }
