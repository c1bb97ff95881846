"""A real server that the command line's tests share; every test uses its own topics."""

import itertools
import subprocess
import sys

import pytest

from headrace.testing import ServerProcess

_numbers = itertools.count()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("server") / "data"
    with ServerProcess(directory, "--set", "journal.rotate_s=0.2") as server:
        yield server


@pytest.fixture
def topic():
    return f"topic-{next(_numbers)}"


@pytest.fixture
def at(server):
    """Environment that points commands at the server."""
    return {"HEADRACE_URL": server.figg_url, "HEADRACE_HTTP": server.http_url}


@pytest.fixture
def spawn(tmp_path, environment, at):
    """Start a command without waiting for its end. Commands that still run after the test are killed."""
    running = []

    def start(*args, **options):
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace", *map(str, args)],
            cwd=tmp_path,
            env=environment(**at),
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()
