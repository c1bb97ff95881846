"""Runs works on Spark's executors. Only this file submits tasks and turns their failures into sentences.

    works ─▶ a DataFrame, one work per partition ─▶ mapInArrow ─▶ results
    works ─▶ mapInArrow ─▶ letters ─▶ Spark's shuffle ─▶ mapInArrow ─▶ letters ─▶ …

A job passes small descriptions of work to `run` and gets small results back. Records stay where they are
read. When rows must be regrouped, tasks pack them into letters, which `exchange` sends through Spark's
shuffle. Only DataFrames are used, so jobs run in any Spark session, including those of Spark Connect.
"""

import contextlib
import logging
import os
import pickle
import re
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import pyarrow as pa

from headrace.errors import HeadraceError
from headrace.reader.http_client import ServerError
from headrace.reader.planning import groups

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


logger = logging.getLogger(__name__)

LETTER_BYTES_MAX = 8 << 20
"""Limit for the data of a letter: Spark holds some thousands of rows in memory while it sorts them."""

MODULES = ("deltalake",)
"""Modules that tasks of all jobs import, besides those of the format `headrace`."""

_BATCH_BYTES = 8 << 20
"""Bytes of letters that a task passes to Spark at once."""

_POLL_S = 0.2

_JOBS_MAX = 8
"""Number of Spark's last jobs that are looked at: a query makes one job for each of its shuffles."""

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


class Letter(NamedTuple):
    """Bytes for one partition of the next step."""

    to: int
    """Number of the partition."""
    key: bytes
    """Letters of a partition arrive in the order of their keys."""
    data: bytes


Letters = Iterator[Letter]
Batches = Iterator[pa.RecordBatch]


class Step(NamedTuple):
    """A step of an exchange: a function of each partition's number and letters, called if it has any."""

    partitions: int
    function: Callable[[int, Letters], Letters]


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

    def exchange(
        self,
        works: Sequence[Work],
        first: Callable[[Work], Letters],
        steps: Sequence[Step],
        progress: Progress | None = None,
    ) -> list[Letter]:
        """Run `first` on each work, send its letters through the steps, and return those of the last step.

        A task may run again after it has sent letters. Then the letters of either run may arrive.
        """

    def close(self) -> None:
        """Release everything. No more works may follow."""


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

    def exchange(
        self,
        works: Sequence[Work],
        first: Callable[[Work], Letters],
        steps: Sequence[Step],
        progress: Progress | None = None,
    ) -> list[Letter]:
        letters = [letter for work in works for letter in first(work)]
        for step in steps:
            sent: dict[int, list[Letter]] = {}
            for letter in letters:
                assert 0 <= letter.to < step.partitions
                assert len(letter.data) <= LETTER_BYTES_MAX
                sent.setdefault(letter.to, []).append(letter)
            letters = []
            for number, some in sent.items():
                some.sort(key=lambda letter: letter.key)
                letters += step.function(number, iter(some))
        if progress is not None:
            progress(1.0)
        return letters

    def close(self) -> None: ...


