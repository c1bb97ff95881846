"""Runs works on Spark's executors. Only this file submits tasks and turns their failures into sentences.

A job passes small descriptions of work to `run` and gets small results back. Records stay where they are
read. What one task leaves for another is in files of Arrow batches (`staging`). Works are submitted with
`parallelize` and not as data frames, because Spark has to start less for them.
"""

import contextlib
import logging
import os
import re
import signal
import subprocess
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeVar

import pyarrow as pa

from headrace.errors import HeadraceError
from headrace.lake.files.writing import make_directory
from headrace.lake.format import writing
from headrace.lake.manifests import HIDDEN
from headrace.reader.http_client import ServerError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


logger = logging.getLogger(__name__)

_POLL_S = 0.2

_DEATH_S = 5.0
"""Time that a JVM may take to end after its connections broke."""

_LAST_LINES_MAX = 3
_LINE_CHARACTERS_MAX = 300
"""Limits for Spark's own output in an error: number of lines, and characters per line."""

Work = TypeVar("Work")
Result = TypeVar("Result")
Progress = Callable[[float], None]
"""Called with the finished part of the works, from 0 to 1, in a separate thread."""


class JobError(HeadraceError):
    """A job has failed; the message says why."""


class ServerAwayError(JobError):
    """A task could not reach the server, which may come back later."""


class NotSharedError(HeadraceError):
    """The executors see another directory than the driver: name one on storage that all of them share."""


class TaskRunner(Protocol):
    """Runs the works of a job."""

    def start(self) -> None:
        """Start what `run` needs, so that a job that cannot run fails before it writes anything."""

    def run(
        self,
        works: Sequence[Work],
        function: Callable[[Work], Result],
        progress: Progress | None = None,
    ) -> list[Result]:
        """Run `function` on each work, and return the results in the order of the works."""

    def close(self) -> None:
        """Release everything. No more works may follow."""


class _Failed(NamedTuple):
    """Failure of a task, as one sentence. Spark would make a page of text of it."""

    sentence: str
    is_away: bool
    """True if a server could not be reached."""


