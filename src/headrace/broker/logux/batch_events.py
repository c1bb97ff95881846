"""Adds the events of batches to Logux logs, a portion at a time. Elsewhere: producers and staged files.

Implements `TopicOwner` of `log/store.py`. A thread looks up each event; the loop only learns which
events are new.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from headrace.broker.logux.log import LoguxLog, NewEvent
from headrace.log.store import BatchPart, Block, Runner
from headrace.payload.logux import (
    BadEnvelopeError,
    Envelope,
    created_of,
    decode_envelope,
    encode_envelope,
)
from headrace.printing import quoted

logger = logging.getLogger(__name__)

PORTION_EVENTS_MAX = 1000
"""Events that are passed to logs at once. The loop handles each of them while other work waits."""

Done = Callable[[BaseException | None], None]

_Events = dict[str, list[NewEvent]]
"""Events by topic, in the order of the batch."""


class BatchEvents:
    def __init__(self, log: Callable[[str], LoguxLog], runner: Runner) -> None:
        self._log = log
        self._runner = runner

    def check(self, blocks: Callable[[], Iterator[Block]], done: Done) -> None:
        """Accept every batch: its events were checked when they were uploaded."""
        done(None)

    def add(self, batch: bytes, parts: Sequence[BatchPart], done: Done) -> None:
        self._next(deque(_portions([part.block for part in parts])), done)

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
                # The event was checked when it was staged, so this should not happen. The batch must not wait
                # for the event for ever.
                logger.error(
                    "topic %s: a record of a batch is left out: %s", quoted(block.topic), error
                )
    return found


def _marked(payload: bytes, envelope: Envelope) -> bytes:
    """Return the payload marked as part of a batch: its origin may be connected, but has not sent it."""
    if envelope.origin is None or envelope.batch:
        return payload
    envelope.batch = True
    try:
        return encode_envelope(envelope)
    except BadEnvelopeError:
        # The mark made the payload too large by a few bytes. Without an origin the event needs no mark.
        envelope.origin, envelope.batch = None, False
        return encode_envelope(envelope)
