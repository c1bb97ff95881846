"""Channel clients and the server's own code: whatever is cut or crashes, nothing is lost or duplicated."""

import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.session.channel.membership import Restored
from headrace.wire.channel import MissedMessages
from tests.broker.channel.world import GRACE_MS, LEASE_MS
from tests.session.channel.pair import Client, Pair

EXAMPLES = 200 * (1 + int(os.environ.get("HEADRACE_TORTURE", "0")) // 4)

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
STEPS.sort()  # the order is the same in every run
WAYS = ("push", "signal", "poll")

MET = (
    "a connects",
    "a exchanges all",
    "b connects",
    "b exchanges all",
    "a sends",
    "a exchanges all",
)
READ = ("a second passes", "b exchanges all", "b takes all", "b exchanges all", "commit all")
B_GOES = ("b is cut off", "the server notices", "a sends", "a exchanges all")
A_GOES = ("a is cut off", "the server notices", "commit all")
STARTS = {
    "nothing": (),
    "both are there": MET,
    "one was away for too long": (*MET, *READ, *B_GOES, "the lease passes", "commit all"),
    "destroyed": (*MET, *READ, *B_GOES, *A_GOES, "the grace passes", "commit all"),
}


def run(pair: Pair, step: str) -> None:
    if step in OF_ALL:
        OF_ALL[step](pair)
    else:
        OF_A_CLIENT[step[2:]](pair.clients[step[0]])
    pair.world.runner.run()


@pytest.mark.timeout(600)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    start=st.sampled_from(list(STARTS)),
    ways=st.tuples(st.sampled_from(WAYS), st.sampled_from(WAYS)),
    steps=st.lists(st.sampled_from(STEPS), min_size=40, max_size=120),
)
def test_nothing_is_lost_or_doubled(start: str, ways: tuple[str, str], steps: list[str]) -> None:
    pair = Pair({"a": ways[0], "b": ways[1]})
    for step in (*STARTS[start], *steps):
        run(pair, step)
        pair.check()
    pair.settle()


@pytest.mark.timeout(600)
@settings(max_examples=EXAMPLES // 2, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    start=st.sampled_from(list(STARTS)),
    ways=st.tuples(st.sampled_from(WAYS), st.sampled_from(WAYS)),
    pages=st.sampled_from(["a", "ab"]),
    steps=st.lists(st.sampled_from(STEPS), min_size=40, max_size=120),
)
def test_a_page_is_a_state_and_every_message_behind_it(
    start: str, ways: tuple[str, str], pages: str, steps: list[str]
) -> None:
    pair = Pair({"a": ways[0], "b": ways[1]}, pages)
    for step in (*STARTS[start], *steps):
        run(pair, step)
        pair.check()
    pair.settle()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("start", "reason"), [("one was away for too long", "trimmed"), ("destroyed", "destroyed")]
)
def test_who_missed_something_gets_the_state(start: str, reason: str, way: str) -> None:
    pair = Pair({"a": "push", "b": way})
    for step in STARTS[start]:
        run(pair, step)
    b = pair.clients["b"]
    assert b.have == ["a-0"]
    run(pair, "b connects")
    run(pair, "b exchanges all")
    restored = b.inbox.first
    assert isinstance(restored, Restored) and restored.snapshot is not None
    assert (restored.snapshot.payload, restored.missed) == (
        ["a-0", "a-1"],
        MissedMessages(1, reason),
    )
    pair.settle()


def test_a_snapshot_is_acknowledged_also_by_who_has_sent_since() -> None:
    pair = Pair({"a": "push", "b": "push"})
    for step in (*STARTS["destroyed"], "b connects", "b sends", "b exchanges all", "b takes all"):
        run(pair, step)
    run(pair, "b takes")
    run(pair, "b exchanges all")
    assert pair.stored == ["a-0", "a-1", "b-0"]
    assert pair.world.channel.members["b"].confirmed[0] == pair.world.ends[-1]
