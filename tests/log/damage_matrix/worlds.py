"""Data directories in many states, with a record of everything that was acknowledged. Damages nothing.

A `World` is a directory as a stop left it, and the expectation of what a start has to serve from it. It knows
nothing of the journal's format: it finds bytes by searching for them, because every payload is unique.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from headrace.config.settings import Config, Journal, Limits, PrefixRule, Segment
from headrace.log.commit.journal import boot_id
from headrace.log.layout import Layout
from headrace.log.records import pack_record
from headrace.log.store import Note
from headrace.model import Durability, Position
from tests.fakes.store import StepStore

JOURNAL_BYTES = 64 * 1024
BLOCK_BYTES = 4096
"""Frames begin at multiples of this."""
FRAMES_POSITION = 2 * BLOCK_BYTES
"""Position of the first frame of a file, after the two copies of the file's header."""

ENTRY_PREFIX_BYTES = 0
"""Bytes of an entry in the journal that precede the part in `Appended.entries`."""

OTHER_BOOT = b"some other boot."


class Place(NamedTuple):
    """A range of bytes in a file."""

    file: str
    """Path relative to the data directory."""
    begin: int
    end: int

    def overlaps(self, other: "Place") -> bool:
        return self.file == other.file and self.begin < other.end and other.begin < self.end


@dataclass
class Group:
    """Records that one commit appended to one topic: one journal entry, covered by one checksum."""

    topic: str
    offset: int
    ordinal: int
    records: list[bytes]
    head_bytes: int
    commit: int
    places: list[Place] = field(default_factory=list)
    """Places of these records; damage to any of these bytes may cost the records."""

    @property
    def data(self) -> bytes:
        return b"".join(self.records)

    @property
    def end(self) -> int:
        return self.offset + len(self.data)

    def by_offset(self) -> dict[int, tuple[int, bytes]]:
        """Return ordinal and payload of each record, by offset."""
        found, offset = {}, self.offset
        for number, record in enumerate(self.records):
            found[offset] = self.ordinal + number, record[4:]
            offset += len(record)
        return found


@dataclass
class Commit:
    """One frame of the journal."""

    number: int
    groups: list[Group]
    marks: list[bytes]
    """Other unique bytes in the frame."""
    frame: Place | None = None
    """Place of the frame, if only the journal has its content."""


@dataclass
class ExpectedTopic:
    records: dict[int, tuple[int, bytes]]
    """Ordinal and payload of every acknowledged record that is not trimmed, by offset."""
    trimmed: dict[int, tuple[int, bytes]]
    end: tuple[int, int]
    epoch: int
    exists: bool


@dataclass
class World:
    """A data directory, and what a start has to find in it."""

    name: str
    path: Path
    clean: bool
    boot: bytes
    files: int
    """Number of journal files in the ring."""
    topics: dict[str, ExpectedTopic] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    cursors: dict[tuple[str, str], list[Position | None]] = field(default_factory=dict)
    """All positions that a cursor was ever set to, by topic and reader; the current one is last."""
    notes: dict[bytes, list[bytes | None]] = field(default_factory=dict)
    """All values that a note ever had, by key; the current one is last."""
    producers: dict[tuple[str, str], tuple[int, bytes]] = field(default_factory=dict)
    """Last number and payload of each producer, by topic and producer."""
    pending: list["PendingBlock"] = field(default_factory=list)
    """Blocks that a decided batch still has to append."""
    batched: set[bytes] = field(default_factory=set)
    """Payloads that were appended by batches."""
    trims: dict[str, list[int]] = field(default_factory=dict)
    """Numbers of the commits that trimmed or destroyed a topic, by topic."""

    def config(self, path: Path) -> Config:
        return small(path, self.files)

    def data_files(self) -> list[str]:
        return sorted(
            str(path.relative_to(self.path))
            for path in self.path.rglob("*")
            if path.is_file() and path.stat().st_size
        )


@dataclass
class PendingBlock:
    """A block in a staged file whose batch is decided and not appended."""

    topic: str
    payloads: list[bytes]
    place: Place


def small(path: Path, files: int) -> Config:
    """Return a configuration with 64 KiB journal files, and segments so short that a topic has several."""
    return Config(
        data_dir=path,
        journal=Journal(file_bytes=JOURNAL_BYTES, files=files, commit_bytes_max=16_384),
        segment=Segment(bytes=6000, open_files_max=8),
        limits=Limits(memory_topic_bytes_max=1 << 20),
        topics=(PrefixRule(prefix="written/", durability=Durability.WRITTEN),),
    )


