"""The JavaScript client in Node: its own tests, and against a real server that is killed."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace
from headrace.testing import ServerProcess
from tests.js.checks import check_crash, check_payloads, check_readers, check_slow
from tests.js.support import CLIENT, NODE_FLAGS, node
from tests.tools import node_tool

UNIT_TIMEOUT_S = 240
UNIT_TESTS = ["codec", "session", "readers", "client", "channel_session", "channel", "tokens"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "data") as server:
        yield server


@pytest.mark.timeout(UNIT_TIMEOUT_S + 30)
@pytest.mark.parametrize("name", UNIT_TESTS)
def test_the_unit_tests_pass(name: str) -> None:
    run(node_tool(), *NODE_FLAGS, "--test", f"test/{name}.test.js", cwd=CLIENT)


def test_no_unit_test_is_left_out() -> None:
    found = {path.name for path in CLIENT.glob("test/*.test.js")}
    assert found == {f"{name}.test.js" for name in UNIT_TESTS}


def test_nothing_acknowledged_is_lost_when_the_server_is_killed(server: ServerProcess) -> None:
    with node("crash", server.wombat_url) as reports:
        check_crash(server, reports)


def test_a_slow_subscriber_loses_nothing(server: ServerProcess) -> None:
    with node("slow", server.wombat_url) as reports:
        check_slow(reports)


def test_payloads_and_offsets_are_the_same_as_over_figg(server: ServerProcess) -> None:
    with node("payloads", server.wombat_url) as reports:
        check_payloads(server, reports)


def test_a_named_reader_resumes_and_another_client_takes_over(server: ServerProcess) -> None:
    with node("readers", server.wombat_url) as reports:
        check_readers(reports)


def test_the_examples_of_the_manual_run_one_after_the_other(
    server: ServerProcess, tmp_path: Path
) -> None:
    page = (CLIENT / "README.md").read_text("utf-8")
    blocks = re.findall(r"^```js\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert blocks
    program = tmp_path / "program.mjs"
    program.write_text("\n".join(blocks).replace("ws://127.0.0.1:8120", server.wombat_url), "utf-8")
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "headrace").symlink_to(CLIENT)
    run(node_tool(), *NODE_FLAGS, str(program), cwd=tmp_path)


def test_the_manual_has_every_option_with_its_default() -> None:
    source = (CLIENT / "headrace.js").read_text("utf-8")
    block = re.search(r"^const DEFAULTS = \{\n(.*?)^\};", source, re.MULTILINE | re.DOTALL)
    assert block is not None
    defaults = {
        name: eval(value.replace("_", ""), {})
        for name, value in re.findall(r"(\w+): ([\d_* ]+),", block[1])
    }
    page = (CLIENT / "README.md").read_text("utf-8").partition("## Options")[2]
    table = dict(re.findall(r"^\| `(\w+)` \| ([\d,]+(?: MiB)?) \|", page, re.MULTILINE))
    mebi = 1024 * 1024
    assert defaults == {
        name: int(value.split()[0].replace(",", "")) * (mebi if value.endswith("MiB") else 1)
        for name, value in table.items()
    }


def test_the_package_has_the_version_of_the_server() -> None:
    package = json.loads((CLIENT / "package.json").read_text("utf-8"))
    assert package["version"] == headrace.__version__
    assert not package.keys() & {"dependencies", "devDependencies", "peerDependencies"}


def run(*command: str, cwd: Path) -> None:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=UNIT_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