class SparkRunner:
    """Runs works on Spark, in the given session, in the active one, or in one that it starts and stops."""

    def __init__(
        self,
        name: str,
        master: str,
        spark: "SparkSession | None" = None,
        *,
        modules: Sequence[str] = MODULES,
        extras: str = "pipeline",
    ) -> None:
        """Prepare a runner whose tasks import `modules`, which `extras` of Headrace install."""
        self._name, self._master = name, master
        self._modules, self._extras = tuple(modules), extras
        self._spark: SparkSession | None = None
        self._given = spark
        self._is_ours = False
        self._said: Path | None = None
        self._java: int | None = None
        """Process id of a Java process that this object has started."""

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
        found = self._collect(works, _run_works, function, (), progress)
        results: list[Result] = []
        for letter in sorted(found, key=lambda letter: letter.to):
            one = pickle.loads(letter.data)
            if isinstance(one, JobError):
                raise one
            results.append(one)
        return results

    def exchange(
        self,
        works: Sequence[Work],
        first: Callable[[Work], Letters],
        steps: Sequence[Step],
        progress: Progress | None = None,
    ) -> list[Letter]:
        if not works:
            return []
        return self._collect(works, _send, first, steps, progress)

    def close(self) -> None:
        if self._spark is not None and self._is_ours:
            # A JVM that has died cannot be stopped. The job has already failed with its own error.
            with contextlib.suppress(Exception) if self._end() else contextlib.nullcontext():
                self._spark.stop()
        if self._said is not None:
            self._said.unlink(missing_ok=True)

    def _collect(
        self,
        works: Sequence[Any],
        task: Callable[..., Batches],
        first: Callable[[Any], Any],
        steps: Sequence[Step],
        progress: Progress | None,
    ) -> list[Letter]:
        spark = self.session()
        tasks = len(works) + sum(step.partitions for step in steps)
        tag = f"{self._name.replace(' ', '-')}-{uuid.uuid4().hex[:8]}"
        functions: list[Callable[..., object]] = [first, *(step.function for step in steps)]
        what = f"{self._name}: {', '.join(map(_words_of, functions))}"
        with self.sentences(), _watched(spark, tag, what, tasks, progress):
            data = _frame(spark, works).mapInArrow(partial(task, function=first), _COLUMNS)
            for step in steps:
                data = data.repartitionById(step.partitions, "to").sortWithinPartitions("key")
                data = data.mapInArrow(partial(_send_on, function=step.function), _COLUMNS)
            return list(_letters(data.toArrow().to_batches()))

    def session(self) -> "SparkSession":
        """Return the Spark session."""
        if self._spark is None:
            from headrace.spark.session import active_session, register

            running = self._given or active_session()
            if running is not None:
                register(running, modules=self._modules, extras=self._extras)
            self._spark = running or self._started()
        return self._spark

    def _started(self) -> "SparkSession":
        from headrace.spark.session import SparkStartError, java_process, session

        logger.debug("starting Spark")
        handle, path = tempfile.mkstemp(prefix="headrace-spark-", suffix=".log")
        self._said = Path(path)
        try:
            with _standard_error(handle), _signals():
                found = session(
                    self._name, master=self._master, modules=self._modules, extras=self._extras
                )
        except SparkStartError as error:
            raise JobError(f"{error}{self._words()}") from error
        self._is_ours, self._java = True, java_process(found)
        return found

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
            if ended := self._end(_DEATH_S if broken else 0.0):
                raise JobError(
                    f"Spark's Java process {ended} while the job ran{self._words()}"
                ) from error
            if isinstance(error, OSError | EOFError):
                raise
            reason = _reason(str(error))
            if expected := re.match(r"headrace\.[\w.]+: ", reason):
                kind = ServerAwayError if ServerAwayError.__name__ in expected[0] else JobError
                raise kind(reason[expected.end() :]) from error
            if re.match(r"(?:ModuleNotFound|Import)Error: ", reason):
                raise JobError(
                    f"Spark's workers cannot run this job ({reason}): install "
                    f"'headrace[{self._extras}]' and the modules of your own functions there"
                ) from error
            where = ""
            if self._said is not None:
                where = f"; what Spark said is in {self._said}"
                self._said = None
            raise JobError(f"a task failed: {reason}{where}") from error

    def _end(self, within_s: float = 0.0) -> str:
        """Return how the Java process that this object has started ended; empty if it has not."""
        until_s = time.monotonic() + within_s
        while self._java is not None:
            try:
                # The process stays a zombie, for the library that has started it.
                found = os.waitid(os.P_PID, self._java, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return "ended"
            if found is not None:
                return _how_it_ended(found)
            if time.monotonic() >= until_s:
                return ""
            time.sleep(_POLL_S)
        return ""

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


def _how_it_ended(found: os.waitid_result) -> str:
    code = found.si_status
    # A JVM that handles a signal ends with 128 plus the number of the signal.
    number = code if found.si_code != os.CLD_EXITED else code - 128
    if number not in {int(one) for one in signal.Signals}:
        return f"ended with exit code {code}"
    hint = "; was there enough memory?" if number == signal.SIGKILL else ""
    return f"was killed ({signal.Signals(number).name}{hint})"


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


# Tags, descriptions and progress


def _words_of(function: Callable[..., object]) -> str:
    """Return the name of a function as words, such as `write part`."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", "")).strip("_").replace("_", " ")


@contextlib.contextmanager
def _watched(
    spark: "SparkSession", tag: str, what: str, tasks: int, progress: Progress | None
) -> Iterator[None]:
    """Tag and describe the queries that run meanwhile, and report which part of `tasks` tasks is finished.

    The tag cancels a query if the driver is interrupted. It names the query in Spark's UI over Spark Connect;
    in any other session, `what` does.
    """
    from headrace.spark.session import described, is_remote

    def tell(finished: int) -> None:
        if progress is not None:
            progress(min(1.0, finished / tasks))

    watch = _watch_remote(spark, tell) if is_remote(spark) else _watch_local(spark, tag, tell)
    spark.addTag(tag)
    try:
        with described(spark, what), watch if progress is not None else contextlib.nullcontext():
            yield
    except (KeyboardInterrupt, SystemExit):
        with contextlib.suppress(Exception):  # otherwise Spark would go on with the tasks
            spark.interruptTag(tag)
        raise
    finally:
        with contextlib.suppress(Exception):  # a JVM that has died
            spark.removeTag(tag)
    tell(tasks)


@contextlib.contextmanager
def _watch_remote(spark: "SparkSession", tell: Callable[[int], None]) -> Iterator[None]:
    def handle(
        stages: Iterable[Any] | None, inflight_tasks: int, operation_id: str | None, done: bool
    ) -> None:
        tell(sum(stage.num_completed_tasks for stage in stages or ()))

    spark.registerProgressHandler(handle)  # type: ignore[arg-type]
    try:
        yield
    finally:
        spark.removeProgressHandler(handle)  # type: ignore[arg-type]


@contextlib.contextmanager
def _watch_local(spark: "SparkSession", tag: str, tell: Callable[[int], None]) -> Iterator[None]:
    from headrace.spark.session import java_context

    store = java_context(spark).statusStore()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_POLL_S):
            try:
                jobs = store.jobsList(None)
                last = [jobs.apply(place) for place in range(min(_JOBS_MAX, jobs.size()))]
                ours = [job for job in last if job.jobTags().mkString(",").find(tag) >= 0]
                tell(sum(job.numCompletedTasks() for job in ours))
            except Exception:
                return  # the JVM has died, and the job's own call reports it

    watcher = threading.Thread(target=watch, name="headrace-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


# Works and letters as rows

_COLUMNS = "to int, key binary, data binary"
_SCHEMA = pa.schema(
    [
        pa.field("to", pa.int32(), False),
        pa.field("key", pa.binary(), False),
        pa.field("data", pa.binary(), False),
    ]
)


def _frame(spark: "SparkSession", works: Sequence[Any]) -> "DataFrame":
    """Return a DataFrame with one work in each partition."""
    letters = (Letter(number, b"", pickle.dumps(work)) for number, work in enumerate(works))
    table = pa.Table.from_batches(_batches(letters), _SCHEMA)
    return spark.createDataFrame(table).repartitionById(len(works), "to")


def _letters(batches: Iterable[pa.RecordBatch]) -> Letters:
    for batch in batches:
        yield from map(Letter._make, zip(*(column.to_pylist() for column in batch), strict=True))


def _batches(letters: Iterable[Letter]) -> Batches:
    for some in groups(letters, lambda letter: len(letter.data), _BATCH_BYTES):
        yield _batch(some)


def _batch(some: Sequence[Letter]) -> pa.RecordBatch:
    columns = zip(*some, strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)


# Functions of tasks


def _run_works(batches: Batches, *, function: Callable[[Any], Any]) -> Batches:
    """Run a function on each work. An expected failure is a result: Spark would make a page of text of it."""

    def result(letter: Letter) -> Letter:
        try:
            with _expected_failures():
                found = function(pickle.loads(letter.data))
        except JobError as error:
            found = error
        return letter._replace(data=pickle.dumps(found))

    return _batches(map(result, _letters(batches)))


def _send(batches: Batches, *, function: Callable[[Any], Letters]) -> Batches:
    """Send the letters that a function makes of each work."""
    with _expected_failures():
        for letter in _letters(batches):
            yield from _batches(function(pickle.loads(letter.data)))


def _send_on(batches: Batches, *, function: Callable[[int, Letters], Letters]) -> Batches:
    """Send the letters that the function of a step makes of the letters of a partition."""
    letters = _letters(batches)
    first = next(letters, None)
    if first is not None:
        with _expected_failures():
            yield from _batches(function(first.to, chain([first], letters)))


@contextlib.contextmanager
def _expected_failures() -> Iterator[None]:
    """Raise expected failures of a task as `JobError`, by whose name the driver finds their sentence."""
    try:
        yield
    except (HeadraceError, OSError) as error:
        is_away = isinstance(error, ServerError) and error.is_away
        raise (ServerAwayError if is_away else JobError)(str(error)) from error
