"""Work for Spark's executors: ordered results, failures as sentences, and sessions that are left alone."""

import errno
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from headrace.errors import HeadraceError
from headrace.pipeline.tasks import (
    LETTER_BYTES_MAX,
    JobError,
    Letter,
    LocalRunner,
    ServerAwayError,
    SparkRunner,
    Step,
    TaskRunner,
    _expected_failures,
    _signals,
)
from headrace.reader.http_client import ServerError
from headrace.spark.session import described, java_context
from headrace.testing import wait_until


def double(number: int) -> int:
    if number == 7:
        raise HeadraceError("seven is not for us")
    return 2 * number // (number != 9)


@pytest.mark.usefixtures("shared_spark")
def test_results_come_in_the_order_of_the_works_and_failures_as_sentences(shared_spark):
    told: list[float] = []
    runner = SparkRunner("test", "local[2]")
    assert runner.run([3, 1, 2], double, told.append) == [6, 2, 4]
    assert told[-1] == 1.0
    with pytest.raises(JobError) as expected:
        runner.run([1, 7, 2], double)
    assert str(expected.value) == "seven is not for us"
    with pytest.raises(JobError) as fault:
        runner.run([9], double)
    assert (
        str(fault.value) == "a task failed: ZeroDivisionError: integer division or modulo by zero"
    )
    runner.close()
    # The session is not the runner's, so it still works.
    assert shared_spark.range(1).count() == 1


def jobs_of(spark: SparkSession) -> dict[int, tuple[str, str]]:
    """Return tags and description of each job, as Spark's UI knows them."""
    jobs = java_context(spark).statusStore().jobsList(None)
    found = [jobs.apply(place) for place in range(jobs.size())]
    return {job.jobId(): (job.jobTags().mkString(","), str(job.description())) for job in found}


@pytest.fixture
def notebook(shared_spark: SparkSession) -> Iterator[SparkSession]:
    """Session whose user has given it a tag and a description."""
    shared_spark.addTag("of-the-notebook")
    with described(shared_spark, "cell 7"):
        yield shared_spark
    shared_spark.removeTag("of-the-notebook")


def test_a_query_has_tag_and_description_of_its_job_and_the_session_keeps_its_own(notebook):
    before = jobs_of(notebook).keys()
    SparkRunner("headrace export", "", notebook).run([3, 1, 2], double)
    with pytest.raises(JobError):
        SparkRunner("headrace export", "", notebook).run([7], partial(double))
    SparkRunner("headrace dedupe", "", notebook).exchange(["to be"], words, STEPS)
    assert notebook.getTags() == {"of-the-notebook"}
    assert notebook.range(3).count() == 3

    def new_jobs() -> list[tuple[str, str]]:
        return [found for number, found in jobs_of(notebook).items() if number not in before]

    # The UI learns of jobs in their order, and later than their results are here.
    wait_until(lambda: any("cell 7" in what for _, what in new_jobs()), 60, "the last job")
    assert {what for _, what in new_jobs()} == {
        "Some(headrace export: double)",
        "Some(headrace dedupe: words, count, gather one)",
        "Some(cell 7)",
    }
    for tags, what in new_jobs():
        found = re.findall(r"headrace-(\w+)-[0-9a-f]{8}\b", tags)
        assert found == re.findall(r"headrace (\w+):", what)
        assert "of-the-notebook" in tags


@pytest.mark.usefixtures("shared_spark")
def test_a_job_in_another_thread_leaves_the_running_session_alone(shared_spark):
    def run() -> list[int]:
        with closing(SparkRunner("test", "local[2]")) as runner:
            return runner.run([1], double)

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(run).result() == [2]
    assert shared_spark.range(1).count() == 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ServerError("no server answers"), ServerAwayError),
        (ServerError("the server stops", 503), ServerAwayError),
        (ServerError("the token is refused", 401), JobError),
        (HeadraceError("seven is not for us"), JobError),
        (PermissionError(errno.EACCES, "Permission denied", "x"), JobError),
    ],
)
def test_a_task_tells_a_server_that_is_away_from_one_that_refuses(error, kind):
    with pytest.raises(JobError) as failed, _expected_failures():
        raise error
    assert (type(failed.value), str(failed.value)) == (kind, str(error))


