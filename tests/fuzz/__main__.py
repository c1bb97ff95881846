"""Runs a target under atheris: `python -m tests.fuzz TARGET CORPUS [libFuzzer options]`.

CORPUS is a directory in which the fuzzer keeps the inputs that reached new code. A failing input is written
to a file there.
"""

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["headrace"]):
    from tests.fuzz.corpus import SEEDS
    from tests.fuzz.targets import TARGETS


def main() -> None:
    name, corpus, *options = sys.argv[1:]
    directory = Path(corpus)
    directory.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(SEEDS[name]):
        (directory / f"seed-{number}").write_bytes(seed)
    arguments = [sys.argv[0], str(directory), f"-artifact_prefix={directory}/failed-", *options]
    atheris.Setup(arguments, TARGETS[name])
    atheris.Fuzz()


main()
