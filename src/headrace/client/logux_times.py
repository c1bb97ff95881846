"""Times of events in a local log: unique by the standard timer, and the same event's time at the server.

An event has two times. `created` is by the local clock. The *wire time* is by the server's: it is what others
know the event by, and is given once. A later connection may measure another difference between the clocks,
and must not make another event of it.
"""

from typing import NamedTuple

import msgspec

from headrace.logux_envelope import Created, Number, plain, stamp_of

_encode = msgspec.json.Encoder().encode


class Tick(NamedTuple):
    """What the times of one host grow by: milliseconds, and a number within them."""

    ms: Number
    number: Number


NEVER = Tick(0, -1)

AHEAD_MS_MAX = 60_000
"""How far times may be ahead of the clock, so that they only grow when it is corrected a little."""


def following(last: Tick, wanted: Tick) -> Tick:
    """The one that is wanted; if it is not behind the last, the next that is.

    But a clock that was far ahead once is not followed for ever.
    """
    if wanted > last or wanted.ms < last.ms - AHEAD_MS_MAX:
        return wanted
    return Tick(last.ms, last.number + 1)


def shifted(created: Created, ms: int) -> Created:
    """The time by another clock. Those of other timers are what they are."""
    if stamp_of(created) is None:
        return created
    return [plain(created[0] + ms), *created[1:]]


def after(created: Created) -> Created:
    """The time of the standard timer that comes next in the same millisecond."""
    # As an integer: large floats do not grow by one, and whoever looks for a free time would look for ever.
    return [*created[:2], int(created[2]) + 1]


def text_of(created: Created) -> str:
    """The same for equal times only: numbers are compared as numbers."""
    return _encode([one if isinstance(one, str) else plain(one) for one in created]).decode()


def created_of_text(text: str) -> Created:
    created: Created = msgspec.json.decode(text)
    return created
