"""The store's way to run work later on the loop or in a thread. Tests run the work step by step."""

from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Runner(Protocol):
    def soon(self, call: Callable[[], None]) -> None:
        """Call `call` on the loop, after the code that is running now."""

    def write(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        """Run a commit's write in the one thread for such writes, then `done` on the loop."""

    def background(self, work: Callable[[], T], done: Callable[[T | BaseException], None]) -> None:
        """Run other work that waits for the disk in any thread, then `done` on the loop."""


class StepRunner:
    """Runner that runs everything in the calling thread, one step at a time, on request."""

    def __init__(self) -> None:
        self._steps: deque[Callable[[], None]] = deque()

    def soon(self, call: Callable[[], None]) -> None:
        self._steps.append(call)

    def write(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        def step() -> None:
            try:
                work()
            except OSError as error:
                done(error)
            else:
                done(None)

        self._steps.append(step)

    def background(self, work: Callable[[], T], done: Callable[[T | BaseException], None]) -> None:
        def step() -> None:
            result: T | BaseException
            try:
                result = work()
            except OSError as error:
                result = error
            done(result)

        self._steps.append(step)

    def step(self) -> bool:
        """Run the next step; return False if there is none."""
        if not self._steps:
            return False
        self._steps.popleft()()
        return True

    def run(self) -> None:
        """Run all steps, including those that they add."""
        while self.step():
            pass
