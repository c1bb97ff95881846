"""A local Spark session with good settings for the format `headrace`, and registration in other sessions.

Both check first what would otherwise fail with an obscure error: Java, and the Python of Spark's workers.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError
from headrace.spark.source import HeadraceSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSource

# Spark prints a message when it sets the level of its gateway's logger, unless that logger and the root
# logger are at `warn`.
_LOGGING = """\
status = error
rootLogger.level = warn
logger.all.name = org
logger.all.level = error
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = warn
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n
"""

SETTINGS: Mapping[str, str] = {
    # A Unix socket instead of TCP between the JVM and Python makes large reads 50 % faster.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # The default creates each temporary file twice, so a micro-batch takes twice as long.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
"""Settings of `session`; the user's settings take precedence.

Filter push-down is off: Spark 4.3 caches the filtered part of a frame and later uses it as the whole frame.
"""


_CONNECT = "sc://"
_SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""Variable that `spark-submit` sets for an application."""

_DESCRIPTION = "spark.job.description"
"""Property of a thread."""

_SHUFFLE_PARTITIONS = "spark.sql.shuffle.partitions"

JAVA_LEAST = 17

_CONNECT_S = 10.0
"""Time in which a Spark Connect server must accept a connection."""

_JAVA_VERSION_S = 10.0
"""Timeout of `java -version`."""


class NoJavaError(HeadraceError):
    """Spark needs Java 17 or newer: install it, or set JAVA_HOME to where it is."""


class SparkStartError(HeadraceError):
    """Spark could not start: check its master, and read what Spark printed on standard error."""


def session(
    name: str = "headrace",
    *,
    master: str = "local[*]",
    settings: Mapping[str, str] | None = None,
    quiet: bool = True,
    modules: Sequence[str] = (),
    extras: str = "spark",
) -> "SparkSession":
    """Return a new Spark session on `master`, or the one that is running.

    `master` may be the address of a Spark Connect server, such as `sc://HOST:15002`. The master of
    `spark-submit`, or the address in SPARK_REMOTE, takes precedence. `settings` take precedence over
    `SETTINGS`. A running session keeps its own settings, apart from those in `settings`. `modules` and
    `extras` are those of `register`.
    """
    given = settings or {}
    running = active_session()
    if running is not None:
        # Other code may rely on the running session's own settings.
        for key, value in given.items():
            running.conf.set(key, value)
        register(running, modules=modules, extras=extras)
        return running
    if (address := os.environ.get("SPARK_REMOTE", master)).startswith(_CONNECT):
        spark = _connected(name, address, given)
    elif _SUBMITTED in os.environ:
        spark = _started(name, "", given)  # its JVM runs already, with its own settings
    else:
        spark = _started_here(name, master, given, quiet=quiet)
    try:
        register(spark, modules=modules, extras=extras)
    except BaseException:
        spark.stop()
        raise
    return spark


def _started_here(
    name: str, master: str, settings: Mapping[str, str], *, quiet: bool
) -> "SparkSession":
    """Start a JVM on this machine, as the driver of `master`."""
    check_java()
    if master.startswith("local"):
        # Without a network, Spark tries to resolve its host name and waits long for an answer.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        # Otherwise tasks would run in the first Python on the PATH, without the packages installed here.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    chosen = {**SETTINGS, **settings}
    java = [chosen.get("spark.driver.extraJavaOptions", "")]
    if master.startswith("local") and not _has_collector(java[0]):
        # Rows are short-lived. The parallel collector, which does not run concurrently with the program,
        # frees them fastest.
        java.append("-XX:+UseParallelGC")
    if quiet:
        java.append(f"-Dlog4j2.configurationFile={_logging_file()}")
    chosen["spark.driver.extraJavaOptions"] = " ".join(java).strip()
    spark = _started(name, master, chosen)
    partitions = _shuffle_partitions(spark.conf.getAll)
    if partitions is not None:
        spark.conf.set(_SHUFFLE_PARTITIONS, str(partitions))
    return spark


