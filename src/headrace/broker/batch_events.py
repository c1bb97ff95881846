"""Events of batches on their way to the logs of Logux, a portion at a time. Knows no producer and no file.

Implements `Events` of `log/batches.py`. What is to be found out about each event is found out in a thread;
the loop only learns which of them are new.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from headrace.broker.logux_log import LoguxLog, NewEvent
from headrace.log.blocks import Block
from headrace.log.runner import Runner
from headrace.logux_envelope import BadEnvelopeError, created_of, decode_envelope

logger = logging.getLogger(__name__)

PORTION_EVENTS_MAX = 1000
"""Events that are given to logs at once: the loop looks at each of them, and others wait meanwhile."""

_Events = dict[str, list[NewEvent]]
"""By topic, in the order of the batch."""


class BatchEvents:
    def __init__(self, log: Callable[[str], LoguxLog], runner: Runner) -> None:
        self._log = log
        self._runner = runner

    def add(self, blocks: Sequence[Block], done: Callable[[], None]) -> None:
        self._next(deque(_portions(blocks)), done)

    def _next(self, portions: deque[list[Block]], done: Callable[[], None]) -> None:
        if portions:
            work = partial(_events_of, portions.popleft())
            self._runner.background(work, partial(self._add, portions, done))
        else:
            done()

    def _add(
        self,
        portions: deque[list[Block]],
        done: Callable[[], None],
        events: _Events | BaseException,
    ) -> None:
        assert isinstance(events, dict), events
        waiting = len(events)

        def one_done() -> None:
            nonlocal waiting
            waiting -= 1
            if not waiting:
                self._next(portions, done)

        for topic, some in events.items():
            self._log(topic).add(some, one_done)


def _portions(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    portion: list[Block] = []
    count = 0
    for block in blocks:
        if portion and count + block.record_count > PORTION_EVENTS_MAX:
            yield portion
            portion, count = [], 0
        portion.append(block)
        count += block.record_count
    if portion:
        yield portion


def _events_of(blocks: Sequence[Block]) -> _Events:
    found: _Events = {}
    for block in blocks:
        events = found.setdefault(block.topic, [])
        for payload in block.payloads():
            try:
                events.append(NewEvent.of(payload, created_of(decode_envelope(payload))))
            except BadEnvelopeError as error:
                # It was checked when it was staged: the batch must not wait for it for ever.
                logger.error("topic %r: a record of a batch is left out: %s", block.topic, error)
    return found