class SparkRunner:
    """Runs works on Spark. Uses the active Spark session, or starts one for the first work."""

    def __init__(self, name: str, master: str) -> None:
        self._name, self._master = name, master
        self._spark: SparkSession | None = None
        self._is_ours = False
        self._said: Path | None = None

    def start(self) -> None:
        self.session()

    def run(
        self,
        works: Sequence[Work],
        function: Callable[[Work], Result],
        progress: Progress | None = None,
    ) -> list[Result]:
        if not works:
            return []
        context = self.session().sparkContext
        with self.sentences(), _watched(context, self._name, len(works), progress):
            data = context.parallelize(list(works), len(works))
            found: list[Result | _Failed] = data.map(_Guarded(function)).collect()
        results: list[Result] = []
        for one in found:
            if isinstance(one, _Failed):
                raise ServerAwayError(one.sentence) if one.is_away else JobError(one.sentence)
            results.append(one)
        return results

    def close(self) -> None:
        if self._spark is not None and self._is_ours:
            # A JVM that has died cannot be stopped. The job has already failed with its own error.
            with contextlib.suppress(Exception) if self._has_ended() else contextlib.nullcontext():
                self._spark.stop()
        if self._said is not None:
            self._said.unlink(missing_ok=True)

    def session(self) -> "SparkSession":
        """Return the Spark session, for streaming queries. Use it within `sentences`."""
        if self._spark is None:
            from pyspark.sql import SparkSession

            from headrace.spark.session import session

            self._is_ours = SparkSession.getActiveSession() is None
            if self._is_ours:
                logger.debug("starting Spark")
                handle, path = tempfile.mkstemp(prefix="headrace-spark-", suffix=".log")
                self._said = Path(path)
                with _standard_error(handle), _signals():
                    self._spark = self._started()
            else:
                self._spark = session(self._name)
        return self._spark

    def _started(self) -> "SparkSession":
        from headrace.spark.session import SparkStartError, session

        try:
            return session(self._name, master=self._master)
        except SparkStartError as error:
            raise JobError(f"{error}{self._words()}") from error

    @contextlib.contextmanager
    def sentences(self) -> Iterator[None]:
        """Turn failures of Spark and of tasks into `JobError`."""
        from py4j.protocol import Py4JError, Py4JNetworkError
        from pyspark.errors import PySparkException

        try:
            yield
        except (Py4JError, PySparkException, OSError, EOFError) as error:
            # Only a broken connection to the JVM raises these errors: tasks return their own OSErrors as
            # results.
            broken = isinstance(error, Py4JNetworkError | OSError | EOFError)
            broken = broken or "SparkContext was shut down" in str(error)
            if self._has_ended(_DEATH_S if broken else 0.0):
                raise JobError(
                    f"Spark's Java process {self._how_it_ended()} while the job ran{self._words()}"
                ) from error
            if isinstance(error, OSError | EOFError):
                raise
            reason = _reason(str(error))
            if expected := re.match(r"headrace\.[\w.]+: ", reason):
                is_away = ServerError.__name__ in expected[0]
                kind = ServerAwayError if is_away else JobError
                raise kind(reason[expected.end() :]) from error
            where = ""
            if self._said is not None:
                where = f"; what Spark said is in {self._said}"
                self._said = None
            raise JobError(f"a task failed: {reason}{where}") from error

    def _java(self) -> "subprocess.Popen[bytes] | None":
        """Return Spark's Java process, or None if another program started it."""
        gateway = getattr(self._spark and self._spark.sparkContext, "_gateway", None)
        found: subprocess.Popen[bytes] | None = getattr(gateway, "proc", None)
        return found

    def _has_ended(self, within_s: float = 0.0) -> bool:
        java = self._java()
        if java is None:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            java.wait(within_s)
        return java.poll() is not None

    def _how_it_ended(self) -> str:
        java = self._java()
        code = java.returncode if java is not None else 0
        # A JVM that handles a signal ends with 128 plus the number of the signal.
        number = -code if code < 0 else code - 128
        if number not in {int(one) for one in signal.Signals}:
            return f"ended with exit code {code}"
        hint = "; was there enough memory?" if number == signal.SIGKILL else ""
        return f"was killed ({signal.Signals(number).name}{hint})"

    def _words(self) -> str:
        """Return the last lines of Spark's output, and the path of all output; that file is then kept."""
        if self._said is None:
            return ""
        where, self._said = self._said, None
        lines = last_lines(where.read_text("utf-8", "replace"))
        if not lines:
            where.unlink()
            return ""
        return f". Spark said: {' / '.join(lines)} (all of it is in {where})"


_NOISE = re.compile(
    r"at \S+[(].*[)]$|[.]{3} \d+ more$|WARNING: |Using Spark's default log4j |\S*spark-class: line |head: "
)
"""Stack frames, and lines that Spark and its scripts always print."""


def last_lines(text: str) -> list[str]:
    """Return the last lines of a JVM's standard error that are not noise, each once."""
    lines = [line.strip().removeprefix('Exception in thread "main" ') for line in text.splitlines()]
    told = dict.fromkeys(line for line in lines if line and not _NOISE.match(line))
    return [line[:_LINE_CHARACTERS_MAX] for line in list(told)[-_LAST_LINES_MAX:]]


def _reason(text: str) -> str:
    """Return the last line of a Python traceback in Spark's message, or the first line without one."""
    told = re.findall(r"^(?!org\.|java)[\w.]*(?:Error|Exception|Exit)\b.*$", text, re.MULTILINE)
    return str(told[-1] if told else text.strip().partition("\n")[0])


class LocalRunner:
    """Runs works one after the other in this process, without Spark: for tests."""

    def start(self) -> None: ...

    def run(
        self,
        works: Sequence[Work],
        function: Callable[[Work], Result],
        progress: Progress | None = None,
    ) -> list[Result]:
        found = []
        for number, work in enumerate(works, 1):
            found.append(function(work))
            if progress is not None:
                progress(number / len(works))
        return found

    def close(self) -> None: ...