def active_session() -> "SparkSession | None":
    """Return the running Spark session, if there is one, whichever thread has started it."""
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    try:
        found = SparkSession.active()
    except PySparkRuntimeError:
        return None
    # A session whose context was stopped is still the default one.
    return found if is_remote(found) or found._sc._jsc is not None else None


def is_remote(spark: "SparkSession") -> bool:
    """True for a session of Spark Connect, whose JVM is elsewhere."""
    return not hasattr(spark, "_jsparkSession")


def java_context(spark: "SparkSession") -> Any:
    """Return the JVM's context of a session; raise if it was stopped, and over Spark Connect."""
    context: Any = spark._sc
    return context._jsc.sc()


@contextmanager
def described(spark: "SparkSession", what: str) -> Iterator[None]:
    """Describe the queries of this thread in Spark's UI meanwhile, unless the session is of Spark Connect.

    Spark Connect has no descriptions: its UI shows the tags of a query.
    """
    if is_remote(spark):
        yield
        return
    context = java_context(spark)
    before = context.getLocalProperty(_DESCRIPTION)
    context.setJobDescription(what)
    try:
        yield
    finally:
        with suppress(Exception):  # a JVM that has died
            context.setLocalProperty(_DESCRIPTION, before)


def java_process(spark: "SparkSession") -> int | None:
    """Return the process id of the session's JVM; None over Spark Connect."""
    if is_remote(spark):
        return None
    jvm: Any = spark._jvm
    return int(jvm.java.lang.ProcessHandle.current().pid())


def _connected(name: str, address: str, settings: Mapping[str, str]) -> "SparkSession":
    """Connect to a Spark Connect server; raise `SparkStartError` if that is not possible."""
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    try:
        import grpc  # type: ignore[import-untyped]
        from pyspark.sql.connect.client import DefaultChannelBuilder
    except ImportError as error:
        raise SparkStartError(
            f"Spark Connect needs: pip install 'headrace[connect]' ({plain_reason(error)})"
        ) from error
    try:
        # Spark itself would try for ten minutes to reach a server that is not there.
        with DefaultChannelBuilder(address).toChannel() as channel:
            grpc.channel_ready_future(channel).result(_CONNECT_S)
        builder = SparkSession.builder.appName(name).remote(address)
        spark = builder.config(map=dict(settings)).getOrCreate()
        _ = spark.version  # the first request
        return spark
    except (grpc.FutureTimeoutError, PySparkException, ValueError, OSError) as error:
        reason = plain_reason(error) if str(error) else f"tried for {_CONNECT_S:g} s"
        where = address.partition("/;")[0]  # a token may follow
        raise SparkStartError(f"no Spark Connect server answers at {where}: {reason}") from error


