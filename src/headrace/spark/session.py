"""A local Spark session with good settings for the format `headrace`, and registration in other sessions.

Both check first what would otherwise fail with an obscure error: Java, and the Python of Spark's workers.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError
from headrace.spark.source import HeadraceSource

if TYPE_CHECKING:
    from pyspark import SparkContext
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


_SHUFFLE_PARTITIONS = "spark.sql.shuffle.partitions"

JAVA_LEAST = 17

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
) -> "SparkSession":
    """Return a new Spark session on `master`, or the one that is running.

    `settings` take precedence over `SETTINGS`. A running session keeps its own settings, apart from those in
    `settings`.
    """
    from pyspark.sql import SparkSession

    check_master(master)
    check_java()
    running = SparkSession.getActiveSession()
    if running is not None:
        # Other code may rely on the running session's own settings.
        for key, value in (settings or {}).items():
            running.conf.set(key, value)
        register(running)
        return running
    if master.startswith("local"):
        # Without a network, Spark tries to resolve its host name and waits long for an answer.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        # Otherwise tasks would run in the first Python on the PATH, without the packages installed here.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    chosen = {**SETTINGS, **(settings or {})}
    java = [chosen.get("spark.driver.extraJavaOptions", "")]
    if master.startswith("local") and not _has_collector(java[0]):
        # Rows are short-lived. The parallel collector, which does not run concurrently with the program,
        # frees them fastest.
        java.append("-XX:+UseParallelGC")
    if quiet:
        java.append(f"-Dlog4j2.configurationFile={_logging_file()}")
    chosen["spark.driver.extraJavaOptions"] = " ".join(java).strip()
    spark = _started(name, master, chosen)
    partitions = _shuffle_partitions(
        dict(spark.sparkContext.getConf().getAll()), spark.sparkContext.defaultParallelism
    )
    if partitions is not None:
        spark.conf.set(_SHUFFLE_PARTITIONS, str(partitions))
    if quiet:
        spark.sparkContext.setLogLevel("ERROR")
    register(spark)
    return spark


def _shuffle_partitions(configured: Mapping[str, str], parallelism: int) -> int | None:
    """Return the number of shuffle partitions: the number of cores, or None to keep the configured value.

    None also keeps Spark's default if the number of cores is unknown. That default is 200, and a streaming
    query starts a task for each partition, even for a few rows.
    """
    if _SHUFFLE_PARTITIONS in configured:
        return None
    if configured.get("spark.master", "").startswith("local"):
        return parallelism
    # A cluster may have assigned no executor yet, so use the number that was requested.
    if "spark.cores.max" in configured:
        return int(configured["spark.cores.max"])
    if "spark.executor.instances" in configured:
        cores = int(configured.get("spark.executor.cores", "1"))
        return max(1, int(configured["spark.executor.instances"]) * cores)
    return None


def check_master(master: str) -> None:
    """Raise `SparkStartError` for a Spark Connect address: its client has no `SparkContext`."""
    if master.startswith("sc://"):
        raise SparkStartError(
            f"{master!r} is the address of a Spark Connect server, and this needs a Spark of its own: give "
            "local[*], spark://HOST:PORT, yarn or k8s://HOST:PORT"
        )


def _started(name: str, master: str, settings: Mapping[str, str]) -> "SparkSession":
    """Start the session; raise `SparkStartError` if the JVM exits at once or cannot reach its master."""
    from py4j.protocol import Py4JError, Py4JJavaError
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    try:
        builder = SparkSession.builder.appName(name).master(master)
        for key, value in settings.items():
            builder = builder.config(key, value)
        return builder.getOrCreate()
    except (Py4JError, PySparkException) as error:
        said = error.java_exception.toString() if isinstance(error, Py4JJavaError) else str(error)
        why = str(said).strip().partition("\n")[0]
        if "JAVA_GATEWAY_EXITED" in why:
            why = "its Java process ended at once"
        raise SparkStartError(f"Spark does not start with the master {master!r}: {why}") from error


def _has_collector(options: str) -> bool:
    """True if a garbage collector is already chosen: Java does not start with two."""
    variables = ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS")
    given = [options, *(os.environ.get(name, "") for name in variables)]
    return any(re.search(r"-XX:[+]Use\w+GC\b", one) for one in given)


def register(spark: "SparkSession") -> None:
    """Register `format("headrace")` in a Spark session. Sessions made with its `newSession` need it too.

    Raise `WorkerPythonError` if Spark's workers run a Python without Headrace.
    """
    if hasattr(spark, "_jsparkSession"):  # a client of Spark Connect cannot see the workers
        check_workers(spark.sparkContext)
    register_source(spark, HeadraceSource)


def register_source(spark: "SparkSession", source: "type[DataSource]") -> None:
    """Register a data source that several streams of a session can use at the same time.

    All queries share the environment map of a data source. A stream that starts writes into it while the
    tasks of others are serialized with it. Spark's own registration makes it a `HashMap`, so now and then a
    query fails with `OptionalDataException`. A `ConcurrentHashMap` can be serialized while it changes.
    """
    if not hasattr(spark, "_jsparkSession"):  # the server of Spark Connect makes the map
        spark.dataSource.register(source)
        return
    from pyspark.sql.udf import _wrap_function

    jvm: Any = spark._jvm
    function: Any = _wrap_function(spark.sparkContext, source)
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
"""Modules that workers import. Spark itself provides `pyspark`."""

_PROBE = (
    "import json, sys\n"
    "from importlib.util import find_spec\n"
    "missing = [name for name in sys.argv[1:] if find_spec(name) is None]\n"
    "print(json.dumps([missing, list(sys.version_info[:2])]))\n"
)
_PROBE_S = 30.0
"""Timeout of the probe. A Python that takes longer is accepted."""

_good: set[tuple[str, ...]] = set()
"""Interpreters that passed the check, because each new Spark session registers the format again."""


class WorkerPythonError(HeadraceError):
    """Spark's workers run a Python without Headrace: install it there, or set PYSPARK_PYTHON."""


