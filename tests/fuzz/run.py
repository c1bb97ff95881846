"""Runs of the coverage-guided fuzzer: starts it for a target, and reads what it says. Needs atheris."""

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

INPUT_TIMEOUT_S = 60
"""Time after which one input counts as a finding: decoders take microseconds."""
MEMORY_MB_MAX = 1024
"""Memory of the process above which an input counts as a finding."""
FINDINGS_MAX = 3
"""Findings of one target after which its run ends: the fuzzer stops at each of them and is started again."""


class Finding(NamedTuple):
    what: str
    """The error, in one line."""
    where: str
    """The innermost place in our code; empty if it is not known."""
    input: Path


class Outcome(NamedTuple):
    target: str
    seconds: float
    executions: int
    seeds_cover: int
    """Places in the code, as the fuzzer counts them, that the inputs reached with which it began."""
    covered: int
    inputs: int
    """Inputs that the fuzzer keeps because each reaches something that the others do not."""
    findings: list[Finding]

    def __str__(self) -> str:
        speed = self.executions / self.seconds if self.seconds else 0.0
        found = f"{len(self.findings)} FINDINGS" if self.findings else "no findings"
        return (
            f"{self.target:<17} {self.seconds:6.0f} s  {self.executions:>11,} executions"
            f"  {speed:>7,.0f}/s  coverage {self.seeds_cover:>5,} -> {self.covered:>5,}"
            f"  {self.inputs:>5,} inputs  {found}"
        )


class _Said(NamedTuple):
    """What one process of the fuzzer has said."""

    executions: int
    seeds_cover: int
    covered: int
    inputs: int
    finding: Finding | None


_PULSE = re.compile(r"^#(\d+)\s+(\w+)\s+cov: (\d+) ft: \d+ corp: (\d+)/", re.MULTILINE)
_EXECUTED = re.compile(r"^stat::number_of_executed_units:\s+(\d+)", re.MULTILINE)
_ARTIFACT = re.compile(r"Test unit written to (\S+)")
_ERROR = re.compile(r"=== Uncaught Python exception: ===\n(.+)|ERROR: libFuzzer: (.+)|ALARM: (.+)")
_PLACE = re.compile(r'File ".*/((?:src|tests)/.+)", line (\d+), in (\S+)')


def fuzz(target: str, directory: Path, *options: str, seconds: float = 0.0) -> Outcome:
    """Fuzz a target, for a time if one is given. What the fuzzer finds and learns stays in the directory."""
    begun, findings = time.monotonic(), list[Finding]()
    executions, seeds_cover, covered, inputs = 0, 0, 0, 0
    while True:
        passed = time.monotonic() - begun
        limit = [f"-max_total_time={max(1, seconds - passed):.0f}"] if seconds else []
        said = _said(_output(target, directory, [*limit, *options]))
        executions += said.executions
        seeds_cover = seeds_cover or said.seeds_cover
        covered, inputs = max(covered, said.covered), said.inputs
        if said.finding is not None and said.finding[:2] not in [one[:2] for one in findings]:
            findings.append(said.finding)
        passed = time.monotonic() - begun
        if said.finding is None or len(findings) == FINDINGS_MAX or passed + 1 > seconds:
            return Outcome(target, passed, executions, seeds_cover, covered, inputs, findings)


def _output(target: str, directory: Path, options: Sequence[str]) -> str:
    failed = directory / "findings" / f"{target}-"
    failed.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.fuzz.process", target, str(directory / target)]
    limits = [f"-timeout={INPUT_TIMEOUT_S}", f"-rss_limit_mb={MEMORY_MB_MAX}"]
    own = ["-print_final_stats=1", "-use_value_profile=1", f"-artifact_prefix={failed}"]
    done = subprocess.run(
        [*command, *limits, *own, *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    with (directory / f"{target}.log").open("a") as log:
        log.write(done.stdout)
    ended = done.returncode == 0 or _ARTIFACT.search(done.stdout)
    if not (ended and _PULSE.search(done.stdout)):
        raise RuntimeError(f"the fuzzer of {target} failed: {done.stdout[-2000:]}")
    return done.stdout


def _said(output: str) -> _Said:
    pulses = _PULSE.findall(output)
    begun = [pulse for pulse in pulses if pulse[1] == "INITED"] or pulses[:1]
    executed = _EXECUTED.search(output)
    count = int(executed[1]) if executed else int(pulses[-1][0])
    finding = None
    if artifact := _ARTIFACT.search(output):
        error, places = _ERROR.search(output), _PLACE.findall(output)
        what = next(filter(None, error.groups()), "") if error else "unknown"
        where = "{}:{} in {}".format(*places[-1]) if places else ""
        finding = Finding(what, where, Path(artifact[1]))
    return _Said(count, int(begun[0][2]), int(pulses[-1][2]), int(pulses[-1][3]), finding)