def plain_reason(error: object) -> str:
    """Return the first line of an error."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _shuffle_partitions(configured: Mapping[str, str]) -> int | None:
    """Return the number of shuffle partitions: the number of cores, or None to keep the configured value.

    None also keeps Spark's default if the number of cores is unknown. That default is 200, and a streaming
    query starts a task for each partition, even for a few rows.
    """
    if _SHUFFLE_PARTITIONS in configured:
        return None
    if local := re.match(r"local(?:\[(\d+|\*))?", configured.get("spark.master", "")):
        return (os.cpu_count() or 1) if local[1] == "*" else int(local[1] or 1)
    # A cluster may have assigned no executor yet, so use the number that was requested.
    if "spark.cores.max" in configured:
        return int(configured["spark.cores.max"])
    if "spark.executor.instances" in configured:
        cores = int(configured.get("spark.executor.cores", "1"))
        return max(1, int(configured["spark.executor.instances"]) * cores)
    return None


def _started(name: str, master: str, settings: Mapping[str, str]) -> "SparkSession":
    """Start the session; raise `SparkStartError` if the JVM exits at once or cannot reach its master."""
    from py4j.protocol import Py4JError, Py4JJavaError
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    try:
        builder = SparkSession.builder.appName(name).config(map=dict(settings))
        return (builder.master(master) if master else builder).getOrCreate()
    except (Py4JError, PySparkException) as error:
        why = plain_reason(
            error.java_exception.toString() if isinstance(error, Py4JJavaError) else error
        )
        if "JAVA_GATEWAY_EXITED" in why:
            why = "its Java process ended at once"
        raise SparkStartError(f"Spark does not start with the master {master!r}: {why}") from error


def _has_collector(options: str) -> bool:
    """True if a garbage collector is already chosen: Java does not start with two."""
    variables = ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS")
    given = [options, *(os.environ.get(name, "") for name in variables)]
    return any(re.search(r"-XX:[+]Use\w+GC\b", one) for one in given)


def register(spark: "SparkSession", *, modules: Sequence[str] = (), extras: str = "spark") -> None:
    """Register `format("headrace")` in a Spark session. Sessions made with its `newSession` need it too.

    Raise `SparkStartError` if the session's Spark has another version than pyspark here, and
    `WorkerPythonError` if Spark's workers run a Python without Headrace or without one of `modules`. The
    error names the `extras` of Headrace that install them.
    """
    check_version(spark)
    check_workers(spark, (*NEEDED, *modules), extras)
    register_source(spark, HeadraceSource)


def check_version(spark: "SparkSession") -> None:
    """Raise `SparkStartError` if the session's Spark, perhaps a server elsewhere, is not that of pyspark."""
    import pyspark

    theirs, ours = (one.split(".")[:2] for one in (spark.version, pyspark.__version__))
    if theirs != ours:
        raise SparkStartError(
            f"the session is of Spark {spark.version}, and pyspark here is {pyspark.__version__}: install "
            f"pyspark~={'.'.join(theirs)}.0 here, or use another Spark"
        )


def register_source(spark: "SparkSession", source: "type[DataSource]") -> None:
    """Register a data source that several streams of a session can use at the same time.

    All queries share the environment map of a data source. A stream that starts writes into it while the
    tasks of others are serialized with it. Spark's own registration makes it a `HashMap`, so now and then a
    query fails with `OptionalDataException`. A `ConcurrentHashMap` can be serialized while it changes.
    """
    if is_remote(spark):  # the server of Spark Connect makes the map
        spark.dataSource.register(source)
        return
    from pyspark.sql.udf import _wrap_function

    jvm: Any = spark._jvm
    function: Any = _wrap_function(spark._sc, source)
    python = jvm.org.apache.spark.sql.execution.datasources.v2.python
    shared = python.UserDefinedPythonDataSource(
        function.copy(
            function.command(),
            jvm.java.util.concurrent.ConcurrentHashMap(function.envVars()),
            function.pythonIncludes(),
            function.pythonExec(),
            function.pythonVer(),
            function.broadcastVars(),
            function.accumulator(),
        )
    )
    with _active(spark):
        spark._jsparkSession.dataSource().registerPython(source.name(), shared)


@contextmanager
def _active(spark: "SparkSession") -> Iterator[None]:
    """Make `spark` the active session meanwhile.

    Spark 4.3 checks in the active session whether a name is taken, even if another session registers it.
    """
    jvm: Any = spark._jvm
    sessions = jvm.org.apache.spark.sql.classic.SparkSession
    before = sessions.getActiveSession()
    sessions.setActiveSession(spark._jsparkSession)
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()


def check_java() -> None:
    """Raise `NoJavaError` if Java is missing or too old for Spark."""
    # Spark looks in the same places.
    home = os.environ.get("JAVA_HOME")
    found = shutil.which(str(Path(home, "bin", "java")) if home else "java")
    if found is None:
        what = f"JAVA_HOME ({home}) has none" if home else "none was found"
    else:
        version = _java_version(found)
        # If Java does not tell its version, let Spark find out.
        if version is None or version >= JAVA_LEAST:
            return
        what = f"{found} is older"
    raise NoJavaError(
        f"Spark needs Java {JAVA_LEAST} or newer, and {what}: install it (Debian, Ubuntu: apt install "
        "openjdk-17-jre-headless), or set JAVA_HOME to where it is"
    )


