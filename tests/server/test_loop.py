"""Sharing of an event loop iteration among busy connections."""

from collections.abc import Callable
from typing import Any

import pytest

from headrace.server import loop as server_loop
from headrace.server.loop import TURN_PIECES_MAX, Turns


class Loop:
    """An event loop that a test iterates."""

    def __init__(self) -> None:
        self.ready: list[Callable[[], None]] = []

    def call_soon(self, call: Callable[[], None]) -> None:
        self.ready.append(call)

    def iterate(self) -> None:
        ready, self.ready = self.ready, []
        for call in ready:
            call()


class Busy:
    """A connection that always has more work."""

    def __init__(self, shared: Turns) -> None:
        self._shared = shared
        self.pieces = 0
        shared.later(self.work)

    def work(self) -> None:
        self.pieces += 1
        self._shared.later(self.work)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(server_loop.time, "monotonic", lambda: 0.0)
    return Loop()


@pytest.mark.parametrize("count", [1, 40, 10_000])
def test_an_iteration_does_the_same_work_for_any_number_of_connections(
    loop: Any, count: int
) -> None:
    shared = Turns(loop)
    busy = [Busy(shared) for _ in range(count)]
    for iteration in range(1, 10):
        loop.iterate()
        assert sum(one.pieces for one in busy) == iteration * TURN_PIECES_MAX


def test_all_connections_get_the_same_share(loop: Any) -> None:
    shared = Turns(loop)
    busy = [Busy(shared) for _ in range(4 * TURN_PIECES_MAX)]
    for _ in range(20):
        loop.iterate()
    assert {one.pieces for one in busy} == {5}


def test_a_turn_ends_when_its_time_is_over(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(server_loop.time, "monotonic", lambda: float(next(clock)))
    busy = Busy(Turns(loop))
    loop.iterate()
    assert busy.pieces == 1


def test_a_piece_may_end_its_turn(loop: Any) -> None:
    shared = Turns(loop)
    done: list[int] = []
    shared.later(shared.end)
    shared.later(lambda: done.append(1))
    loop.iterate()
    assert not done
    loop.iterate()
    assert done == [1]


def test_an_internal_error_of_one_connection_stops_no_other(loop: Any) -> None:
    shared = Turns(loop)
    done: list[int] = []
    shared.later(lambda: 1 // 0)  # type: ignore[arg-type]
    shared.later(lambda: done.append(1))
    with pytest.raises(ZeroDivisionError):
        loop.iterate()
    loop.iterate()
    assert done == [1]


def test_nothing_is_scheduled_without_work(loop: Any) -> None:
    shared = Turns(loop)
    shared.later(lambda: None)
    loop.iterate()
    assert not loop.ready
