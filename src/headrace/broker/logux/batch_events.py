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
from headrace.logux_envelope import (
    BadEnvelopeError,
    Envelope,
    created_of,
    decode_envelope,
    encode_envelope,
)
from headrace.printing import quoted

logger = logging.getLogger(__name__)

PORTION_EVENTS_MAX = 1000
"""Events that are given to logs at once: the loop looks at each of them, and others wait meanwhile."""

Done = Callable[[BaseException | None], None]

_Events = dict[str, list[NewEvent]]
"""By topic, in the order of the batch."""


class BatchEvents:
    def __init__(self, log: Callable[[str], LoguxLog], runner: Runner) -> None:
        self._log = log
        self._runner = runner

    def add(self, blocks: Sequence[Block], done: Done) -> None:
        self._next(deque(_portions(blocks)), done)

    def _next(self, portions: deque[list[Block]], done: Done) -> None:
        if portions:
            work = partial(_events_of, portions.popleft())
            self._runner.background(work, partial(self._add, portions, done))
        else:
            done(None)

    def _add(
        self, portions: deque[list[Block]], done: Done, events: _Events | BaseException
    ) -> None:
        if isinstance(events, BaseException):
            done(events)
            return
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
                envelope = decode_envelope(payload)
                events.append(NewEvent.of(_marked(payload, envelope), created_of(envelope)))
            except BadEnvelopeError as error:
                # It was checked when it was staged: the batch must not wait for it for ever.
                logger.error(
                    "topic %s: a record of a batch is left out: %s", quoted(block.topic), error
                )
    return found


def _marked(payload: bytes, envelope: Envelope) -> bytes:
    """As of a batch: its origin is connected perhaps, and has not sent it."""
    if envelope.origin is None or envelope.batch:
        return payload
    envelope.batch = True
    try:
        return encode_envelope(envelope)
    except BadEnvelopeError:
        # The mark made it too large by a few bytes. Without an origin it needs none, and has room.
        envelope.origin, envelope.batch = None, False
        return encode_envelope(envelope)
