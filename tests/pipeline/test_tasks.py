"""Work for Spark's executors: ordered results, failures as sentences, and sessions that are left alone."""

import signal

import pytest

from headrace.errors import HeadraceError
from headrace.pipeline.tasks import JobError, SparkRunner, _signals


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
