"""Crashes in the middle of random runs; `make torture` does many more of them."""

import os
import random

import pytest

from tests.log.test_crash import Run, crash_and_check, crash_twice_and_check, prefixes, states

NAMES = ["a", "b", "written/w", "written/v"]
RUNS = int(os.environ.get("HEADRACE_TORTURE", "4"))
PLACES = 8
"""Number of crash points in each run; every run has different ones."""


@pytest.mark.parametrize("seed", range(RUNS))
def test_a_random_run_survives_crashes_at_random_places(tmp_path, seed):
    chance = random.Random(seed)
    run = Run(tmp_path / "data")
    do_anything(run, chance)
    run.store.crash()
    recorded = (tmp_path / "data", run.disk.operations)
    places = prefixes(run.disk.operations)
    chosen = chance.sample(places, min(PLACES, len(places)))
    for check in (crash_and_check, crash_twice_and_check):
        for machine in (False, True):
            for state in states(recorded, chosen):
                crash = random.Random(f"{seed} {state[0]} {machine} {check.__name__}")
                check(state, tmp_path, crash, machine=machine)


def do_anything(run: Run, chance: random.Random) -> None:
    numbered = 0
    for _ in range(chance.randrange(5, 30)):
        what = chance.choices(
            ["append", "many", "once", "trim", "destroy", "rotate", "sync", "apply", "set", "drop"],
            [10, 1, 3, 1, 1, 4, 1, 2, 3, 1],
        )[0]
        name = chance.choice(NAMES)
        existing = [known for known in NAMES if run.store.store.topic(known).exists]
        if what == "append":
            names = chance.sample(NAMES, chance.randrange(1, 4))
            run.append(*names, size=chance.choice([0, 5, 50, 400, 1500]))
        elif what == "many":
            run.append_many(name, chance.choice([3, 40, 300]))
        elif what == "once":
            numbered += 1
            run.append_once(name, numbered, size=chance.choice([0, 60, 900]))
        elif what == "trim" and existing:
            run.trim(chance.choice(existing))
        elif what == "destroy" and existing:
            run.destroy(chance.choice(existing))
        elif what == "set":
            run.set_cursors(chance.choice("rs"), *chance.sample(NAMES, chance.randrange(1, 4)))
        elif what == "drop":
            run.drop_cursors(chance.choice("rs"), name)
        elif what == "rotate":
            run.rotate()
        elif what == "sync":
            run.sync_written()
        elif what == "apply":
            # Journal files wait for a while, and are then applied together.
            run.store.applying = not run.store.applying
            if run.store.applying:
                with run.disk.record_catalogue():
                    run.store.apply_waiting()
    if chance.random() < 0.3:
        run.close()