def test_a_package_that_the_workers_lack_is_one_sentence():
    said = (
        "An exception was thrown from the Python worker\n"
        "pyspark.serializers.SerializationError: Caused by Traceback (most recent call last):\n"
        '  File "cloudpickle.py", line 649, in subimport\n'
        "ModuleNotFoundError: No module named 'deltalake'\n\n"
        "\tat org.apache.spark.api.python.BasePythonRunner.run\n"
    )
    with pytest.raises(JobError) as failed, SparkRunner("test", "local[2]").sentences():
        raise PySparkException(said)
    assert str(failed.value) == (
        "Spark's workers cannot run this job (ModuleNotFoundError: No module named 'deltalake'): install "
        "'headrace[pipeline]' and the modules of your own functions there"
    )


def words(text: str) -> Iterator[Letter]:
    """Send each word to the partition of its length, in reverse order."""
    if text == "refused":
        raise ServerError("the token is refused", 401)
    if text == "missing":
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "words")
    for word in sorted(text.split(), reverse=True):
        yield Letter(len(word), word.encode(), b"1")


def count(number: int, letters: Iterator[Letter]) -> Iterator[Letter]:
    """Send the words of a partition, in the order of their arrival, to partition 0."""
    found = [letter.key for letter in letters]
    assert all(len(word) == number for word in found)
    yield Letter(0, b"%d" % number, b",".join(found))


def gather_one(number: int, letters: Iterator[Letter]) -> Iterator[Letter]:
    yield Letter(number, b"", b" ".join(letter.data for letter in letters))


STEPS = (Step(9, count), Step(2, gather_one))


@pytest.mark.parametrize("where", ["here", "spark"])
def test_letters_reach_their_partition_in_the_order_of_their_keys(where, request):
    runner: TaskRunner = LocalRunner()
    if where == "spark":
        request.getfixturevalue("shared_spark")
        runner = SparkRunner("test", "local[2]")
    told: list[float] = []
    [found] = runner.exchange(["to be or", "not to be", "that is"], words, STEPS, told.append)
    assert found == Letter(0, b"", b"be,be,is,or,to,to not that")
    assert told[-1] == 1.0
    assert runner.exchange([""], words, STEPS) == []
    assert runner.exchange([], words, STEPS) == []


def large(size: int) -> Iterator[Letter]:
    yield Letter(0, b"", bytes(size))


@pytest.mark.usefixtures("shared_spark")
def test_a_letter_may_be_large():
    runner = SparkRunner("test", "local[2]")
    [found] = runner.exchange([LETTER_BYTES_MAX, 1], large, [Step(1, gather_one)])
    assert len(found.data) == LETTER_BYTES_MAX + 2


@pytest.mark.usefixtures("shared_spark")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("missing", "[Errno 2] No such file or directory: 'words'"),
        ("refused", "the token is refused"),
    ],
)
def test_a_failure_within_an_exchange_is_one_sentence(text, said):
    runner = SparkRunner("test", "local[2]")
    with pytest.raises(JobError) as failed:
        runner.exchange(["a b", text], words, STEPS)
    assert (type(failed.value), str(failed.value)) == (JobError, said)


def test_without_works_nothing_is_started():
    runner = SparkRunner("test", "no master at all")
    assert runner.run([], double) == []
    runner.close()


@pytest.mark.parametrize("chosen", [signal.default_int_handler, lambda *_: None])
def test_whoever_has_chosen_what_ctrl_c_does_keeps_it(chosen):
    def of_spark(*_: object) -> None: ...

    before = signal.signal(signal.SIGINT, chosen)
    try:
        with _signals():
            signal.signal(signal.SIGINT, of_spark)
        is_default = chosen is signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is (of_spark if is_default else chosen)
    finally:
        signal.signal(signal.SIGINT, before)
