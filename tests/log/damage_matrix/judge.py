"""Judge what a start makes of a damaged data directory: a black box, driven through the store and `verify`.

The content of a damaged block is:

- Journal: the entries with a byte in the block, header or data, because one checksum covers an entry. Entries
  in other sectors of the same frame, and other frames, must survive. Damage to headers of files and frames,
  or to entries that create topics, excuses no loss: a block that holds only such structures costs no record.
- Segment: the runs with a byte in the block, because one checksum covers a run.
- Index: no record at all. The records are intact, and their sizes say where each begins.
- Catalogue and its write-ahead log: no record at all, but the cursors, notes and producers whose rows are in
  a damaged page of SQLite, because half a page cannot be used.
- Staged file: the blocks of a pending batch with a byte in the damaged block.
- Cursors, notes, producers: those whose names or values are in the block, or begin shortly after it.

The exception is the last frame after an unclean stop: if the damage touches its foot, its records may be
missing without a report, and their offsets may be used again. With an intact foot, everything must be
reported, but after a crash of the machine the damage may cost all of the frame. If a damaged block holds
parts of several frames and the last frame is one of them, nothing after the block shows that the others were
completely written. They count as the last frame too, except in the first block of a file, whose header shows
the damage, and except for a cut or missing file, whose size shows it. Set `TAIL_IS_ONE_FRAME` for the narrow
reading.

A batch whose entries are lost continues from its staged files, if they still exist: its records may come
again after everything else.

A start "says" something when it reports it or logs a warning. Reading everything counts as a part of the
start, which does not read segments itself. A line about a write that was never acknowledged is not about
damage.
"""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from headrace.errors import HeadraceError
from headrace.log.commit.journal import FRAME_FOOT_BYTES, boot_id
from headrace.log.disk import Disk
from headrace.log.layout import Layout
from headrace.log.records import pack_record
from headrace.log.verify.verify import Report, verify
from headrace.model import Position
from tests.fakes.store import StepStore
from tests.log.damage_matrix.damages import CONTENTS, WHOLE, Damage
from tests.log.damage_matrix.worlds import Group, Place, World
from tests.log.expected import check_order

TAIL_IS_ONE_FRAME = True
INDEX_ROWS_ARE_CONTENT = False
"""Set to let a damaged index block cost the runs of its rows."""

PAGE_BYTES = 4096
"""Page size of SQLite. Write-ahead log frames are a little longer; this excuses the neighbour too."""

HEAD_BYTES_MAX = 128
TAIL_BYTES_MAX = 32
"""Maximum bytes of a cursor's, note's or producer's entry or row before and after its name or value."""

Records = dict[int, tuple[int, bytes]]
"""Ordinal and payload of records, by offset."""


class Fault(NamedTuple):
    """An error of a start or of `verify`."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass
class Served:
    """Result of starting on a directory."""

    store: StepStore
    said: list[str]
    """Reports of the start and warnings, without lines about writes that were never acknowledged."""
    topics: dict[str, Records] = field(default_factory=dict)


def judge(world: World, damage: Damage, scratch: Path, *, settle: bool = False) -> list[Fault]:
    """Damage a copy of the world, and return all faults of what follows.

    `settle` applies the journal between the first start and the second one. The returned list is empty for a
    damage that changes nothing.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(world.path, scratch)
    if not damage.apply(scratch):
        return []
    return Trial(world, damage, scratch).run(settle=settle)


