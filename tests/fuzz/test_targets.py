"""Every decoder against changed messages, and in `make torture` against a coverage-guided fuzzer."""

import importlib.util
import random
from pathlib import Path

import pytest

from headrace.config.load import load
from tests.fuzz.changes import changed
from tests.fuzz.checksums import with_checksums_of_blocks
from tests.fuzz.corpus import SEEDS
from tests.fuzz.run import Outcome, fuzz
from tests.fuzz.targets import TARGETS
from tests.tools import TORTURE, takes_long

CHANGES = 20_000 if TORTURE else 300
"""Changed inputs of a run, for each target."""
FUZZED_S = 3600 / len(TARGETS)
"""Time of each target with the coverage-guided fuzzer: an hour in total."""

needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None,
    reason="atheris is not installed: it has no wheel for this Python",
)


@pytest.mark.parametrize("name", TARGETS)
def test_a_decoder_survives_changed_messages(name):
    chance = random.Random(name)
    seeds = SEEDS[name]
    for seed in seeds:
        TARGETS[name](seed)
    for _ in range(CHANGES):
        data = changed(name, chance.choice(seeds), chance)
        try:
            TARGETS[name](data)
        except Exception as error:
            error.add_note(f"the input was {data!r}")
            raise


def test_the_settings_that_a_fuzzer_begins_with_are_valid(tmp_path):
    """Otherwise the fuzzer would be stuck at the first check."""
    for seed in SEEDS["settings"]:
        file = tmp_path / "headrace.toml"
        file.write_bytes(seed)
        load({}, {}, file)


def test_an_upload_keeps_its_checksums_when_they_are_right():
    for seed in SEEDS["batch_blocks"]:
        assert with_checksums_of_blocks(seed) == seed


def fuzzed(target: str, directory: Path, *options: str, seconds: float = 0.0) -> Outcome:
    outcome = fuzz(target, directory, *options, seconds=seconds)
    assert outcome.findings == []
    return outcome


@needs_atheris
def test_the_fuzzer_sees_how_far_it_comes(tmp_path):
    """A run that learns nothing about the code would look like one that found nothing."""
    outcome = fuzzed("logux5_session", tmp_path, "-runs=200", "-seed=1")
    assert outcome.executions >= 200
    assert outcome.covered >= outcome.seeds_cover > 100
    assert outcome.inputs > len(SEEDS["logux5_session"])


@takes_long
@needs_atheris
@pytest.mark.timeout(2 * FUZZED_S + 300)
@pytest.mark.parametrize("name", TARGETS)
def test_a_decoder_survives_a_coverage_guided_fuzzer(name, tmp_path):
    print(fuzzed(name, tmp_path, seconds=FUZZED_S))
