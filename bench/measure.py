"""Measurements around a load, and the combination of repeats into one figure. Starts nothing."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.process import TICKS_PER_S, Server, find

CORES = os.cpu_count() or 1
QUIET_WAIT_S_MAX, QUIET_SHARE = 20.0, 0.05
DISTURBED_SHARE = 0.1


@dataclass
class Run:
    """One measurement of one server. Times are per message and include all processes of the server."""

    label: str
    messages: int
    seconds: float = 0.0
    cpu_us: float = 0.0  # until the background work was done too
    cpu_during_us: float = 0.0  # only until the last acknowledgement and delivery
    cpu_main_us: float = 0.0  # part of `cpu_us`: without the server's child processes
    settle_s: float = 0.0
    ack_p50_ms: float = 0.0
    ack_p99_ms: float = 0.0
    memory_peak: int = 0
    client_cpu_us: float = 0.0
    client_busy: float = 0.0  # share of the measured time that the load generator was on a CPU
    other_busy: float = 0.0  # share of the machine used by anything else during the measurement
    stolen: float = 0.0  # share of the machine that its host gave to others
    waited_s: float = 0.0  # time until the machine was quiet, before the measurement
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.messages / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, object]:
        return asdict(self) | {"rate": self.rate}


@dataclass
class Check:
    """A target with the value that was reached."""

    part: str
    claim: str
    value: float
    limit: float
    at_least: bool
    unit: str = "×"
    spread: tuple[float, float] | None = None

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def as_json(self) -> dict[str, object]:
        return asdict(self) | {"met": self.met}


@dataclass
class Part:
    """Result of one part: runs for the table, checks against the targets, notes and facts."""

    name: str
    title: str
    runs: dict[str, list[Run]] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)

    def add(self, run: Run) -> None:
        self.runs.setdefault(run.label, []).append(run)

    def compare(
        self,
        claim: str,
        ours: str,
        theirs: str,
        value: Callable[[Run], float],
        limit: float,
        at_least: bool,
    ) -> None:
        """Check the median ratio of `ours` to `theirs`, from pairs of runs that followed each other."""
        if ours not in self.runs or theirs not in self.runs:
            self.notes.append(f"not checked, a side is missing: {claim}")
            return
        pairs = zip(self.runs[ours], self.runs[theirs], strict=True)
        ratios = [value(one) / value(other) for one, other in pairs]
        spread = (min(ratios), max(ratios))
        middle = statistics.median(ratios)
        self.checks.append(Check(self.name, claim, middle, limit, at_least=at_least, spread=spread))

    def note_disturbances(self) -> None:
        """Add a note if other processes used the machine during runs."""
        runs = [run for repeats in self.runs.values() for run in repeats]
        disturbed = [run.other_busy for run in runs if run.other_busy > DISTURBED_SHARE]
        if disturbed:
            self.notes.append(
                f"disturbed: in {len(disturbed)} of {len(runs)} runs other processes used"
                f" {min(disturbed):.0%} to {max(disturbed):.0%} of the machine"
            )

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "title": self.title,
            "runs": {label: [run.as_json() for run in runs] for label, runs in self.runs.items()},
            "checks": [check.as_json() for check in self.checks],
            "notes": self.notes,
            "facts": self.facts,
        }


@contextlib.contextmanager
def measured(server: Server, run: Run, deliveries: int | None = None) -> Iterator[None]:
    """Measure CPU, memory and the other load on the machine; the body sets `run.seconds`."""
    per = deliveries or run.messages
    run.waited_s = wait_for_quiet()
    cpu, cpu_main, client = server.cpu_s(), server.cpu_main_s(), time.process_time()
    busy, stolen, began = _machine_s(), _stolen_s(), time.monotonic()
    yield
    during = server.cpu_s() - cpu
    client_s = time.process_time() - client
    wall = time.monotonic() - began
    other = _machine_s() - busy - during - client_s
    run.stolen = (_stolen_s() - stolen) / wall / CORES
    server.alive()
    run.settle_s = server.settle()
    run.cpu_us = (server.cpu_s() - cpu) / per * 1e6
    run.cpu_main_us = (server.cpu_main_s() - cpu_main) / per * 1e6
    run.cpu_during_us = during / per * 1e6
    run.client_cpu_us = client_s / per * 1e6
    run.client_busy = client_s / wall
    run.other_busy = max(0.0, other / wall / CORES)
    run.memory_peak = server.memory_peak()


def undisturbed(measure: Callable[[], Run], retries: int) -> Run:
    """Repeat a measurement that other processes disturbed; return the least disturbed run."""
    runs = [measure()]
    while runs[-1].other_busy > DISTURBED_SHARE and len(runs) <= retries:
        runs.append(measure())
    return min(runs, key=lambda run: run.other_busy)


def wait_for_quiet() -> float:
    """Wait until the machine is idle, at most QUIET_WAIT_S_MAX; return the seconds waited.

    The benchmark itself is idle now: the server has settled and the load has not begun.
    """
    began = now = time.monotonic()
    while now - began < QUIET_WAIT_S_MAX:
        busy = _machine_s()
        time.sleep(0.5)
        previous, now = now, time.monotonic()
        if (_machine_s() - busy) / (now - previous) / CORES < QUIET_SHARE:
            break
    return now - began


def timed(label: str, count: int, action: Callable[[], object]) -> Run:
    """Run an action once and measure only its time."""
    result = Run(label, count)
    result.waited_s = wait_for_quiet()
    began = time.perf_counter()
    action()
    result.seconds = time.perf_counter() - began
    return result


def warm_up(
    label: str, times: int, actions: Iterable[Callable[[], object]], say: Callable[[str], None]
) -> None:
    """Run all actions several times: a JVM reaches its full speed after a few rounds."""
    for turn in range(times):
        say(f"{label}: warming up, {turn + 1} of {times}")
        for action in actions:
            action()


def in_turns(
    repeat: int,
    count: int,
    actions: Mapping[str, Callable[[], object]],
    say: Callable[[str], None],
) -> Iterator[Run]:
    """Yield runs of all actions in turns, so that a disturbance of the machine affects all of them."""
    for turn in range(repeat):
        for label, action in actions.items():
            say(f"{label}, {turn + 1} of {repeat}")
            yield timed(label, count, action)


def percentile_ms(seconds: Sequence[float], share: float) -> float:
    ordered = sorted(seconds)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] * 1e3 if ordered else 0.0


def middle(runs: Sequence[Run], value: Callable[[Run], float]) -> tuple[float, float, float]:
    """Return the median, the least and the greatest value."""
    values = [value(run) for run in runs]
    return statistics.median(values), min(values), max(values)


def machine(data_dir: Path) -> dict[str, object]:
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        "load_average": os.getloadavg(),
        "data_dir": str(data_dir),
        "file_system": _output("stat", "-f", "-c", "%T", str(data_dir)),
        "fdatasync_4k_ms": _fdatasync_ms(data_dir),
        "redis": _output(find("redis-server"), "--version"),
        "nats": _output(find("nats-server"), "--version"),
        "commit": _output("git", "rev-parse", "HEAD"),
    }


def _machine_s() -> float:
    """Return the CPU seconds of all processes and the kernel, without idle, waiting and stolen time."""
    fields = Path("/proc/stat").read_text().split(maxsplit=9)
    user, nice, system, _idle, _iowait, irq, softirq = map(int, fields[1:8])
    return (user + nice + system + irq + softirq) / TICKS_PER_S


def _stolen_s() -> float:
    return int(Path("/proc/stat").read_text().split(maxsplit=9)[8]) / TICKS_PER_S


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _fdatasync_ms(directory: Path) -> float:
    path = directory / "fdatasync"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    times = []
    os.pwrite(descriptor, bytes(1 << 20), 0)
    os.fsync(descriptor)
    for index in range(50):
        began = time.perf_counter()
        os.pwrite(descriptor, b"x" * 4096, index * 4096)
        os.fdatasync(descriptor)
        times.append(time.perf_counter() - began)
    os.close(descriptor)
    path.unlink()
    return statistics.median(times) * 1e3


def _output(program: str | None, *arguments: str) -> str | None:
    try:
        command = [program or "", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