class Builder:
    """Drives a store and remembers what it acknowledged."""

    def __init__(self, path: Path, *, files: int = 6, boot: bytes | None = None) -> None:
        self.world = World(path.parent.name, path, False, boot or boot_id(), files)
        self.path = path
        self._serial = 0
        self._start()

    def _start(self) -> None:
        self.store = StepStore(self.world.config(self.path), boot_id=self.world.boot)
        self._heard = 0

    def payload(self, size: int) -> bytes:
        """Return unique bytes that compress well."""
        self._serial += 1
        unique = b"%08x." % (self._serial * 0x9E3779B1 & 0xFFFFFFFF)
        return (unique * (size // len(unique) + 1))[: max(size, len(unique))]

    def append(self, sizes: Mapping[str, Sequence[int]]) -> Commit:
        """Append records with payloads of these sizes to each topic, in one commit."""
        store = self.store.store
        for name, each in sizes.items():
            records = [pack_record(self.payload(size)) for size in each]
            store.append({store.topic(name): records}, lambda: None)
        return self._commit()

    def append_payloads(self, name: str, *payloads: bytes) -> Commit:
        """Append the given payloads in one commit; each payload has to be unique."""
        self.store.append(name, *payloads)
        return self._commit()

    def append_once(self, name: str, producer: str, number: int, size: int) -> None:
        payload = self.payload(size)
        self.store.append_once(name, producer, number, payload)
        self._commit(producer.encode())
        self.world.producers[name, producer] = number, payload

    def note(self, name: str, key: bytes, size: int) -> None:
        """Append a record and set a note in one change."""
        value = self.payload(size)
        self.store.change(name, self.payload(40), notes=[Note(key, value)])
        self._commit(value)
        self.world.notes.setdefault(key, []).append(value)

    def trim(self, name: str, share: float) -> None:
        """Trim the first part of a topic, in one commit with a note by which the commit can be found."""
        topic = self.store.store.topic(name)
        wanted = topic.start_ordinal + int((topic.end_ordinal - topic.start_ordinal) * share)
        at = self.store.store.locate_ordinal(topic, wanted)
        key, value = b"trim of " + name.encode(), self.payload(30)
        self.store.change(name, notes=[Note(key, value)], trim=at)
        commit = self._commit(value)
        self.world.notes.setdefault(key, []).append(value)
        self.world.trims.setdefault(name, []).append(commit.number)

    def destroy(self, name: str) -> None:
        key, value = b"end of " + name.encode(), self.payload(30)
        self.store.change(name, notes=[Note(key, value)], destroy=True)
        commit = self._commit(value)
        self.world.notes.setdefault(key, []).append(value)
        self.world.trims.setdefault(name, []).append(commit.number)
        for group in self.world.groups:
            if group.topic == name:
                group.commit = -1

    def set_cursors(self, reader: str, *names: str) -> None:
        """Move a reader's cursors to the end of each topic, and append a record in the same commit."""
        store = self.store.store
        positions = {name: store.topic(name).end for name in names}
        store.set_cursors(reader, positions, lambda: None)
        store.append({store.topic(names[0]): [pack_record(self.payload(20))]}, lambda: None)
        self._commit(reader.encode())
        for name, at in positions.items():
            self.world.cursors.setdefault((name, reader), [None]).append(at)

    def batch(self, producer: str, number: int, *blocks: tuple[str, Sequence[int]]) -> None:
        """Append a batch of one staged file to its end."""
        made = [(name, [self.payload(size) for size in sizes]) for name, sizes in blocks]
        self.store.batch(producer, number, self.store.stage(*made))
        self.world.batched |= {payload for _, payloads in made for payload in payloads}
        self._commit(producer.encode())

    def pending_batch(self, producer: str, number: int, *blocks: tuple[str, Sequence[int]]) -> None:
        """Decide a batch, which then waits for a free journal file."""
        made = [(name, [self.payload(size) for size in sizes]) for name, sizes in blocks]
        staged = self.store.stage(*made)
        self.store.store.batches.decide(producer, number, [staged], lambda _: None)
        self.store.runner.run()
        assert self.store.store.held_back, "the journal still had room"
        files = Layout(self.path).journal_files()
        assert any(producer.encode() in file.read_bytes() for file in files), "not decided"
        data = (self.path / "staged" / staged).read_bytes()
        begin = 0
        for name, payloads in made:
            records = b"".join(map(pack_record, payloads))
            end = data.index(records) + len(records)
            place = Place(f"staged/{staged}", begin, end)
            self.world.pending.append(PendingBlock(name, payloads, place))
            begin = end
        self._commit(producer.encode())

    def _commit(self, *marks: bytes) -> Commit:
        self.store.runner.run()
        self.store.clock.ms += 70
        number = len(self.world.commits)
        groups = []
        for one in self.store.listener.appended[self._heard :]:
            data = b"".join(one.records)
            head = sum(map(len, one.entries)) - len(data)
            groups.append(
                Group(one.topic.name, one.offset, one.ordinal, list(one.records), head, number)
            )
        self._heard = len(self.store.listener.appended)
        commit = Commit(number, groups, list(marks))
        self.world.commits.append(commit)
        self.world.groups += groups
        return commit

    def room_left(self) -> int:
        """Return the number of bytes after the last record in its journal file."""
        last = self.world.groups[-1].data
        ends = [
            data.index(last) + len(last)
            for file in Layout(self.path).journal_files()
            if last in (data := file.read_bytes())
        ]
        return JOURNAL_BYTES - max(ends)

    def rotate(self) -> None:
        self.store.rotate()

    def restart(self) -> None:
        """Stop cleanly and start again."""
        self.store.close()
        self._start()

    def keep_backup(self) -> None:
        """Keep a backup of the catalogue, as the applier's process does from time to time."""
        self.store._catalogue.keep_backup(self.store._disk)

    def stop(self) -> World:
        """Stop cleanly."""
        self._note_topics()
        self.store.close()
        self.world.clean = True
        return self._located(self.path)

    def kill(self) -> World:
        """Copy the directory as it is at this moment, with the files that SQLite keeps beside its own."""
        self._note_topics()
        copy = self.path.with_name("killed")
        shutil.copytree(self.path, copy)
        self.store.crash()
        return self._located(copy)

    def kill_during_apply(self) -> World:
        """Kill when the applier has written segments but the catalogue does not list them yet."""
        self._note_topics()
        copy = self.path.with_name("killed")
        shutil.copytree(self.path, copy)
        self.store.apply_waiting()
        shutil.copytree(self.path / "segments", copy / "segments", dirs_exist_ok=True)
        self.store.crash()
        return self._located(copy)

    def _note_topics(self) -> None:
        """Remember what the store serves now, and which checksummed parts of segments hold it."""
        world, store = self.world, self.store.store
        self._applied_to: dict[str, int] = {}
        self._runs: dict[str, list[Place]] = {}
        for name in sorted({group.topic for group in world.groups}):
            topic = store.topic(name)
            records: dict[int, tuple[int, bytes]] = {}
            for group in world.groups:
                if group.topic == name:
                    records |= group.by_offset()
            start = topic.start_offset
            world.topics[name] = ExpectedTopic(
                {at: one for at, one in records.items() if at >= start and topic.exists},
                {at: one for at, one in records.items() if at < start or not topic.exists},
                (topic.end_offset, topic.end_ordinal),
                topic.epoch,
                topic.exists,
            )
            self._note_runs(name)

    def _note_runs(self, name: str) -> None:
        store = self.store.store
        topic, layout = store.topic(name), Layout(self.path)
        self._runs[name] = []
        self._applied_to[name] = 0
        reader = store.reader(topic)
        for segment in store.segments(topic):
            file = str(layout.segment(topic.id, segment.base).relative_to(self.path))
            at = max(segment.base, topic.start_offset)
            # A run that a trim has cut is still verified as a whole.
            begin = segment.base
            while at < segment.end:
                chunk = reader.read(at, 1)
                for run in chunk.runs:
                    self._runs[name].append(
                        Place(file, begin - segment.base, run.end - segment.base)
                    )
                    begin = run.end
                at = chunk.next_offset
            self._applied_to[name] = segment.end

    def _located(self, path: Path) -> World:
        world = self.world
        world.path = path
        (path / "lock").write_text("4711\n")
        journals = {
            str(file.relative_to(path)): file.read_bytes() for file in Layout(path).journal_files()
        }
        layout = Layout(path)
        for group in world.groups:
            if group.commit < 0 or not world.topics[group.topic].exists:
                continue
            if group.offset < self._applied_to[group.topic]:
                topic_runs = self._runs[group.topic]
                group.places = _runs_of(layout, group, topic_runs)
            else:
                group.places = [_in_journal(journals, group)]
        if not world.clean:
            self._locate_frames(journals)
        return world

    def _locate_frames(self, journals: Mapping[str, bytes]) -> None:
        """Locate each frame: it begins at a block, after the frame before it, and ends with a block."""
        before: Place | None = None
        for commit in self.world.commits:
            held = [
                place
                for group in commit.groups
                for place in group.places
                if place.file.startswith("journal/")
            ]
            if held or before is not None:
                # Files are applied in order. From the first commit that only the journal has, all later
                # commits are only in the journal too.
                held += _find(journals, commit.marks, held[0].file if held else None)
            if not held:
                continue
            file = held[0].file
            follows = before is not None and before.file == file
            begin = before.end if before is not None and follows else FRAMES_POSITION
            held = [one for one in held if one.begin >= begin]
            end = -(-max(one.end for one in held) // BLOCK_BYTES) * BLOCK_BYTES
            commit.frame = before = Place(file, begin, end)


def _find(journals: Mapping[str, bytes], marks: Sequence[bytes], file: str | None) -> list[Place]:
    """Return the last occurrence of each mark; earlier occurrences belong to earlier commits."""
    return [
        Place(name, at, at + len(mark))
        for name, data in journals.items()
        for mark in marks
        if file in (None, name) and (at := data.rfind(mark)) >= 0
    ]


def _in_journal(journals: Mapping[str, bytes], group: Group) -> Place:
    found = [
        Place(file, at - group.head_bytes - ENTRY_PREFIX_BYTES, at + len(group.data))
        for file, data in journals.items()
        if (at := data.find(group.data)) >= 0
    ]
    assert len(found) == 1, f"{group.topic} {group.offset} is {len(found)} times in the journal"
    return found[0]


def _runs_of(layout: Layout, group: Group, runs: Sequence[Place]) -> list[Place]:
    found = []
    for run in runs:
        base = int(Path(run.file).stem.split("-")[1])
        if base + run.begin < group.end and group.offset < base + run.end:
            found.append(run)
            data = (layout.root / run.file).read_bytes()
            at = group.offset - base
            assert at < run.begin or data[at : at + len(group.data)] == group.data
    return found


# Worlds

MIXED = (30, 120, 700, 45, 300, 1500, 20, 90, 4000, 60)
"""Payload sizes: some share a sector, some fill one, some span several blocks."""


def _fill(builder: Builder, names: Sequence[str], commits: int, first: int = 0) -> None:
    """Make commits with one to three topics each, and one to three records per topic."""
    for number in range(first, first + commits):
        chosen = [names[(number + step) % len(names)] for step in range(1 + number % 3)]
        sizes = {
            name: [
                MIXED[(number + 3 * step + one) % len(MIXED)]
                for one in range(1 + (number + step) % 3)
            ]
            for step, name in enumerate(dict.fromkeys(chosen))
        }
        builder.append(sizes)


def _state(builder: Builder, name: str, other: str, tag: str) -> None:
    """Add some of everything that is not a plain record: a producer, a note, cursors and a batch."""
    builder.append_once(name, f"producer-{tag}", 7, 50)
    builder.note(name, f"note-{tag}".encode(), 200)
    builder.set_cursors(f"reader-{tag}", name, other)
    builder.batch(f"batches-{tag}", 1, (name, [40, 50]), (other, [60]))


def clean(path: Path) -> World:
    """Stop cleanly: everything is in segments."""
    builder = Builder(path)
    names = ["orders", "invoices", "written/w"]
    for part in range(3):
        _fill(builder, names, 14, part * 14)
        _state(builder, "orders", "invoices", f"c{part}")
        builder.rotate()
    builder.append({"gone": [30, 40]})
    builder.trim("orders", 0.3)
    builder.destroy("gone")
    return builder.stop()


def unapplied(path: Path) -> World:
    """Kill before the applier did anything: every journal file has commits that only it holds."""
    builder = Builder(path, files=9)
    builder.store.applying = False
    _fill(builder, ["orders", "invoices"], 12)
    _state(builder, "orders", "invoices", "u0")
    builder.rotate()
    _fill(builder, ["orders", "payments", "written/w"], 14, 5)
    builder.append({"gone": [30, 40]})
    builder.rotate()
    _fill(builder, ["payments", "invoices", "late"], 12, 3)
    builder.trim("orders", 0.2)
    builder.destroy("gone")
    _state(builder, "payments", "orders", "u2")
    _fill(builder, ["payments", "invoices", "late"], 4, 2)
    builder.append({"orders": [60]})
    return builder.kill()


def mixed(path: Path, boot: bytes | None = None) -> World:
    """Some journal files are applied, an older one is not, and a newer one is in use."""
    builder = Builder(path, boot=boot)
    _fill(builder, ["orders", "invoices"], 16)
    _state(builder, "orders", "invoices", "m0")
    builder.append({"gone": [30, 40], "soon gone": [50]})
    builder.destroy("gone")
    builder.rotate()
    builder.keep_backup()
    builder.store.applying = False
    _fill(builder, ["orders", "older"], 14, 1)
    _state(builder, "older", "orders", "m1")
    builder.destroy("soon gone")
    builder.rotate()
    _fill(builder, ["orders", "older", "newer"], 9, 7)
    builder.trim("invoices", 0.4)
    _state(builder, "newer", "orders", "m2")
    _fill(builder, ["newer", "older"], 4, 2)
    builder.append({"invoices": [60]})
    return builder.kill()


def interrupted(path: Path) -> World:
    """Kill while the applier works: segments are longer than the catalogue says."""
    builder = Builder(path)
    _fill(builder, ["orders", "invoices"], 8)
    _state(builder, "orders", "invoices", "i0")
    builder.rotate()
    builder.store.applying = False
    _fill(builder, ["orders", "invoices", "older"], 10, 4)
    _state(builder, "older", "orders", "i1")
    builder.rotate()
    _fill(builder, ["orders", "newer"], 5, 1)
    builder.append({"invoices": [60]})
    return builder.kill_during_apply()


def rebooted(path: Path) -> World:
    """The same after a crash of the machine: a start sees another boot id."""
    return mixed(path, OTHER_BOOT)


def recycled(path: Path) -> World:
    """A ring that was reused many times, over several starts: files hold frames of earlier uses."""
    builder = Builder(path)
    names = ["orders", "invoices", "payments"]
    for part in range(8):
        _fill(builder, names, 13 - part % 3, part * 5)
        builder.rotate()
        if part in (2, 5):
            builder.restart()
    _state(builder, "orders", "invoices", "r0")
    builder.rotate()
    builder.trim("payments", 0.6)
    builder.rotate()
    builder.store.applying = False
    _fill(builder, ["orders", "older"], 9, 2)
    builder.rotate()
    _fill(builder, ["invoices", "older", "newer"], 6, 4)
    _state(builder, "newer", "orders", "r1")
    builder.append({"orders": [60]})
    builder.append({"newer": [60]})
    return builder.kill()


def many(path: Path) -> World:
    """Many topics with few records: frames with many small entries."""
    builder = Builder(path)
    names = [f"device/{number:02d}" for number in range(40)]
    builder.append({name: [20 + number] for number, name in enumerate(names[:15])})
    builder.rotate()
    builder.store.applying = False
    builder.append({name: [25, 30] for name in names[:30]})
    builder.append({name: [70] for name in names[10:25]})
    builder.rotate()
    builder.append({name: [15] for name in names})
    for number in range(20):
        builder.append({names[number]: [40], names[39 - number]: [35]})
    builder.append({names[3]: [30]})
    return builder.kill()


def batches(path: Path) -> World:
    """A batch that is decided and not appended: the journal is full and the applier has done nothing."""
    builder = Builder(path, files=2)
    builder.store.applying = False
    _fill(builder, ["orders", "invoices"], 10)
    builder.rotate()
    _fill(builder, ["orders", "batched"], 8, 2)
    while builder.room_left() > 9000:
        builder.append({"invoices": [3000]})
    blocks = [("batched" if number % 2 else "orders", [400, 500]) for number in range(20)]
    builder.pending_batch("job", 1, *blocks)
    return builder.kill()


WORLDS: dict[str, Callable[[Path], World]] = {
    "clean": clean,
    "unapplied": unapplied,
    "mixed": mixed,
    "rebooted": rebooted,
    "interrupted": interrupted,
    "recycled": recycled,
    "many": many,
    "batches": batches,
}