def _java_version(java: str) -> int | None:
    """Return the major version of a Java (1 for Java 8); None if it is unknown."""
    release = Path(java).resolve().parent.parent / "release"
    if release.is_file():
        text = release.read_text("utf-8", "replace")
        found = re.search(r'^JAVA_VERSION="(\d+)', text, re.MULTILINE)
    else:
        # A wrapper script, as installed by version managers, has no such file beside it.
        try:
            done = subprocess.run(
                [java, "-version"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_JAVA_VERSION_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        found = re.search(r'version "(\d+)', done.stderr.decode("utf-8", "replace"))
    return int(found[1]) if found else None


def _logging_file() -> str:
    """Write the logging configuration that keeps Spark quiet, and return its path.

    The JVM reads the file once, when it starts, so it covers Spark's first line too.
    """
    path = Path(tempfile.gettempdir()) / f"headrace-spark-log4j2-{os.getuid()}.properties"
    made = path.with_suffix(f".{os.getpid()}")
    made.write_text(_LOGGING)
    made.rename(path)
    return str(path)


# The Python of Spark's workers

NEEDED = ("headrace", "crc32c", "msgspec", "numpy", "pyarrow")
"""Modules that workers import for the format. Spark itself provides `pyspark`."""

_good: set[tuple[str, str, tuple[str, ...]]] = set()
"""Checks that passed, as application, Python of the workers, and modules: they are not repeated."""


class WorkerPythonError(HeadraceError):
    """Spark's workers run a Python without Headrace: install it there, or set PYSPARK_PYTHON."""


def check_workers(spark: "SparkSession", needed: tuple[str, ...], extras: str) -> None:
    """Raise `WorkerPythonError` if workers lack a module. Asks a worker, by a small query.

    The error names the `extras` of Headrace that install the modules.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    configured = spark.conf.getAll
    python = os.environ.get("PYSPARK_PYTHON", "python3")
    workers = (configured.get("spark.app.id", ""), python, needed)
    if configured.get("spark.master", "").startswith("local") and not is_remote(spark):
        if _is_ours(python):
            return
        if shutil.which(python) is None:
            raise WorkerPythonError(
                f"Spark's workers are configured to run {python!r}, which does not exist: {_advice()}"
            )
    if workers in _good:
        return
    try:
        [(python, missing)] = spark.range(1).mapInArrow(_probe(needed), _PROBED).collect()
    except (PySparkException, Py4JError) as error:
        found = _WORKER_FAILURE.search(str(error))
        reason = found[0].rstrip(")") if found else plain_reason(error)
        raise WorkerPythonError(
            f"Spark's workers cannot run Headrace ({reason}): {_advice()}, or install "
            f"'headrace[{extras}]' there"
        ) from error
    if missing:
        raise WorkerPythonError(
            f"Spark's workers run {python}, which has no {' and no '.join(missing.split())}: {_advice()}, or "
            f"install 'headrace[{extras}]' there"
        )
    _good.add(workers)


_WORKER_FAILURE = re.compile(
    r"(?:ModuleNotFound|Import)Error: .*|Python in worker has different .*"
)

_PROBED = "python string, missing string"


def _probe(names: Sequence[str]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a function for tasks. It is sent by value, so it also runs where Headrace is missing."""

    def probe(batches: Iterator[Any]) -> Iterator[Any]:
        import sys
        from importlib.util import find_spec

        import pyarrow

        for _ in batches:
            missing = " ".join(name for name in names if find_spec(name) is None)
            yield pyarrow.RecordBatch.from_pydict(
                {"python": [sys.executable], "missing": [missing]}
            )

    return probe


def _advice() -> str:
    return f"set PYSPARK_PYTHON={sys.executable} before the session starts"


def _is_ours(name: str) -> bool:
    """True if a program is this Python. A link from another directory may belong to another environment."""
    found = shutil.which(name)
    if found is None:
        return False
    here, there = Path(sys.executable), Path(found).absolute()
    return there.parent == here.parent and there.samefile(here)
