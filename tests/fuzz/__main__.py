"""`python -m tests.fuzz`: a coverage-guided fuzzer at every decoder, one after the other, and a report."""

import argparse
import importlib.util
import sys
from pathlib import Path

from tests.fuzz.run import ROOT, Outcome, fuzz
from tests.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", nargs="*", help="decoders; without any, all of them")
    parser.add_argument("--seconds", type=float, default=3600, help="time for all (%(default)s)")
    parser.add_argument(
        "--dir",
        type=Path,
        default=ROOT / ".fuzz",
        help="inputs that reach new code, findings and logs; the next run goes on with them",
    )
    given = parser.parse_args()
    if unknown := set(given.target) - TARGETS.keys():
        parser.error(f"there is no target {', '.join(sorted(unknown))}: {', '.join(TARGETS)}")
    if importlib.util.find_spec("atheris") is None:
        print("atheris is not installed: it has no wheel for this Python", file=sys.stderr)
        return 2
    targets = given.target or list(TARGETS)
    seconds = given.seconds / len(targets)
    print(f"{len(targets)} targets, {seconds:.0f} s each; inputs, findings and logs: {given.dir}")
    outcomes = []
    for target in targets:
        outcomes.append(fuzz(target, given.dir.absolute(), seconds=seconds))
        print(outcomes[-1], flush=True)
        for finding in outcomes[-1].findings:
            print(f"    {finding.what}\n    {finding.where}\n    {finding.input}", flush=True)
    return _sum_up(outcomes)


def _sum_up(outcomes: list[Outcome]) -> int:
    executions = sum(one.executions for one in outcomes)
    findings = sum(len(one.findings) for one in outcomes)
    seconds = sum(one.seconds for one in outcomes)
    print(f"in all: {seconds:.0f} s, {executions:,} executions, {findings} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
