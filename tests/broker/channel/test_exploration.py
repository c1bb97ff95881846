"""Every interleaving, up to a depth, of a channel's possible steps: no silent loss and no duplicates.

The tests run the broker's own code on a store in memory that may crash between any two commits. Worlds that
cannot be distinguished are explored once. HEADRACE_TORTURE=N goes N / 20 steps deeper.
"""

import os
from collections.abc import Callable, Iterator

import pytest

from headrace.broker.channel.channel import Channel
from headrace.broker.channel.notes import MEMBER, read_members
from tests.broker.channel.world import GRACE_MS, LEASE_MS, NAME, ModelStore, PageConnection, World

DEEPER = int(os.environ.get("HEADRACE_TORTURE", "0")) // 20

Step = tuple[str, Callable[[World], None]]


def steps(world: World, pages: str = "") -> Iterator[Step]:
    """Yield the possible next steps. Processors in `pages` may show a state and the messages after it."""
    for name, one in world.processors.items():
        connection = one.connection
        yield f"{name} connects", lambda w, n=name: w.processors[n].connect()  # type: ignore[misc]
        if name in pages:
            yield f"{name} opens a page", lambda w, n=name: _open(w, n, True)  # type: ignore[misc]
            if one.page is not None:
                yield f"{name}'s page is back", lambda w, n=name: _open(w, n, False)  # type: ignore[misc]
        if connection is None or not connection.is_open:
            if name == "b":
                yield "b polls", lambda w: w.processors["b"].poll()
                yield "b posts", lambda w: w.processors["b"].post()
            continue
        yield f"{name} is cut off", lambda w, n=name: w.processors[n].disconnect()  # type: ignore[misc]
        if not connection.is_joined:
            continue
        yield f"{name} sends", lambda w, n=name: _send(w, n, 1)  # type: ignore[misc]
        if one.accepted or world.channel.members[name].number:
            yield f"{name} sends again", lambda w, n=name: _send(w, n, 0)  # type: ignore[misc]
        has_page = isinstance(connection, PageConnection)
        if connection.got or connection.state is not None or has_page:
            yield f"{name} acknowledges", lambda w, n=name: _ack(w, n, 99)  # type: ignore[misc]
        if len(connection.got) > 1:
            yield f"{name} acknowledges one", lambda w, n=name: _ack(w, n, 1)  # type: ignore[misc]
        yield f"{name} leaves", lambda w, n=name: _leave(w, n)  # type: ignore[misc]
    if pages and world.slow is None:
        yield "an operator destroys it", World.destroy
    schedule = world.channel.schedule
    if schedule is not None and schedule.due_ms:
        yield "an operator keeps it", World.keep
    if world.slow is not None and world.slow.asked:
        yield "the database answers", World.database_answers
    if world.store.pending:
        yield "commit", World.commit
        yield "crash", lambda w: w.crash(0)
        yield "crash with one more durable", lambda w: w.crash(1)
    else:
        yield "crash", lambda w: w.crash(0)
        yield "the grace passes", lambda w: w.pass_time(GRACE_MS + 1)
        yield "the lease passes", lambda w: w.pass_time(LEASE_MS + 1)
        yield "a tick", World.tick


def _open(world: World, name: str, is_reloaded: bool) -> None:
    world.processors[name].open_page(is_reloaded=is_reloaded)


def _send(world: World, name: str, ahead: int) -> None:
    connection = world.processors[name].connection
    assert connection is not None
    connection.send(max(1, connection.channel.members[name].number + ahead))


def _ack(world: World, name: str, count: int) -> None:
    connection = world.processors[name].connection
    assert connection is not None
    connection.ack(count)


def _leave(world: World, name: str) -> None:
    one = world.processors[name]
    connection = one.connection
    assert connection is not None
    connection.abandon()
    one.connection = None
    # A processor that comes back is a new one, and may get its messages again. It keeps what it has until the
    # answer.
    one.confirmed = set()
    connection.channel.leave(name, one.kept.clear)


def fingerprint(world: World) -> object:
    """Return a value that is equal for worlds with the same possible futures."""
    disk, now = world.disk, world.clock_ms
    known: Channel | None = world.channels._known.get(NAME)
    channel = None
    if known is not None:
        members = tuple(
            (
                *(m.name, m.offset, m.ordinal, m.number, m.standing, m.acked, m.next_offset),
                *(tuple(m.sent or ()), m.subscriber is not None, m.is_polling, now - m.seen_ms),
                m.gets_own,
            )
            for m in known.members.values()
        )
        due = known.schedule.due_ms - now if known.schedule is not None else None
        channel = (members, known.present, due, known.is_busy, len(known._held or ()))
    processors = tuple(
        (
            *(one.name, one.accepted, tuple(one.kept), frozenset(one.confirmed), one.is_member),
            (
                None
                if (c := one.connection) is None
                else (type(c), c.is_open, c.is_joined, tuple(c.got), c.state and tuple(c.state))
            ),
            (one.page_offset, one.page_base) if one.page is not None else None,
        )
        for one in world.processors.values()
    )
    notes = tuple(
        # Values of members contain times.
        (key, note.value if key[:2] != MEMBER else None, note.due_ms and note.due_ms - now)
        for key, note in sorted(disk.notes.items())
    )
    members_noted = tuple(
        (m.name, m.offset, m.ordinal, m.number, m.standing, now - m.seen_ms)
        for m in read_members(ModelStore(disk), NAME)  # type: ignore[arg-type]
    )
    log = (len(disk.records), disk.start, disk.end, disk.exists, disk.base)
    pending = tuple((len(p.records), len(p.notes), p.trim, p.destroy) for p in world.store.pending)
    asked = len(world.slow.asked) if world.slow is not None else 0
    changed = (len(world.channels._changed), world.channels._swept, asked)
    away = tuple(one.was_away_ms > LEASE_MS for one in world.processors.values())
    changed = (*changed, away, world.is_kept, world.snapshot and world.snapshot.offset)
    return channel, processors, notes, members_noted, log, pending, changed


def replay(
    start: tuple[str, ...], path: tuple[str, ...], names: str, *, slow: bool, pages: str = ""
) -> World:
    world = World(names, slow=slow)
    for wanted in start:
        run(world, wanted, pages)
        world.settle()
    for wanted in path:
        run(world, wanted, pages)
    return world


def run(world: World, wanted: str, pages: str) -> None:
    dict(steps(world, pages))[wanted](world)
    world.runner.run()


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
    depth = DEPTHS[start] + DEEPER - 2 * (len(names) - 2)
    explore(STARTS[start], names, depth, slow=slow)


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
    explore(PAGES[start], "ab", depth, slow=slow, pages="a")


def explore(start: tuple[str, ...], names: str, depth: int, *, slow: bool, pages: str = "") -> None:
    seen: set[object] = set()
    began = replay(start, (), names, slow=slow, pages=pages)
    paths: list[tuple[str, ...]] = [(name,) for name, _ in steps(began, pages)]
    for _ in range(depth):
        found: list[tuple[str, ...]] = []
        for path in paths:
            try:
                world = replay(start, path, names, slow=slow, pages=pages)
                world.check()
                mark = fingerprint(world)
                if mark in seen:
                    continue
                seen.add(mark)
                found += [(*path, name) for name, _ in steps(world, pages)]
                world.settle()
            except Exception as error:
                raise AssertionError(f"{' → '.join(path)}: {error!r}") from error
        paths = found
    assert len(seen) > 50
