"""Logux: events of one client to a hundred others, against the npm package `@logux/server`.

Clients speak protocol 5 and answer what they receive. The npm server keeps its log in memory, Headrace on
disk.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.load.logux import Audience
from bench.measure import Part, Run, measured, undisturbed
from bench.options import Options
from bench.process import Headrace, NpmLogux, Server, find

NAME = "logux"
SUBSCRIBERS, BLOCK = 100, 20
EVENTS, WARM = 3000, 600
OURS, THEIRS = "headrace, synced", "@logux/server, in memory"
INSTALL_TIMEOUT_S = 300.0


def run(options: Options, say: Callable[[str], None]) -> Part:
    part = Part(NAME, f"Logux: events of one client to {SUBSCRIBERS} others, {BLOCK} on the way")
    part.notes.append("rate, CPU and load CPU are per delivered event here")
    events = EVENTS // 4 if options.quick else EVENTS
    sides: list[tuple[str, Callable[[], Server], str]] = [
        (OURS, partial(Headrace, options.dir), "/v1/logux/bench")
    ]
    say("installing @logux/server")
    modules = _install(options.dir / "npm-logux")
    if isinstance(modules, str):
        part.notes.append(modules)
    else:
        sides.append((THEIRS, partial(NpmLogux, options.dir, modules), "/"))
    for turn in range(options.repeat):
        for label, make, path in sides:
            say(f"{label}, {turn + 1} of {options.repeat}")
            part.add(undisturbed(partial(_run, label, make, path, events), options.retries))
    part.compare(
        "deliveries per second of server CPU against @logux/server",
        OURS,
        THEIRS,
        lambda one: 1 / one.cpu_us,
        3,
        at_least=True,
    )
    return part


def _run(label: str, make: Callable[[], Server], path: str, events: int) -> Run:
    with make() as server:
        server.start()
        port = server.ws_port if isinstance(server, Headrace) else server.port
        audience = Audience((server.host, port), path, SUBSCRIBERS)
        audience.publish(WARM, BLOCK)
        server.settle()
        result = Run(label, events * SUBSCRIBERS)
        with measured(server, result):
            result.seconds = audience.publish(events, BLOCK)
        audience.close()
        return result


def _install(directory: Path) -> Path | str:
    """Return the directory of the installed package, or the reason why it is not installed."""
    if find("node") is None or find("npm") is None:
        return "Node and npm are not installed: @logux/server is skipped"
    directory.mkdir(parents=True, exist_ok=True)
    for file in (Path(__file__).parents[1] / "logux").iterdir():
        shutil.copy(file, directory)
    if not (directory / "node_modules").is_dir():
        command = ["npm", "install", "--no-package-lock", "--no-audit", "--no-fund"]
        done = subprocess.run(
            command,
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            return f"npm cannot install @logux/server: {done.stderr.strip()[-200:]}"
    return directory
