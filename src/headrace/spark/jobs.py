"""Tags and the progress of Spark jobs, in a session of its own JVM and over Spark Connect.

A tag names a job in Spark's UI, and cancels it if the driver is interrupted.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from headrace.spark.session import is_remote, java_context

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_POLL_S = 0.2

_JOBS_MAX = 8
"""Number of Spark's last jobs that are looked at: a query makes one job for each of its shuffles."""


@contextmanager
def watched(
    spark: "SparkSession", tag: str, tasks: int, progress: Callable[[float], None] | None
) -> Iterator[None]:
    """Tag the queries that run meanwhile, and report which part of `tasks` tasks is finished."""
    spark.addTag(tag)
    try:
        with _progress(spark, tag, tasks, progress) if progress is not None else _nothing():
            yield
    except BaseException as error:
        if not isinstance(error, Exception):  # Ctrl-C: Spark would go on with the tasks
            with suppress(Exception):
                spark.interruptTag(tag)
        raise
    finally:
        with suppress(Exception):  # a JVM that has died
            spark.removeTag(tag)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _progress(
    spark: "SparkSession", tag: str, tasks: int, progress: Callable[[float], None]
) -> Iterator[None]:
    def tell(finished: int) -> None:
        progress(min(1.0, finished / tasks))

    watch = _watch_remote(spark, tell) if is_remote(spark) else _watch_local(tag, tell)
    with watch:
        yield
    progress(1.0)


@contextmanager
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


@contextmanager
def _watch_local(tag: str, tell: Callable[[int], None]) -> Iterator[None]:
    store = java_context().statusStore()
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
