"""Checks the part of the journal that is not applied yet: frames, entries, and what they add to topics.

Theory of operation. One reading goes through the frames in the order of their commits and follows each
topic from the catalogue's end on. What is wrong counts as damage only up to the last commit that must be
there: a write the machine or the process did not finish was never acknowledged, and is expected behind it.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from headrace.log import journal
from headrace.log.catalogue import Catalogue
from headrace.log.entries import Create
from headrace.log.layout import Layout
from headrace.log.records import holds
from headrace.log.report import Damage, Found, Range


class Life(Found):
    """A topic as the catalogue says, and the entries that were read so far."""

    def __init__(self, topic: str, epoch: int, offset: int, ordinal: int, ms: int) -> None:
        super().__init__(topic)
        self.name = topic
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
        self.unfinished: list[Damage] = []
        """What is wrong and need not be there."""
        self.lives: dict[int, Life] = {}
        """The topics it says anything of, by number."""
        self._catalogue = catalogue
        self._found: list[tuple[int, Damage]] = []
        meta = catalogue.meta()
        if not meta.clean:
            self._read(layout, meta.applied)

    def _read(self, layout: Layout, applied: int) -> None:
        crashed = False
        last = applied
        synced = 0
        for path in _in_order(layout, applied):
            header = journal.read_header(path)
            crashed |= header is not None and header.boot_id != journal.boot_id()
            before = header.first - 1 if header is not None else last
            for item in journal.read_frames(path):
                if isinstance(item, journal.Problem):
                    self._problem(max(before, applied) + 1, item)
                    continue
                before = item.sequence
                if item.sequence > applied:
                    self._check_frame(path, item, last)
                    last = max(last, item.sequence)
                    synced = max(synced, item.synced)
        # The same rule as recovery's: see `recovery.py`.
        vouched = synced if crashed else last - 1
        for sequence, damage in self._found:
            (self.damages if sequence <= vouched else self.unfinished).append(damage)

    def _check_frame(self, path: Path, frame: journal.Frame, last: int) -> None:
        if frame.sequence != last + 1 and not any(number > last for number, _ in self._found):
            self._bad(last + 1, path, f"the commits {last + 1} to {frame.sequence - 1} are missing")
        for entry in frame.entries:
            self._check_entry(frame.sequence, path, entry)
        for problem in frame.problems:
            self._problem(frame.sequence, problem)

    def _problem(self, sequence: int, problem: journal.Problem) -> None:
        where = Path(f"{problem.file} at byte {problem.position}")
        lost = problem.entry
        life = self._life(lost.topic_id) if lost is not None else None
        if lost is None or life is None:
            self._bad(sequence, where, problem.reason)
            return
        end_ordinal = lost.ordinal + lost.record_count
        here = Range(lost.offset, lost.end, lost.ordinal, end_ordinal)
        self._bad(sequence, where, problem.reason, life, here)
        life.offset, life.ordinal = lost.end, end_ordinal

    def _check_entry(self, sequence: int, path: Path, entry: journal.Entry) -> None:
        life = self._life(entry.topic_id)
        if entry.kind == journal.CREATE:
            if life is None:
                made = msgspec.msgpack.decode(entry.extra, type=Create)
                self.lives[entry.topic_id] = Life(
                    made.name.decode(), made.epoch, entry.offset, entry.ordinal, entry.ms
                )
        elif life is None:
            self._bad(sequence, path, f"topic number {entry.topic_id} was never made")
        elif entry.kind == journal.APPEND:
            self._check_append(sequence, path, life, entry)
        elif entry.kind == journal.DESTROY:
            life.destroyed = True

    def _check_append(self, sequence: int, path: Path, life: Life, entry: journal.Entry) -> None:
        if entry.end <= life.offset:
            return  # applied already: entries hold absolute values, and applying one twice is harmless
        here = Range(entry.offset, entry.end, entry.ordinal, entry.ordinal + entry.record_count)
        if (entry.offset, entry.ordinal) != (life.offset, life.ordinal):
            gap = Range(life.offset, entry.offset, life.ordinal, entry.ordinal)
            self._bad(sequence, path, "no entry holds these", life, gap)
        if not holds(bytes(entry.data), entry.record_count):
            self._bad(sequence, path, "the records do not fill their entry", life, here)
        elif entry.ms < life.ms:
            self._bad(sequence, path, f"the time goes back to {entry.ms} ms", life, here)
        else:
            life.good(here)
        life.offset, life.ordinal, life.ms = here.end, here.end_ordinal, max(entry.ms, life.ms)

    def _life(self, topic_id: int) -> Life | None:
        life = self.lives.get(topic_id)
        if life is None:
            row = self._catalogue.topic_by_id(topic_id)
            if row is not None:
                life = self.lives[topic_id] = Life(
                    row.name.decode(), row.epoch, row.end_offset, row.end_ordinal, row.last_ms
                )
        return life

    def _bad(
        self,
        sequence: int,
        path: Path,
        reason: str,
        life: Life | None = None,
        here: Range | None = None,
    ) -> None:
        topic = life.name if life is not None else None
        self._found.append((sequence, Damage(f"journal/{path.name}", reason, topic, here)))


def _in_order(layout: Layout, applied: int) -> Iterator[Path]:
    """The files that may hold commits after `applied`, oldest first."""
    found: list[tuple[int, Path]] = []
    firsts = []
    for path in layout.journal_files():
        header = journal.read_header(path)
        if header is not None:
            firsts.append(header.first)
        found.append((header.first if header is not None else _first_sequence(path), path))
    for first, path in sorted(found):
        # All of it is applied when the file after it begins no later than at what is not.
        if not any(first < other <= applied + 1 for other in firsts):
            yield path


def _first_sequence(path: Path) -> int:
    frames = (item for item in journal.read_frames(path) if isinstance(item, journal.Frame))
    return next((frame.sequence for frame in frames), 0)