class _Guarded:
    """Function of a task that returns its expected failures as results."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __call__(self, work: Any) -> Any:
        try:
            return self._function(work)
        except (HeadraceError, OSError) as error:
            return _Failed(str(error), isinstance(error, ServerError) and error.is_away)


@contextlib.contextmanager
def _watched(context: Any, name: str, count: int, progress: Progress | None) -> Iterator[None]:
    if progress is None:
        yield
        return
    from py4j.protocol import Py4JError

    context.setJobGroup(name, name)
    tracker = context.statusTracker()
    before = set(tracker.getJobIdsForGroup(name))
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_POLL_S):
            try:
                jobs = set(tracker.getJobIdsForGroup(name)) - before
            except (Py4JError, OSError):
                return  # the JVM has died, and the job's own call reports it
            infos = [tracker.getJobInfo(job) for job in jobs]
            stages = [
                tracker.getStageInfo(stage) for info in infos if info for stage in info.stageIds
            ]
            finished = sum(stage.numCompletedTasks for stage in stages if stage)
            progress(min(1.0, finished / count))

    watcher = threading.Thread(target=watch, name="headrace-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    progress(1.0)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Restore the handler of Ctrl-C, which Spark replaces at its start, unless it was Python's default."""
    before = signal.getsignal(signal.SIGINT)
    yield
    if before is not signal.default_int_handler and signal.getsignal(signal.SIGINT) is not before:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _standard_error(handle: int) -> Iterator[None]:
    """Send the standard error of processes started meanwhile to a file: Java and its workers print much."""
    kept = os.dup(2)
    try:
        os.dup2(handle, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(handle)


Batches = dict[int, list[int]]
"""Indexes of a file's batches, by the number of the batch."""

Places = list[tuple[str, list[int]]]
"""Paths of files, each with the indexes of some batches."""


@contextmanager
def staging(directory: Path) -> Iterator[Path]:
    """Yield a directory for the files of a run, empty before and after; only one run may use it at a time."""
    place = directory / HIDDEN / "staging"
    make_directory(place)
    _empty(place)
    try:
        yield place
    finally:
        _empty(place)


def _empty(place: Path) -> None:
    for path in place.iterdir():
        path.unlink()


class WorkFile:
    """Staged file of one task.

    A task that Spark repeats writes another file. Only files that the driver learns of count.
    """

    def __init__(self, staging: str, name: str, schema: pa.Schema) -> None:
        if not Path(staging).is_dir():
            raise NotSharedError(
                f"Spark's executors do not see {staging}: name a directory that all machines share"
            )
        self.path = str(Path(staging, f"{name}-{uuid.uuid4().hex[:12]}.arrow"))
        self.batches: Batches = {}
        self._schema = schema
        self._written = 0

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        with writing(Path(self.path)):
            file = self._stack.enter_context(pa.OSFile(self.path, "wb"))
            self._writer = self._stack.enter_context(pa.ipc.new_file(file, self._schema))
        return self

    def __exit__(self, *given: object) -> None:
        with writing(Path(self.path)):
            self._stack.close()

    def add(self, number: int, batch: pa.RecordBatch) -> None:
        with writing(Path(self.path)):
            self._writer.write_batch(batch)
        self.batches.setdefault(number, []).append(self._written)
        self._written += 1


def by_number(files: Iterable[tuple[str, Batches]]) -> dict[int, Places]:
    found: dict[int, Places] = {}
    for path, batches in files:
        for number, some in batches.items():
            found.setdefault(number, []).append((path, some))
    return dict(sorted(found.items()))


def read_staged(
    stack: ExitStack, places: Sequence[tuple[str, list[int]]]
) -> Iterator[pa.RecordBatch]:
    """Yield batches from files that stay mapped until the stack is closed: pages are read when needed."""
    for path, numbers in places:
        reader = pa.ipc.open_file(stack.enter_context(pa.memory_map(path)))
        for number in numbers:
            yield reader.get_batch(number)
