"""Parts that all jobs share: the progress of a job that works in several rounds."""

import pytest

from headrace.pipeline.job import share_of


@pytest.mark.parametrize("total", [0, 1, 7, 13_181, 2**40 + 1])
def test_shares_of_a_job_meet_and_end_at_the_total(total):
    seen = []
    for first, last in ((0.0, 0.5), (0.5, 0.6), (0.6, 1.0)):
        report = share_of(lambda done, all_: seen.append((done, all_)), total, first, last)
        report(0.0)
        report(1.0)
    done = [one for one, _ in seen]
    assert done == sorted(done)
    assert done[0] == 0
    assert done[1::2][:2] == done[2::2]
    assert done[-1] == total
    assert {all_ for _, all_ in seen} == {total}


def test_a_job_without_an_observer_reports_nothing():
    assert share_of(None, 10, 0.0, 1.0) is None
