"""Every interleaving, up to a depth, of a channel's possible steps: no silent loss and no duplicates.

The tests run the broker's own code on a store in memory that may crash between any two commits. A path is a
list of steps by name. Each path is replayed in a new world, whose invariants are checked after the last step
and once more when everything has come to rest. Worlds that cannot be distinguished are explored once.
A usual run goes one step less deep with two processors. HEADRACE_TORTURE=N goes N / 20 steps deeper.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import pytest

from headrace.broker.channel.channel import Channel
from headrace.broker.channel.notes import MEMBER, read_members
from tests.broker.channel.model_store import NAME, ModelStore
from tests.broker.channel.world import GRACE_MS, LEASE_MS, PageConnection, Processor, World
from tests.tools import TORTURE

DEEPER = TORTURE // 20

Step = tuple[str, Callable[[], None]]
Path = tuple[str, ...]

BOTH = ("a connects", "b connects")
STARTS = {
    "nothing": (),
    "both are there": (*BOTH, "a sends"),
    "one was away for too long": (
        *(*BOTH, "a sends", "b acknowledges", "b is cut off", "a sends", "the lease passes"),
        "a sends",
    ),
    "destroyed": (
        *(*BOTH, "a sends", "b acknowledges", "b is cut off", "a sends", "a is cut off"),
        "the grace passes",
    ),
    "one is away": (*BOTH, "a sends", "b acknowledges", "b is cut off", "a sends"),
    "about to be destroyed": (*BOTH, "a sends", "a is cut off", "b is cut off"),
}
DEPTHS = dict.fromkeys(STARTS, 4) | {"nothing": 6, "destroyed": 5, "about to be destroyed": 5}


@pytest.mark.parametrize("slow", [False, True], ids=["notes", "database"])
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("names", ["ab", "abc"])
def test_every_interleaving(names: str, start: str, slow: bool) -> None:
    """Steps before the start are settled one by one; steps after it are not."""
    if len(names) > 2 and slow and not DEEPER:
        pytest.skip("takes long: see `make torture`")
    less = 2 if len(names) > 2 else int(not TORTURE)
    depth = DEPTHS[start] + DEEPER - less
    Exploration(STARTS[start], names, slow=slow).run(depth)


def test_a_join_that_waits_for_longer_than_a_lease_is_told_what_it_missed() -> None:
    start = STARTS["about to be destroyed"]
    path = ("b connects", "b connects", "the lease passes", "an operator keeps it", "b connects")
    world = Exploration(start, "ab", slow=True)._replay(path)
    world.settle()
    connection = world.processors["b"].connection
    assert connection is not None and connection.is_joined
    assert connection.state == [("a", 1)]


PAGES = {
    "nothing": (),
    "a page is there": ("a opens a page", "b connects", "a sends", "b sends"),
    "a page is behind": (
        *("a opens a page", "b connects", "b sends", "a is cut off", "b sends"),
        *("the lease passes", "b sends"),
    ),
    "destroyed": ("a opens a page", "a sends", "a is cut off", "the grace passes"),
    "destroyed by hand": ("a opens a page", "a sends", "a is cut off", "an operator destroys it"),
}


@pytest.mark.parametrize(
    ("start", "slow"),
    [(start, slow) for start in PAGES for slow in (False, True) if not (slow and "hand" in start)],
)
def test_every_interleaving_of_pages_that_begin_with_the_state(start: str, slow: bool) -> None:
    """A page shows a state and then every later message once and in order, and its cursor stays."""
    depth = {"nothing": 4, "a page is there": 2}.get(start, 3) + DEEPER
    Exploration(PAGES[start], "ab", slow=slow, pages="a").run(depth)


class Exploration(NamedTuple):
    """All paths after a start. Processors in `pages` may show a state and the messages after it."""

    start: Path
    names: str
    slow: bool
    pages: str = ""

    def run(self, depth: int) -> None:
        seen: set[object] = set()
        paths = self._longer((), self._replay(()))
        for _ in range(depth):
            found: list[Path] = []
            for path in paths:
                try:
                    world = self._replay(path)
                    world.check()
                    mark = fingerprint(world)
                    if mark in seen:
                        continue
                    seen.add(mark)
                    found += self._longer(path, world)
                    world.settle()
                except Exception as error:
                    raise AssertionError(f"{' → '.join(path)}: {error!r}") from error
            paths = found
        assert len(seen) > 50

    def _replay(self, path: Path) -> World:
        world = World(self.names, slow=self.slow)
        for name in self.start:
            self._take(name, world)
            world.settle()
        for name in path:
            self._take(name, world)
        return world

    def _take(self, name: str, world: World) -> None:
        dict(steps(world, self.pages))[name]()
        world.runner.run()

    def _longer(self, path: Path, world: World) -> list[Path]:
        return [(*path, name) for name, _ in steps(world, self.pages)]


# The possible next steps


def steps(world: World, pages: str) -> Iterator[Step]:
    for one in world.processors.values():
        yield from steps_of_processor(one, has_pages=one.name in pages)
    yield from steps_of_operator(world, may_destroy=bool(pages) and world.slow is None)
    if world.slow is not None and world.slow.asked:
        yield "the database answers", world.database_answers
    yield "crash", world.crash
    if world.store.pending:
        yield "commit", world.commit
        yield "crash with one more durable", partial(world.crash, 1)
    else:
        yield "the grace passes", partial(world.pass_time, GRACE_MS + 1)
        yield "the lease passes", partial(world.pass_time, LEASE_MS + 1)
        yield "a tick", world.tick


def steps_of_processor(one: Processor, *, has_pages: bool) -> Iterator[Step]:
    name, connection = one.name, one.connection
    yield f"{name} connects", one.connect
    if has_pages:
        yield f"{name} opens a page", partial(one.open_page, is_reloaded=True)
        if one.page is not None:
            yield f"{name}'s page is back", one.open_page
    if connection is None or not connection.is_open:
        if name == "b":
            yield "b polls", one.poll
            yield "b posts", one.post
        return
    yield f"{name} is cut off", one.disconnect
    if not connection.is_joined:
        return
    number = connection.channel.members[name].number
    yield f"{name} sends", partial(connection.send, number + 1)
    if one.accepted or number:
        yield f"{name} sends again", partial(connection.send, max(1, number))
    if connection.got or connection.state is not None or isinstance(connection, PageConnection):
        yield f"{name} acknowledges", partial(connection.ack, 99)
    if len(connection.got) > 1:
        yield f"{name} acknowledges one", partial(connection.ack, 1)
    yield f"{name} leaves", one.leave


def steps_of_operator(world: World, *, may_destroy: bool) -> Iterator[Step]:
    if may_destroy:
        yield "an operator destroys it", world.destroy
    schedule = world.channel.schedule
    if schedule is not None and schedule.due_ms:
        yield "an operator keeps it", world.keep


# Marks that distinguish worlds


def fingerprint(world: World) -> object:
    """Return a value that is equal for worlds with the same possible futures."""
    channels = world.channels
    known = channels._known.get(NAME)
    return (
        _in_memory(known, world.clock_ms) if known is not None else None,
        tuple(_of_processor(one) for one in world.processors.values()),
        _on_disk(world),
        tuple((len(p.records), len(p.notes), p.trim, p.destroy) for p in world.store.pending),
        len(world.slow.asked) if world.slow is not None else 0,
        (len(channels.changed), channels._swept, world.is_kept),
    )


def _in_memory(channel: Channel, now_ms: int) -> object:
    members = tuple(
        (
            (m.name, m.number, m.standing, m.gets_own, m.is_polling, m.subscriber is not None),
            (m.offset, m.ordinal, m.acked, m.next_offset, tuple(m.sent or ())),
            now_ms - m.seen_ms,
        )
        for m in channel.members.values()
    )
    due_ms = channel.schedule.due_ms - now_ms if channel.schedule is not None else None
    return members, channel.present, due_ms, channel.is_busy, len(channel._held or ())


def _of_processor(one: Processor) -> object:
    connection = None
    if (c := one.connection) is not None:
        connection = type(c), c.is_open, c.is_joined, tuple(c.got), c.state and tuple(c.state)
    page = (one.page_offset, one.page_base) if one.page is not None else None
    is_late = one.was_away_ms > LEASE_MS
    kept = tuple(one.kept), frozenset(one.confirmed)
    return one.name, one.accepted, one.is_member, is_late, kept, connection, page


def _on_disk(world: World) -> object:
    disk, now_ms = world.disk, world.clock_ms
    notes = tuple(
        # Values of members contain times.
        (key, note.value if key[:2] != MEMBER else None, note.due_ms and note.due_ms - now_ms)
        for key, note in sorted(disk.notes.items())
    )
    members = tuple(
        (m.name, m.offset, m.ordinal, m.number, m.standing, now_ms - m.seen_ms)
        for m in read_members(ModelStore(disk), NAME)  # type: ignore[arg-type]
    )
    log = (len(disk.records), disk.start, disk.end, disk.exists, disk.base)
    return notes, members, log, world.snapshot and world.snapshot.offset