def check_workers(context: "SparkContext") -> None:
    """Raise `WorkerPythonError` if every use of the format would fail.

    Spark plans reads of the format in a worker on the driver's machine, on clusters too, so this checks the
    Python there. It does not start executors on other machines.
    """
    from pyspark import SparkFiles

    includes = [
        str(Path(SparkFiles.getRootDirectory(), name)) for name in context._python_includes or ()
    ]
    check_python(
        context.pythonExec,
        includes,
        context.environment,
        is_local=str(context.master).startswith("local"),
    )


def check_python(
    name: str, includes: Sequence[str], environment: Mapping[str, str], *, is_local: bool
) -> None:
    """Check one interpreter; `includes` are the entries that `addPyFile` adds to its path."""
    found = shutil.which(name)
    if found is None:
        if not is_local:
            return  # the program may be in an archive that only executors unpack
        raise WorkerPythonError(
            f"Spark's workers are configured to run {name!r}, which does not exist: {_advice()}"
        )
    if _is_ours(found) or (found, *includes) in _good:
        return
    told = _probe(found, includes, environment)
    if told is None:
        return
    missing, version = told
    if missing:
        raise WorkerPythonError(
            f"Spark's workers run {found}, which has no {' and no '.join(missing)}: {_advice()}, or install "
            "'headrace[spark]' there"
        )
    if version != list(sys.version_info[:2]):
        theirs, ours = (".".join(map(str, one)) for one in (version, sys.version_info[:2]))
        raise WorkerPythonError(
            f"Spark's workers run {found}, which is Python {theirs}, and this is Python {ours}: {_advice()}"
        )
    _good.add((found, *includes))


def _advice() -> str:
    return f"set PYSPARK_PYTHON={sys.executable} before the session starts"


def _is_ours(found: str) -> bool:
    """True if `found` is this Python. A link from another directory may belong to another environment."""
    here = Path(sys.executable)
    there = Path(found).absolute()
    return there.parent == here.parent and there.samefile(here)


def _probe(
    python: str, includes: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[str], list[int]] | None:
    """Return the missing modules and the version; None if the interpreter does not answer."""
    environ = {**os.environ, **environment}
    path = [*includes, *filter(None, [environ.get("PYTHONPATH")])]
    try:
        done = subprocess.run(
            [python, "-c", _PROBE, *NEEDED],
            env=environ | {"PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_S,
            check=False,
        )
        missing, version = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError, TypeError):
        return None
    return missing, version
