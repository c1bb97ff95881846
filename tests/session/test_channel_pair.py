"""Clients of channels and the server's own code: whatever is cut or crashes, nothing is lost or doubled."""

import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.broker.channel_world import GRACE_MS, LEASE_MS
from tests.session.channel_pair import Client, Pair

EXAMPLES = 400 * (1 + int(os.environ.get("HEADRACE_TORTURE", "0")) // 4)

OF_A_CLIENT: dict[str, Callable[[Client], object]] = {
    "connects": Client.connect,
    "is cut off": Client.cut,
    "sends": Client.send,
    "sends what is refused": lambda client: client.send(bad=True),
    "is heard": Client.up,
    "hears": Client.down,
    "exchanges all": Client.deliver,
    "takes": Client.take,
    "takes all": Client.take_all,
    "restarts": Client.restart,
}
OF_ALL: dict[str, Callable[[Pair], object]] = {
    "commit": lambda pair: pair.world.store.pending and pair.world.commit(),
    "commit all": lambda pair: pair.world.commit_all(),
    "crash": lambda pair: pair.crash(0),
    "crash with one more durable": lambda pair: pair.crash(1),
    "crash with all durable": lambda pair: pair.crash(99),
    "the server notices": Pair.notice,
    "the server hears late": lambda pair: pair.half_open and pair.half_open[0].up(),
    "a second passes": lambda pair: pair.pass_time(1100),
    "the grace passes": lambda pair: pair.pass_time(GRACE_MS + 1),
    "the lease passes": lambda pair: pair.pass_time(LEASE_MS + 1),
}
OFTEN = ("connects", "sends", "is heard", "hears", "exchanges all", "takes", "takes all")
STEPS = [
    *(f"{name} {what}" for name in "ab" for what in [*OF_A_CLIENT, *OFTEN, *OFTEN]),
    *(OF_ALL.keys() - {"commit", "commit all"}),
    *(["commit", "commit all"] * 6),
]
STEPS.sort()  # the same in every run
WAYS = ("push", "signal", "poll")


def run(pair: Pair, step: str) -> None:
    if step in OF_ALL:
        OF_ALL[step](pair)
    else:
        OF_A_CLIENT[step[2:]](pair.clients[step[0]])
    pair.world.runner.run()


@pytest.mark.timeout(600)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    ways=st.tuples(st.sampled_from(WAYS), st.sampled_from(WAYS)),
    steps=st.lists(st.sampled_from(STEPS), min_size=40, max_size=120),
)
def test_nothing_is_lost_or_doubled(ways: tuple[str, str], steps: list[str]) -> None:
    pair = Pair({"a": ways[0], "b": ways[1]})
    for step in steps:
        run(pair, step)
        pair.check()
    pair.settle()
