"""Real Logux clients from npm in a Node process, driven by lines of JSON."""

import contextlib
import json
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from tests.tools import node_tool, without

HERE = Path(__file__).parent
WAIT_S = 30


def install(directory: Path) -> Path:
    """Install the packages into a directory of the tests; skip the tests if npm cannot get them."""
    node_tool()
    for file in HERE.iterdir():
        if file.suffix in (".json", ".cjs", ".mjs"):
            shutil.copy(file, directory)
    command = [
        "npm",
        "install",
        "--legacy-peer-deps",
        "--no-package-lock",
        "--no-audit",
        "--no-fund",
    ]
    done = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        without(f"npm cannot install the clients: {done.stderr[-2000:]}")
    return directory


class Host:
    """A Node process that runs clients."""

    def __init__(self, directory: Path, program: str) -> None:
        self._process = subprocess.Popen(
            [node_tool(), program],
            cwd=directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._facts: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.seen: list[dict[str, Any]] = []
        """Everything that the clients reported."""
        self._of: dict[tuple[str, str], list[Any]] = {}
        """The reported values by client and kind."""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._facts.put(json.loads(line))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(30)
        self._reader.join(30)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def do(self, what: str, client: str, **how: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, "client": client, **how}) + "\n")
        self._process.stdin.flush()

    def disconnect(self, client: str) -> None:
        before = len(self.of(client, "closed"))
        self.do("disconnect", client)
        self.wait(f"end of {client}'s socket", lambda: len(self.of(client, "closed")) > before)

    def wait(self, what: str, found: Callable[[], Any]) -> Any:
        """Receive reports until `found` returns something true."""
        while not (result := found()):
            try:
                self._note(self._facts.get(timeout=WAIT_S))
            except queue.Empty:
                pytest.fail(f"no {what}; seen: {self.seen[-30:]}")
        return result

    def of(self, client: str, key: str) -> list[Any]:
        return self._of.get((client, key), [])

    def _note(self, fact: dict[str, Any]) -> None:
        self.seen.append(fact)
        for key, value in fact.items():
            self._of.setdefault((fact["client"], key), []).append(value)

    def events(self, client: str) -> list[dict[str, Any]]:
        return self.of(client, "event")

    def wait_events(self, client: str, count: int) -> list[dict[str, Any]]:
        self.wait(f"{count} events of {client}", lambda: len(self.events(client)) >= count)
        return self.events(client)

    def wait_state(self, client: str, state: str, times: int = 1) -> None:
        self.wait(
            f"{client} to be {state} {times} times",
            lambda: self.of(client, "state").count(state) >= times,
        )

    def wait_reconnected(self, client: str, times: int) -> None:
        """Wait until the client has connected again `times` times and then has nothing left to send.

        States alone do not show this: a client becomes synchronized again after each of its own events.
        """

        def found() -> bool:
            states = self.of(client, "state")
            connecting = [at for at, state in enumerate(states) if state == "connecting"]
            return len(connecting) > times and "synchronized" in states[connecting[times] :]

        self.wait(f"{client} to be connected again {times} times", found)

    def wait_position(self, client: str, position: int) -> None:
        """Wait until the client knows that it has the server's log up to `position`."""
        deadline = time.monotonic() + WAIT_S
        while (facts := self.facts(client))["otherSynced"] < position:
            assert time.monotonic() < deadline, facts
            time.sleep(0.02)

    def facts(self, client: str) -> dict[str, Any]:
        before = len(self.of(client, "facts"))
        self.do("facts", client)
        self.wait("facts", lambda: len(self.of(client, "facts")) > before)
        found: dict[str, Any] = self.of(client, "facts")[-1]
        return found
