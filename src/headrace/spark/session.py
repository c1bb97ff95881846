"""A local Spark session that is set up well for the format `headrace`, and registration in any other."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.errors import HeadraceError
from headrace.spark.source import HeadraceSource
from headrace.spark.workers import check_workers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Spark prints that it sets the level of its gateway's logger, unless that and the root are at `warn`.
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
    # A socket file instead of TCP between the JVM and Python: half as fast again for large reads.
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # The default makes temporary files twice: a micro-batch takes twice as long with it.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
"""What `session` sets, before what the user gives.

Not the push-down of filters: Spark 4.3 keeps what they left of a frame, and takes it for all of it later.
"""


_SHUFFLE_PARTITIONS = "spark.sql.shuffle.partitions"

JAVA_LEAST = 17

_JAVA_VERSION_S = 10.0
"""How long `java -version` may take."""


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
    """A new session on `master`, with `settings` over our own; or the one that is running, as it is."""
    from pyspark.sql import SparkSession

    check_master(master)
    check_java()
    running = SparkSession.getActiveSession()
    if running is not None:
        # It has settings of its own, which others may rely on.
        for key, value in (settings or {}).items():
            running.conf.set(key, value)
        register(running)
        return running
    if master.startswith("local"):
        # Without a network Spark looks for its own name, and waits long for it.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        # Or tasks would run in whatever Python comes first on the PATH, without what is installed here.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    chosen = {**SETTINGS, **(settings or {})}
    java = [chosen.get("spark.driver.extraJavaOptions", "")]
    if master.startswith("local") and not _has_collector(java[0]):
        # Rows are read and let go: that is done soonest by the collector that does nothing else meanwhile.
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
    """Partitions of a shuffle: as many as cores. None: as configured, or Spark's own default.

    That default is 200. A streaming query starts a task for each of them, however little there is.
    """
    if _SHUFFLE_PARTITIONS in configured:
        return None
    if configured.get("spark.master", "").startswith("local"):
        return parallelism
    # A cluster may have given us no executor yet: what was asked for counts.
    if "spark.cores.max" in configured:
        return int(configured["spark.cores.max"])
    if "spark.executor.instances" in configured:
        cores = int(configured.get("spark.executor.cores", "1"))
        return max(1, int(configured["spark.executor.instances"]) * cores)
    return None


def check_master(master: str) -> None:
    """Raise `SparkStartError` for a Spark Connect address: such a server has no `SparkContext` for us."""
    if master.startswith("sc://"):
        raise SparkStartError(
            f"{master!r} is the address of a Spark Connect server, and this needs a Spark of its own: give "
            "local[*], spark://HOST:PORT, yarn or k8s://HOST:PORT"
        )


def _started(name: str, master: str, settings: Mapping[str, str]) -> "SparkSession":
    """Make the session; a JVM that ends at once, or cannot reach its master, is one clear error."""
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
    """Whether somebody has chosen a garbage collector: Java does not start with two."""
    variables = ("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "SPARK_SUBMIT_OPTS")
    given = [options, *(os.environ.get(name, "") for name in variables)]
    return any(re.search(r"-XX:[+]Use\w+GC\b", one) for one in given)


def register(spark: "SparkSession") -> None:
    """Make `format("headrace")` known in a session; others made by its `newSession` need it too.

    Raises `WorkerPythonError` where Spark's workers run a Python without Headrace.
    """
    if hasattr(
        spark, "_jsparkSession"
    ):  # a client of Spark Connect does not know its server's Python
        check_workers(spark.sparkContext)
    with _active(spark):
        spark.dataSource.register(HeadraceSource)


@contextmanager
def _active(spark: "SparkSession") -> Iterator[None]:
    """Spark 4.3 looks in the active session whether a name is taken, whichever is asked."""
    java = getattr(spark, "_jsparkSession", None)
    if java is None:  # a client of Spark Connect
        yield
        return
    jvm: Any = spark._jvm
    sessions = jvm.org.apache.spark.sql.classic.SparkSession
    before = sessions.getActiveSession()
    sessions.setActiveSession(java)
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()


def check_java() -> None:
    """Raise `NoJavaError` where Spark could not start."""
    # Where Spark looks too.
    home = os.environ.get("JAVA_HOME")
    found = shutil.which(str(Path(home, "bin", "java")) if home else "java")
    if found is None:
        what = f"JAVA_HOME ({home}) has none" if home else "none was found"
    else:
        version = _java_version(found)
        # A Java that does not say which it is: Spark finds out.
        if version is None or version >= JAVA_LEAST:
            return
        what = f"{found} is older"
    raise NoJavaError(
        f"Spark needs Java {JAVA_LEAST} or newer, and {what}: install it (Debian, Ubuntu: apt install "
        "openjdk-17-jre-headless), or set JAVA_HOME to where it is"
    )


def _java_version(java: str) -> int | None:
    """The major version of a Java (1 for Java 8); None if it does not tell."""
    release = Path(java).resolve().parent.parent / "release"
    if release.is_file():
        text = release.read_text("utf-8", "replace")
        found = re.search(r'^JAVA_VERSION="(\d+)', text, re.MULTILINE)
    else:
        # A wrapper script, as version managers install it, has no such file beside it.
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
    """The file that keeps Spark quiet from its first line on; the JVM reads it once, at its start."""
    path = Path(tempfile.gettempdir()) / f"headrace-spark-log4j2-{os.getuid()}.properties"
    made = path.with_suffix(f".{os.getpid()}")
    made.write_text(_LOGGING)
    made.rename(path)
    return str(path)
