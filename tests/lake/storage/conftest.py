"""A fake HDFS for tests of storages."""

import pytest

from headrace.lake.storage import hdfs
from tests.fakes.hdfs import NameNode


@pytest.fixture
def namenode(tmp_path, monkeypatch):
    made = NameNode(tmp_path / "hdfs")
    made.root.mkdir()
    monkeypatch.setattr(hdfs, "Client", made)
    hdfs._client.cache_clear()
    yield made
    hdfs._client.cache_clear()
