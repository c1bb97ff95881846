"""Checks the part of the journal that is not applied yet: frames, entries, and what they add to topics.

Which frames must be there is recovery's question too, and `journal_scan.py` answers it. Here each topic is
followed from the catalogue's end on, through everything that a start of the server would apply.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from headrace.log import journal
from headrace.log.catalogue import Catalogue
from headrace.log.catalogue_rows import BatchRow
from headrace.log.entries import Name, Noted
from headrace.log.gathered import Gathered, nameless, names_in
from headrace.log.journal_reading import Problem
from headrace.log.journal_scan import JournalScan
from headrace.log.layout import Layout
from headrace.log.records import holds
from headrace.log.report import Damage, Found, Range


class Life(Found):
    """A topic as the catalogue says, and the entries that were read so far."""

    def __init__(self, name: str, epoch: int, offset: int, ordinal: int, ms: int) -> None:
        super().__init__(name)
        self.name = name
        self.epoch = epoch
        self.offset, self.ordinal, self.ms = offset, ordinal, ms
        self.destroyed = False


class JournalCheck:
    """One reading of the journal.

    While a server writes to it, a frame can look damaged that is not: half written, or gone because its
    file is used again. Then another reading, with a catalogue as of then, does not find the same.
    """

    def __init__(self, layout: Layout, catalogue: Catalogue) -> None:
        self.damages: list[Damage] = []
        """What is damaged and of no topic that is known; the rest is in `lives`."""
        self.lives: dict[int, Life] = {}
        """The topics it says anything of, by number."""
        self._nameless: dict[int, Damage] = {}
        self._catalogue = catalogue
        self._gathered = Gathered(catalogue, catalogue.topic_by_id)
        scan = JournalScan(layout, catalogue.meta(), journal.boot_id())
        self.unfinished = [_damage(problem) for problem in scan.unfinished]
        """Writes that did not come to their end, and so were never acknowledged."""
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
        """The batches it says anything of, and how far each has come."""
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
            key = msgspec.msgpack.decode(entry.extra, type=Noted).key
            self.damages.append(Damage(file, f"the note {key!r} is damaged"))
        elif entry.kind == journal.DESTROY and life is not None:
            life.destroyed = True

    def _name(self, made: Name) -> None:
        life = self._life(made.topic_id)
        if life is None:
            # Its first records may still have the time of the life before it.
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
        return  # applied already: entries hold absolute values, and applying one twice is harmless
    here = Range(entry.offset, entry.end, entry.ordinal, entry.ordinal + entry.record_count)
    if (entry.offset, entry.ordinal) != (life.offset, life.ordinal):
        gap = Range(life.offset, entry.offset, life.ordinal, entry.ordinal)
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