class Trial:
    """One damaged directory that is verified, started, used and started again."""

    def __init__(self, world: World, damage: Damage, path: Path) -> None:
        self.world = world
        self.damage = damage
        self.path = path
        self.faults: list[Fault] = []
        self.report: Report | None = None
        self.tail = unnoticed(world, damage)
        self.doubtful: set[int] = set()
        """Commits that may be missing with a report."""
        if not hits_the_end(world, damage):
            is_in_doubt = world.boot != boot_id()
            self.tail, self.doubtful = set(), self.tail if is_in_doubt else set()
        self.lost: dict[str, list[int]] = {}
        """By topic, offsets of lost records that must be reported."""
        self.unnoticed: dict[str, list[int]] = {}
        """By topic, offsets of lost records of the last frame."""
        self.lost_blocks = 0
        """Number of blocks of a batch that are lost and must be reported."""

    def run(self, *, settle: bool = False, verify_first: bool = True) -> list[Fault]:
        if verify_first:
            self._verify()
        with heard() as lines:
            served = self._start(lines)
            if served is None:
                return self.faults
            try:
                self._check_records(served)
                self._check_state(served)
                self._check_reports(served)
                self._check_verify(served)
                after = self._go_on(served)
                if settle:
                    served.store.settle()
                ends = {name: _end(served.store, name) for name in self.world.topics}
            except Exception as error:
                self._fault("using it raised", repr(error))
                return self.faults
            finally:
                served.store.crash()
        self._check_second_start(served, after, ends)
        return self.faults

    def _fault(self, kind: str, text: str) -> None:
        self.faults.append(Fault(kind, text))

    # Before the start

    def _verify(self) -> None:
        try:
            self.report = verify(self.path)
        except HeadraceError as error:
            self._fault("verify failed", str(error))
        except Exception as error:
            self._fault("verify raised", repr(error))

    # The first start

    def _start(self, lines: list[str]) -> Served | None:
        try:
            served = open_store(self.world, self.path, lines)
        except Exception as error:
            self._fault("does not start", repr(error))
            return None
        return served

    def _check_records(self, served: Served) -> None:
        hit = {id(group) for group in self.world.groups if self._is_hit(group)}
        unexplained: dict[str, list[str]] = {}
        for name, expected in self.world.topics.items():
            found = served.topics[name]
            self._check_content(served, name, found)
            for group in self.world.groups:
                if group.topic != name:
                    continue
                lost = [
                    offset
                    for offset, one in group.by_offset().items()
                    if offset in expected.records and found.get(offset) != one
                ]
                if not lost:
                    continue
                if group.commit in self.tail:
                    self.unnoticed.setdefault(name, []).extend(lost)
                else:
                    self.lost.setdefault(name, []).extend(lost)
                    if id(group) not in hit and group.commit not in self.doubtful:
                        unexplained.setdefault(self._how_lost(group), []).extend(
                            f"{name} at {offset}" for offset in lost
                        )
        for kind, places in unexplained.items():
            self._fault(kind, f"{len(places)} records, the first: {places[0]}")
        self._check_pending(served)

    def _is_hit(self, group: Group) -> bool:
        if INDEX_ROWS_ARE_CONTENT and self.damage.kind == "index":
            log = self.damage.file.replace(".idx", ".log")
            return any(place.file == log for place in group.places)
        return any(place.overlaps(self.damage.place) for place in group.places)

    def _how_lost(self, group: Group) -> str:
        frame = self.world.commits[group.commit].frame
        if frame is None or self.damage.kind != "journal":
            return "lost"
        if frame.overlaps(self.damage.place):
            return "lost in the same frame"
        if frame.file == self.damage.file:
            return "lost in other frames"
        return "lost in other files"

    def _check_content(self, served: Served, name: str, found: Records) -> None:
        expected = self.world.topics[name]
        try:
            check_order(name, served.store.store.topic(name), found)
        except AssertionError as error:
            self._fault("out of order", str(error))
        pending = {payload for one in self.world.pending for payload in one.payloads}
        again = self.world.batched - {payload for _, payload in _below(found, expected.end[0])}
        for offset, one in found.items():
            if offset in expected.records:
                if one != expected.records[offset]:
                    self._fault("changed", f"{name} at {offset}")
            elif expected.trimmed.get(offset) == one:
                if not self._may_be_back(name):
                    self._fault("back from the dead", f"{name} at {offset}")
            elif one[1] not in pending | again or offset < expected.end[0]:
                self._fault("never published", f"{name} at {offset}")

    def _may_be_back(self, name: str) -> bool:
        """True if the damage may have destroyed the entry of a trim or of a destruction."""
        frames = [self.world.commits[number].frame for number in self.world.trims.get(name, [])]
        if any(frame is not None and frame.overlaps(self.damage.place) for frame in frames):
            return True
        return self.damage.kind in ("catalogue", "wal") and self._is_named(name.encode())

    def _check_pending(self, served: Served) -> None:
        """Check that a decided batch is appended, each block once, except for damaged blocks."""
        decided = self.world.commits[-1].frame
        if decided is not None and decided.overlaps(self.damage.place):
            return
        unexplained = []
        for block in self.world.pending:
            payloads = [payload for _, payload in served.topics[block.topic].values()]
            counts = {payloads.count(payload) for payload in block.payloads}
            if counts == {1}:
                continue
            if counts != {0}:
                self._fault("batch", f"records are there {counts} times")
            else:
                self.lost_blocks += 1
                if not block.place.overlaps(self.damage.place):
                    unexplained.append(block.place)
        if unexplained:
            self._fault("batch: lost", f"{len(unexplained)} blocks, the first: {unexplained[0]}")

    def _check_state(self, served: Served) -> None:
        """Check that cursors and notes have their last value, or an earlier one that the damage explains."""
        store = served.store.store
        cursors = {(one.topic, one.reader): one.position for one in store.cursors(limit=1000)}
        for (name, reader), history in self.world.cursors.items():
            value = _before_jump(cursors.get((name, reader)), history, store.look(name).epoch)
            hit = self._is_named(reader.encode())
            self._check_value(f"cursor {reader} of {name}", value, history, hit=hit)
        for key, values in self.world.notes.items():
            note = store.note(key)
            hit = self._is_named(key) or any(value and self._is_named(value) for value in values)
            self._check_value(
                f"note {key!r}", note.value if note is not None else None, values, hit=hit
            )
        for name, expected in self.world.topics.items():
            if store.topic(name).exists and not expected.exists and not self._may_be_back(name):
                self._fault("back from the dead", name)

    def _check_value(
        self,
        what: str,
        value: Position | bytes | None,
        history: list[Position | None] | list[bytes | None],
        *,
        hit: bool,
    ) -> None:
        if value == history[-1]:
            return
        if value is not None and value not in history:
            self._fault("state: invented", what)
        elif not hit:
            self._fault("state: lost", what)

    def _is_named(self, mark: bytes) -> bool:
        """True if these bytes are in the damaged place, or begin shortly after it."""
        if any(mark in self.world.commits[number].marks for number in self.tail | self.doubtful):
            return True
        place = self.damage.place
        if self.damage.kind in ("catalogue", "wal", "backup"):
            place = Place(place.file, place.begin // PAGE_BYTES * PAGE_BYTES, _page_end(place.end))
        data = (self.world.path / self.damage.file).read_bytes()
        at = data.find(mark)
        while at >= 0:
            begin, end = max(0, at - HEAD_BYTES_MAX), at + len(mark) + TAIL_BYTES_MAX
            if Place(place.file, begin, end).overlaps(place):
                return True
            at = data.find(mark, at + 1)
        return False

    # Reports

    @property
    def _lost(self) -> str:
        """Description of the losses that must be reported; empty if there are none."""
        counts = {"records": sum(map(len, self.lost.values())), "blocks": self.lost_blocks}
        return " and ".join(f"{count} {what}" for what, count in counts.items() if count)

    def _check_reports(self, served: Served) -> None:
        if self._lost and not served.said:
            self._fault("unreported", f"{self._lost} are lost without a word")
        if self.damage.kind == "journal" and self._is_something_left():
            kept = self.path / "quarantine"
            if not kept.is_dir() or not any(kept.iterdir()):
                self._fault("not in quarantine", "what is left of damaged entries is not kept")

    def _is_something_left(self) -> bool:
        """True if a lost entry reaches beyond the damaged block."""
        bad = self.damage.place
        return self.damage.what in CONTENTS and any(
            place.overlaps(bad) and (place.begin < bad.begin or place.end > bad.end)
            for group in self.world.groups
            if group.offset in self.lost.get(group.topic, ())
            for place in group.places
        )

    def _check_verify(self, served: Served) -> None:
        report = self.report
        if report is None:
            return
        if self._lost and not report.damaged:
            self._fault("verify: silent", f"{self._lost} are lost")
        if served.said and not report.damaged:
            self._fault("verify: sound, but the start reports damage", served.said[0])
        # A start reads neither segments that are about to be trimmed, nor headers of indexes, nor the backup.
        unread = not self.lost and self.damage.kind in ("segment", "index", "backup")
        if report.damaged and not served.said and not unread:
            self._fault("verify: damaged, but the start says nothing", _first(report))
        of_catalogue = any(one.file.startswith("catalogue") for one in report.damages)
        by_name = {one.name: one for one in report.topics}
        for name, expected in self.world.topics.items():
            checked = by_name.get(name)
            # A batch that continues from its staged files may append at the same offsets again.
            old = {
                offset
                for offset, (_, payload) in served.topics[name].items()
                if offset in expected.records and payload not in self.world.batched
            }
            if checked is None:
                if old and not of_catalogue:
                    self._fault("verify: differs from the start", f"{name} is not checked")
                continue
            sound = {
                offset
                for offset, (_, payload) in expected.records.items()
                if any(part.offset <= offset < part.end for part in checked.ranges)
                and payload not in self.world.batched
            }
            if sound - old or (old - sound and not of_catalogue):
                self._fault(
                    "verify: differs from the start",
                    f"{name}: {len(sound - old)} sound but not served, "
                    f"{len(old - sound)} served but not sound",
                )
            self._check_named(report, name, set(self.lost.get(name, ())))

    def _check_named(self, report: Report, name: str, lost: set[int]) -> None:
        """Check that every lost record is in a reported range, unless a damage has no topic."""
        if any(one.topic is None for one in report.damages):
            return
        ranges = [
            one.range
            for topic in report.topics
            if topic.name == name
            for one in topic.damages
            if one.range is not None
        ]
        unnamed = [at for at in lost if not any(one.offset <= at < one.end for one in ranges)]
        if unnamed:
            self._fault("verify: silent", f"{name}: {len(unnamed)} lost records are in no range")

    # Appends after the damage

    def _go_on(self, served: Served) -> dict[str, Records]:
        """Append to every topic, after all that clients saw; return all records that are served then."""
        store = served.store
        for name in self.world.topics:
            end = store.store.topic(name).end
            must = self._end_seen(name)
            if (end.offset, end.ordinal) < must:
                self._fault("offsets given twice", f"{name} goes on at {end.offset}, not {must[0]}")
            if end.epoch < self.world.topics[name].epoch and must > (0, 0):
                self._fault("epoch went back", name)
        topics = {
            store.store.topic(name): [pack_record(b"after the damage: " + name.encode())]
            for name in self.world.topics
        }
        committed: list[bool] = []
        store.store.append(topics, lambda: committed.append(True))
        store.runner.run()
        if not committed:
            self._fault("takes no appends", store.store.held_back)
        self._say_again(store)
        after = {name: store.content(name) for name in self.world.topics}
        for name, before in served.topics.items():
            if name in after and not before.items() <= after[name].items():
                self._fault("changed", f"{name}: an append changed what was served before")
        return after

    def _end_seen(self, name: str) -> tuple[int, int]:
        """Return the topic's end as clients know it, without the unnoticed records of the last frame."""
        expected = self.world.topics[name]
        unnoticed = self.unnoticed.get(name)
        if not unnoticed:
            return expected.end
        first = min(unnoticed)
        return first, expected.records[first][0]

    def _say_again(self, store: StepStore) -> None:
        for (name, producer), (number, payload) in self.world.producers.items():
            hit = any(
                pack_record(payload) in group.records and self._is_hit(group)
                for group in self.world.groups
            )
            known = not hit and not self._is_named(producer.encode())
            if self.world.topics[name].exists and known:
                answer = store.append_once(name, producer, number, payload)
                if not answer.duplicate:
                    self._fault("state: lost", f"producer {producer} of {name}")

    # The second start

    def _check_second_start(
        self, first: Served, after: dict[str, Records], ends: dict[str, Position]
    ) -> None:
        with heard() as lines:
            try:
                second = open_store(self.world, self.path, lines)
            except Exception as error:
                self._fault("does not start again", repr(error))
                return
            new = [line for line in second.store.reports if is_damage(line)]
            for line in new:
                if line not in first.said:
                    self._fault("second start: reports more", line)
            for name in self.world.topics:
                if second.topics[name] != after[name]:
                    self._fault("second start: serves something else", name)
                if _end(second.store, name) != ends[name]:
                    self._fault(
                        "second start: another end",
                        f"{name}: {ends[name]}, then {_end(second.store, name)}",
                    )
            second.store.crash()


def open_store(world: World, path: Path, lines: list[str]) -> Served:
    """Start on a directory as a server does, and read everything."""
    layout = Layout(path)
    os.close(layout.lock(Disk()))
    store = StepStore(world.config(path), boot_id=boot_id())
    try:
        served = Served(store, [])
        names = {topic.name for topic in store.store.topics("", "", 1000)}
        for name in sorted(names | set(world.topics)):
            served.topics[name] = store.content(name)
    except BaseException:
        store.crash()
        raise
    served.said = [line for line in [*store.reports, *lines] if is_damage(line)]
    return served


def is_damage(line: str) -> bool:
    return "never acknowledged" not in line and "a crash of the machine" not in line


@contextmanager
def heard() -> Iterator[list[str]]:
    """Collect the warnings and errors that Headrace logs."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, logger = Handler(logging.WARNING), logging.getLogger("headrace")
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def unnoticed(world: World, damage: Damage) -> set[int]:
    """Return the commits that may be missing without a report (see the module docstring)."""
    framed = [commit for commit in world.commits if commit.frame is not None]
    if not framed or not framed[-1].frame.overlaps(damage.place):
        return set()
    found = {framed[-1].number}
    if damage.position and damage.length != WHOLE and not TAIL_IS_ONE_FRAME:
        found |= {commit.number for commit in framed if commit.frame.overlaps(damage.place)}
    return found


def hits_the_end(world: World, damage: Damage) -> bool:
    """True if the damage touches the foot of the last frame."""
    frames = [commit.frame for commit in world.commits if commit.frame is not None]
    last = frames[-1] if frames else None
    return last is None or last._replace(begin=last.end - FRAME_FOOT_BYTES).overlaps(damage.place)


def _before_jump(
    found: Position | None, history: list[Position | None], epoch: int
) -> Position | None:
    """Return the value that the cursor was set to. A topic that jumps takes its cursors to its new epoch."""
    if found is not None and found.epoch == epoch:
        for at in reversed(history):
            if at is not None and at[1:] == found[1:] and at.epoch <= epoch:
                return at
    return found


def _page_end(position: int) -> int:
    return -(-position // PAGE_BYTES) * PAGE_BYTES


def _below(found: Records, end: int) -> list[tuple[int, bytes]]:
    return [one for offset, one in found.items() if offset < end]


def _end(store: StepStore, name: str) -> Position:
    return store.store.topic(name).end


def _first(report: Report) -> str:
    found = [*report.damages, *(one for topic in report.topics for one in topic.damages)]
    return str(found[0])
