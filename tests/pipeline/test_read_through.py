"""Reading through: a client with a lake also gets the records that a real server's log no longer has."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from headrace.pipeline.export.job import export
from headrace.pipeline.tasks import LocalRunner
from headrace.testing import ServerProcess, wait_until
from tests.system.support import get_json

CONFIG = """
[retention]
bytes = 20000
check_s = 0.1
wait_for = ["lake"]
[journal]
rotate_s = 0.1
"""
WAIT_S = 120


def forgets(server: ServerProcess, topic: str) -> None:
    """Wait until the log no longer begins at 0."""

    def start() -> int:
        found: int = get_json(server, f"/v1/topic?name={topic}")["start"]["offset"]
        return found

    wait_until(start, WAIT_S, "the log to forget its first records")


@pytest.mark.parametrize("protocol", ["figg", "wombat"])
async def test_a_subscription_from_the_start_gets_all_there_ever_was(
    tmp_path: Path, protocol: str
) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    lake = tmp_path / "lake"
    with ServerProcess(tmp_path / "data", f"--config={tmp_path / 'config.toml'}") as server:
        url = {"figg": server.figg_url, "wombat": server.wombat_url}[protocol]
        wanted = [b"%d" % number * 40 for number in range(1600)]
        async with headrace.connect(url) as client:
            for payload in wanted[:1200]:
                await client.window()
                client.publish_nowait("t", payload)
            await client.flush()
            export(lake, ["t"], url=server.http_url, runner=LocalRunner())
            await asyncio.to_thread(forgets, server, "t")
            for payload in wanted[1200:]:
                await client.window()
                client.publish_nowait("t", payload)
            await client.flush()
        missed = []
        async with headrace.connect(url, lake=lake) as client:
            client.on("missed", missed.append)
            subscription = client.subscribe("t", offset=0)
            found = [await asyncio.wait_for(anext(subscription), WAIT_S) for _ in wanted]
        assert [one.payload for one in found] == wanted
        assert missed == []
        ends = [one.next_offset for one in found]
        assert ends == [sum(len(p) + 4 for p in wanted[: n + 1]) for n in range(len(wanted))]


def command(*arguments: str, stdin: str = "") -> str:
    words = [sys.executable, "-m", "headrace", *arguments]
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_reads_through_too(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    lake = tmp_path / "lake"
    with ServerProcess(tmp_path / "data", f"--config={tmp_path / 'config.toml'}") as server:
        where = ("--url", server.figg_url)
        http = ("--http", "{}:{}".format(*server.http))
        lines = "".join(f"{number:060}\n" for number in range(1600))
        command("publish", "t", *where, stdin=lines)
        export(lake, ["t"], url=server.http_url, runner=LocalRunner())
        forgets(server, "t")
        shown = command(
            *("subscribe", "t", "--from-offset", "64", "--until-end", "--lake", str(lake)),
            *(*where, *http),
        )
        assert shown == lines[61:]
        rows = command("topics", "--json", *http)
        readers = {one["reader"] for one in json.loads(rows)["cursors"]}
        assert readers == {"lake", "lake:start"}


def test_the_command_reads_a_lake_to_the_end_where_the_log_has_nothing_left(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    text = '[retention]\nage = "100ms"\ncheck_s = 0.1\nwait_for = ["lake"]\n[journal]\nrotate_s = 0.1\n'
    (tmp_path / "config.toml").write_text(text)
    with ServerProcess(tmp_path / "data", f"--config={tmp_path / 'config.toml'}") as server:
        where = ("--url", server.figg_url, "--http", "{}:{}".format(*server.http))
        command("publish", "t", *where[:2], stdin="1\n2\n3\n")
        export(lake, ["t"], url=server.http_url, runner=LocalRunner())
        forgets(server, "t")
        assert get_json(server, "/v1/topic?name=t")["records"] == 0
        shown = command("subscribe", "t", "--until-end", "--lake", str(lake), *where)
        assert shown == "1\n2\n3\n"
