"""Listings of object storage whose answers end too early."""

from concurrent.futures import ThreadPoolExecutor

from headrace.lake.storage.storage import storage_of
from tests.fakes.s3_proxy import CUT_BODY


def test_a_listing_goes_on_after_a_page_that_was_cut(bucket, s3_proxy):
    storage = storage_of(bucket.url, bucket.through(s3_proxy).options)
    names = {f"many/{number:05}" for number in range(1100)}
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda name: storage.create(name, b""), names))
    for times in (1, 3):
        s3_proxy.fail(CUT_BODY, "GET .*(continuation-token|start-after)", times=times)
        assert [one.path for one in storage.list("many/")] == sorted(names)
