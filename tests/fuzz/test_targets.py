"""Every decoder against changed messages, and in `make torture` against a coverage-guided fuzzer."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.corpus import SEEDS, changed
from tests.fuzz.targets import TARGETS
from tests.tools import TORTURE, takes_long

ROOT = Path(__file__).parents[2]
CHANGES = 20_000 if TORTURE else 300
"""Changed inputs of a run, for each target."""
FUZZED_S = 3600 / len(TARGETS)
"""Time of each target with the coverage-guided fuzzer: an hour in total."""


@pytest.mark.parametrize("name", TARGETS)
def test_a_decoder_survives_changed_messages(name):
    chance = random.Random(name)
    seeds = SEEDS[name]
    for seed in seeds:
        TARGETS[name](seed)
    for _ in range(CHANGES):
        data = changed(chance.choice(seeds), chance)
        try:
            TARGETS[name](data)
        except Exception as error:
            error.add_note(f"the input was {data!r}")
            raise


@takes_long
@pytest.mark.timeout(2 * FUZZED_S + 300)
@pytest.mark.parametrize("name", TARGETS)
def test_a_decoder_survives_a_coverage_guided_fuzzer(name, tmp_path):
    pytest.importorskip(
        "atheris", reason="atheris is not installed: it has no wheel for this Python"
    )
    command = [
        sys.executable,
        "-m",
        "tests.fuzz",
        name,
        str(tmp_path),
        f"-max_total_time={FUZZED_S:.0f}",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
