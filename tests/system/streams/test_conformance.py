"""The public conformance suite of Durable Streams against a real server, with and without access control.

Elsewhere: what the suite does not try, such as kills, other protocols and hostile names.
"""

import json
import os
import shutil
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest

from headrace.testing import ServerProcess
from tests.tools import node_tool, takes_long, tool, without

HERE = Path(__file__).parent
COUNT = 332
"""Number of tests of this version of the suite, without those of optional subscriptions."""
TOKEN = b"a token for the suite"


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the suite; skip its tests if npm cannot get it."""
    node_tool()
    tool("npm")
    directory = tmp_path_factory.mktemp("suite")
    for name in ("package.json", "conformance.test.mjs"):
        shutil.copy(HERE / name, directory)
    command = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund"]
    try:
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=200, check=False
        )
    except subprocess.TimeoutExpired:
        without("npm has not got the suite in 200 s")
    if done.returncode:
        without(f"npm cannot install the suite: {done.stderr[-2000:]}")
    return directory


RETRIES = "--retry=2", "--testTimeout=60000"
RUNS = 3
"""Some tests of the suite sleep and expect the server to be quicker, which a busy machine is not always."""


@pytest.mark.timeout(1500)  # with the installation
@pytest.mark.parametrize("access", ["token", pytest.param("open", marks=takes_long)])
def test_the_server_conforms(suite: Path, tmp_path: Path, access: str) -> None:
    config = tmp_path / "headrace.toml"
    settings = "[streams]\nlong_poll_s = 2.0\n"
    if access == "token":
        settings += f'[[access.token]]\nname = "suite"\nsha256 = "{sha256(TOKEN).hexdigest()}"\n'
    config.write_text(settings)
    with ServerProcess(tmp_path / "data", f"--config={config}") as server:
        environ = os.environ | {"CONFORMANCE_TEST_URL": server.http_url}
        if access == "token":
            environ["CONFORMANCE_TOKEN"] = TOKEN.decode()
        failed = run(suite, tmp_path, environ)
        for _ in range(1, RUNS):
            if failed:
                failed = {
                    name: why
                    for name, why in run(suite, tmp_path, environ).items()
                    if name in failed
                }
        assert not failed
        assert "Traceback" not in server.stderr, server.stderr


def run(suite: Path, directory: Path, environ: dict[str, str]) -> dict[str, str]:
    """Run the suite. Return the names of the tests that failed, each with the reason."""
    report = directory / "report.json"
    report.unlink(missing_ok=True)
    command = ["npx", "vitest", "run", "conformance.test.mjs", "--no-watch", *RETRIES]
    command += ["--reporter=json", f"--outputFile={report}"]
    done = subprocess.run(
        command, cwd=suite, env=environ, capture_output=True, text=True, timeout=400, check=False
    )
    assert report.exists(), done.stdout + done.stderr
    found = json.loads(report.read_text())
    failed = {
        one["fullName"]: "\n".join(one["failureMessages"])[:1000]
        for file in found["testResults"]
        for one in file["assertionResults"]
        if one["status"] == "failed"
    }
    assert found["numPassedTests"] + len(failed) == COUNT, done.stdout[-4000:]
    return failed
