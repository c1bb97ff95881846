"""An embedded store driven step by step: real files, no threads, no processes.

Its time is that of the given clock. Only the times of files are real.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from headrace.config.settings import Config
from headrace.errors import StoreFailedError
from headrace.log.apply.applier import Applier
from headrace.log.batch.blocks import encode_block
from headrace.log.catalogue.catalogue import Catalogue
from headrace.log.commit.journal import ClosedFile
from headrace.log.disk import Disk, is_full
from headrace.log.embedded import EmbeddedStore
from headrace.log.layout import Layout
from headrace.log.records import pack_record, split_records
from headrace.log.recovery.recovery import mark_clean, recover
from headrace.log.store import Appended, BatchAnswer, BatchRefusedError, Clocks, Note, StoredAppend
from headrace.model import Position
from headrace.payload import UPLOAD_CHECKS

T = TypeVar("T")

BOOT_ID = b"the first boot.."


class StepClock:
    """A clock in milliseconds that changes only when a test sets it."""

    def __init__(self, ms: int = 1_700_000_000_000) -> None:
        self.ms = ms

    def __call__(self) -> int:
        return self.ms


class StepRunner:
    """Runner that runs everything in the calling thread, one step at a time, on request."""

    def __init__(self) -> None:
        self._steps: deque[Callable[[], None]] = deque()
        self.added: Callable[[], None] = lambda: None
        """Called for each further step."""

    def soon(self, call: Callable[[], None]) -> None:
        self._add(call)

    def _add(self, call: Callable[[], None]) -> None:
        self._steps.append(call)
        self.added()

    def write(self, work: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        def step() -> None:
            try:
                work()
            except OSError as error:
                done(error)
            else:
                done(None)

        self._add(step)

    def background(self, work: Callable[[], T], done: Callable[[T | BaseException], None]) -> None:
        def step() -> None:
            result: T | BaseException
            try:
                result = work()
            except OSError as error:
                result = error
            done(result)

        self._add(step)

    def step(self) -> bool:
        """Run the next step; return False if there is none."""
        if not self._steps:
            return False
        self._steps.popleft()()
        return True

    def run(self) -> None:
        """Run all steps, including those that they add."""
        while self.step():
            pass


class RecordingListener:
    """Listener that keeps the appends and the failure that a store reported."""

    def __init__(self) -> None:
        self.prepared: list[Appended] = []
        self.appended: list[Appended] = []
        self.failure = ""

    def prepare(self, appended: Sequence[Appended]) -> None:
        self.prepared += appended

    def committed(self, appended: Sequence[Appended]) -> None:
        self.appended += appended

    def failed(self, reason: str) -> None:
        self.failure = reason


class StepStore:
    """A store, its applier and everything else it needs, on one directory."""

    def __init__(
        self,
        config: Config,
        *,
        disk: Disk | None = None,
        clock: StepClock | None = None,
        boot_id: bytes = BOOT_ID,
        listener: RecordingListener | None = None,
    ) -> None:
        self.config = config
        self.clock = clock or StepClock()
        self.runner = StepRunner()
        self.listener = listener or RecordingListener()
        self.reports: list[str] = []
        disk = self._disk = disk or Disk()
        self.layout = Layout(Path(config.data_dir))
        self.layout.make(disk)
        recovered = recover(self.layout, disk, config.rule, boot_id=boot_id)
        self.reports += recovered.reports + recovered.notes
        self._catalogue = Catalogue.open(self.layout.root)
        self._applier = Applier(disk, self.layout, self._catalogue, config.rule)
        self.applying = True
        """Set to False to keep closed journal files from being applied."""
        self._waiting: list[ClosedFile] = []
        self.store = EmbeddedStore(
            config,
            self.layout,
            disk,
            self.runner,
            self.apply,
            next_sequence=recovered.next_sequence,
            generation=recovered.generation,
            boot_id=boot_id,
            clocks=Clocks(self.clock, lambda: self.clock() / 1000, wall_s=time.time),
            upload_checks=UPLOAD_CHECKS,
        )
        self.store.listener = self.listener
        for number in range(config.journal.files):
            path = self.layout.journal_file(number)
            if not path.exists() or path.stat().st_size != config.journal.file_bytes:
                self._applier.prepare(path, config.journal.file_bytes)
            self.store.file_is_free(path)
        self.runner.run()

    def apply(self, closed: ClosedFile) -> None:
        """Take a closed journal file from the store, as its applier."""
        self._waiting.append(closed)
        if self.applying:
            self.runner.soon(self._apply_waiting)

    def append(self, topic: str, *payloads: bytes) -> None:
        """Append payloads and commit them."""
        self.store.append({self.store.topic(topic): _records(payloads)}, lambda: None)
        self.runner.run()

    def payloads(self, topic: str, offset: int = 0) -> list[bytes]:
        """Return all payloads that can be read from `offset` on."""
        return [payload for _, payload in self.read(topic, offset)]

    def read(
        self, topic: str, offset: int = 0, bytes_max: int = 1 << 18
    ) -> list[tuple[int, bytes]]:
        """Return (offset just past the record, payload) for every record from `offset` on."""
        found = self.content(topic, offset, bytes_max)
        return [(at + 4 + len(payload), payload) for at, (_, payload) in found.items()]

    def content(
        self, topic: str, offset: int = 0, bytes_max: int = 4096
    ) -> dict[int, tuple[int, bytes]]:
        """Return ordinal and payload of every record from `offset` on, by offset."""
        handle = self.store.topic(topic)
        reader = self.store.reader(handle)
        found: dict[int, tuple[int, bytes]] = {}
        at = self.store.locate_offset(handle, offset).offset
        while at < handle.end_offset:
            chunk = reader.read(at, bytes_max)
            assert chunk.next_offset > at, "a read goes forwards"
            for run in chunk.runs:
                begin = run.offset
                for number, record in enumerate(split_records(run.data, run.record_count)):
                    found[begin] = run.ordinal + number, record[4:]
                    begin += len(record)
            at = chunk.next_offset
        return found

    def append_once(self, topic: str, producer: str, number: int, *payloads: bytes) -> StoredAppend:
        """Append payloads with a producer's number, and commit them."""
        answers: list[StoredAppend] = []
        self.store.append_once(
            self.store.topic(topic), _records(payloads), producer, number, answers.append
        )
        self.runner.run()
        return answers[0]

    def stage(self, *blocks: tuple[str, Sequence[bytes]]) -> str:
        """Upload blocks, each a topic and its payloads; return the staged file's id."""
        body = b"".join(block(topic, payloads) for topic, payloads in blocks)
        staging = self.store.staging
        upload = staging.begin()
        staging.reserve(upload, len(body))
        try:
            upload.feed(body)
            upload.finish()
        except BaseException:
            staging.drop(upload)
            self.runner.run()
            raise
        staging.keep(upload)
        return upload.id

    def batch(self, producer: str, number: int, *staged: str) -> BatchAnswer:
        """Decide a batch, and append it."""
        answers: list[BatchAnswer | BatchRefusedError | None] = []
        self.store.batches.decide(producer, number, staged, answers.append)
        self.runner.run()
        assert isinstance(answers[0], BatchAnswer)
        return answers[0]

    def destroy(self, topic: str) -> None:
        self.store.destroy(self.store.topic(topic), lambda: None)
        self.runner.run()

    def change(
        self,
        topic: str,
        *payloads: bytes,
        notes: Sequence[Note] = (),
        trim: Position | None = None,
        create_above: int | None = None,
        close: bool = False,
        destroy: bool = False,
    ) -> Position:
        """Change a topic and notes together, and commit. Return the end of the change's own records."""
        handle, records = self.store.topic(topic), _records(payloads)
        ends: list[Position] = []
        self.store.change(
            handle,
            records=records,
            notes=notes,
            trim=trim,
            create_above=create_above,
            close=close,
            destroy=destroy,
            done=lambda: None,
            ends_at=ends.append,
        )
        self.runner.run()
        return ends[0]

    def rotate(self) -> None:
        """Continue in the next journal file; the old one is applied while `applying`."""
        if self.store._ring.used and self.store._ring.free:
            self.store._close_file()
        self.runner.run()

    def apply_waiting(self) -> None:
        """Apply the closed journal files, even while not `applying`."""
        self._apply_waiting()
        self.runner.run()

    def settle(self) -> None:
        """Commit and apply everything."""
        self.store.settle(lambda: None)
        self.runner.run()

    def trim(self, topic: str, position: Position) -> None:
        self.store.trim(self.store.topic(topic), position, lambda: None)
        self.runner.run()

    def close(self) -> None:
        """Stop cleanly."""
        self.applying = True
        settled: list[bool] = []
        self.store.settle(lambda: settled.append(True))
        self.runner.run()
        self.apply_waiting()
        if not settled:
            raise StoreFailedError(self.store.held_back)
        self.crash()
        mark_clean(self.layout, self._disk)

    def crash(self) -> None:
        """Close every file, like a killed process."""
        self.store.close()
        self._catalogue.close()

    def _apply_waiting(self) -> None:
        while self._waiting:
            closed = self._waiting[0]
            try:
                self.reports += self._applier.apply_file(closed)
            except OSError as error:
                if not is_full(error):
                    raise
                self.store.applier_waits("the disk is full")
                return
            del self._waiting[0]
            self.store.applied(closed.path)


def block(topic: str, payloads: Sequence[bytes]) -> bytes:
    """Return a block in the format of an upload."""
    return encode_block(topic, b"".join(_records(payloads)), len(payloads))


def _records(payloads: Sequence[bytes]) -> list[bytes]:
    return [pack_record(payload) for payload in payloads]
