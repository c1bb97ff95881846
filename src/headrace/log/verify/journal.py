"""Checks of the unapplied part of the journal: frames, entries, and the records they append to topics.

`log/recovery/scan.py` finds the frames that must be present, also for recovery. The check follows each topic
from its end in the catalogue through every entry that a start of the server would apply.

The staged files of batches that are decided and not completely appended are checked too. Files that wait for
a batch are not part of the log yet: the producer that uploaded them has the records.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from headrace.log.apply.changes import Gathered, nameless, names_in
from headrace.log.batch.blocks import Damaged, read_staged
from headrace.log.catalogue.catalogue import Catalogue
from headrace.log.catalogue.rows import BatchRow
from headrace.log.commit import journal
from headrace.log.commit.journal import Name, NoteEntry, StagedFiles
from headrace.log.layout import Layout
from headrace.log.records import holds
from headrace.log.recovery.frames import Problem
from headrace.log.recovery.scan import JournalScan
from headrace.log.verify.report import Damage, Findings, VerifiedRange

_READ_BYTES = 16 << 20


def check_staged(
    layout: Layout, rows: Iterable[BatchRow], now: Callable[[BatchRow], BatchRow | None]
) -> Iterator[Damage]:
    """Yield the damage in these batches; `now` returns the present row of a batch, with its progress."""
    for row in rows:
        files = msgspec.msgpack.decode(row.staged, type=StagedFiles)
        for number, file in enumerate(files[row.file :], row.file):
            name = file.id.hex()
            position = row.position if number == row.file else 0
            while position < file.size:
                path = layout.staged_file(name)
                blocks = read_staged(path, position, file.size, _READ_BYTES)
                for what, _ in blocks:
                    # A server may have appended and deleted the file meanwhile.
                    if isinstance(what, Damaged) and not _is_past(now(row), number):
                        yield Damage(f"staged/{name}", what.reason)
                position = blocks[-1].next


def _is_past(row: BatchRow | None, file: int) -> bool:
    return row is None or row.file > file


class Life(Findings):
    """A topic's state: the catalogue's row, updated by the journal entries read so far."""

    def __init__(self, name: str, epoch: int, offset: int, ordinal: int, ms: int) -> None:
        super().__init__(name)
        self.name = name
        self.epoch = epoch
        self.offset, self.ordinal, self.ms = offset, ordinal, ms
        self.destroyed = False


class JournalCheck:
    """One reading of the journal.

    While a server writes to the journal, an undamaged frame can look damaged: it is half written, or gone
    because its file is used again. A second reading, with the catalogue of that time, does not find the same
    damage.
    """

    def __init__(self, layout: Layout, catalogue: Catalogue) -> None:
        self.damages: list[Damage] = []
        """Damage that belongs to no known topic; the damage of topics is in `lives`."""
        self.lives: dict[int, Life] = {}
        """Topics that the journal mentions, by number."""
        self._nameless: dict[int, Damage] = {}
        self._catalogue = catalogue
        self._gathered = Gathered(catalogue, catalogue.topic_by_id)
        scan = JournalScan(layout, catalogue.meta(), journal.boot_id())
        self.unfinished = [_damage(problem) for problem in scan.unfinished]
        """Writes that were not finished, and so were never acknowledged."""
        self.damages += [_damage(problem) for _, problem in scan.damages if not problem.entry]
        self.damages += map(_damage, scan.harmless)
        self.damages += [
            Damage(f"journal/{name}", "the file is missing") for name in scan.missing_files
        ]
        self.damages += [
            Damage(f"journal/{path.name}", "neither copy of the file's header can be read")
            for path in scan.untrusted
        ]
        if scan.missing:
            count, first, last = scan.missing_count, scan.missing[0][0], scan.missing[-1][-1]
            self.damages.append(
                Damage("journal", f"{count} commits from {first} to {last} are missing")
            )
        names = scan.names()
        for path in scan.paths:
            for entry in scan.entries(path):
                self._follow(path, entry, names)
        self.damages += self._nameless.values()

    @property
    def batches(self) -> dict[tuple[bytes, int], BatchRow]:
        """Batches that the journal mentions, with their progress."""
        return self._gathered.batches

    @property
    def all_damages(self) -> list[Damage]:
        return [*self.damages, *(one for life in self.lives.values() for one in life.damages)]

    def _follow(self, path: Path, entry: journal.Entry, names: Mapping[int, Name]) -> None:
        life = self._life(entry.topic_id)
        file = f"journal/{path.name}"
        if entry.kind == journal.DECIDE:
            self._gathered.add(entry)
        elif entry.extra and entry.kind in (journal.APPEND, journal.LOST, journal.ADVANCE):
            self._gathered.add(entry._replace(kind=journal.ADVANCE))
        for name in names_in(entry):
            self._name(name)
        if entry.kind == journal.LOST_NAMES:
            self.damages.append(Damage(file, "names of topics are damaged"))
        elif entry.kind in (journal.APPEND, journal.LOST):
            if not entry.topic_id:
                self.damages.append(Damage(file, "the decision of a batch is damaged"))
                return
            if life is None and entry.topic_id in names:
                self._name(names[entry.topic_id])
                life = self._life(entry.topic_id)
            if life is None:
                life = self.lives[entry.topic_id] = Life(
                    nameless(entry.topic_id).decode(), entry.ms, entry.offset, entry.ordinal, 0
                )
                self._nameless[entry.topic_id] = Damage(
                    file, f"the name of topic number {entry.topic_id} is lost"
                )
            _follow_append(file, life, entry)
        elif entry.kind == journal.LOST_NOTE:
            key = msgspec.msgpack.decode(entry.extra, type=NoteEntry).key
            self.damages.append(Damage(file, f"the note {key!r} is damaged"))
        elif entry.kind == journal.DESTROY and life is not None:
            life.destroyed = True

    def _name(self, made: Name) -> None:
        life = self._life(made.topic_id)
        if life is None:
            # The first records of a topic may still have the time of its previous life, so the time is 0.
            self.lives[made.topic_id] = Life(
                made.name.decode(), made.epoch, made.offset, made.ordinal, 0
            )
        elif self._nameless.pop(made.topic_id, None):
            life.name, life.epoch = made.name.decode(), made.epoch

    def _life(self, topic_id: int) -> Life | None:
        life = self.lives.get(topic_id)
        if life is None:
            row = self._catalogue.topic_by_id(topic_id)
            if row is not None:
                life = self.lives[topic_id] = Life(
                    row.name.decode(), row.epoch, row.end_offset, row.end_ordinal, row.last_ms
                )
        return life


def _follow_append(file: str, life: Life, entry: journal.Entry) -> None:
    if entry.end <= life.offset:
        return  # applied already: entries hold absolute values, so applying one twice is harmless
    here = VerifiedRange(entry.offset, entry.end, entry.ordinal, entry.ordinal + entry.record_count)
    if (entry.offset, entry.ordinal) != (life.offset, life.ordinal):
        gap = VerifiedRange(life.offset, entry.offset, life.ordinal, entry.ordinal)
        life.bad(file, "no entry holds these", gap)
    if entry.kind == journal.LOST:
        life.bad(file, "the checksum is wrong", here)
    elif not holds(bytes(entry.data), entry.record_count):
        life.bad(file, "the records do not fill their entry", here)
    elif entry.ms < life.ms:
        life.bad(file, f"the time goes back from {life.ms} to {entry.ms} ms", here)
    else:
        life.good(here)
    life.offset, life.ordinal, life.ms = here.end, here.end_ordinal, max(entry.ms, life.ms)


def _damage(problem: Problem) -> Damage:
    return Damage(f"journal/{problem.file} at byte {problem.position}", problem.reason)
