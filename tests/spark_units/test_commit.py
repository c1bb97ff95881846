"""The sink's reaction to the server's answers to a batch."""

import json
import logging

import pytest
from pyspark.sql.types import StructType

from headrace.errors import SinkError
from headrace.spark.options import parse_sink
from headrace.spark.sink import StreamWriter, TaskUpload
from tests.reader.test_http_client import Serve, serve

__all__ = ["serve"]


def answer(status: int = 200, **fields: object) -> bytes:
    body = json.dumps({"producer": "p", "number": 3, **fields}).encode()
    return b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


PENDING = answer(202, pending=True)
WRITTEN = {"duplicate": False, "records": 2, "damaged": 0}


def commit(url: str, query: str = "", **given: str) -> None:
    given = given or {"producer": "p"}
    options = parse_sink({"url": url, "topic": "t"} | given, streaming=True)
    schema = StructType().add("payload", "binary")
    uploads = [TaskUpload(["a"], query), None, TaskUpload(["b"], query)]
    StreamWriter(options, schema, overwrite=False).commit(uploads, 3)


def test_a_commit_that_takes_long_is_asked_for_until_it_is_done(serve: Serve, caplog) -> None:
    commit(serve(PENDING, PENDING, answer(**WRITTEN)))
    commit(serve(PENDING, answer(**WRITTEN | {"duplicate": True, "records": 0})))
    assert not caplog.records


def test_rows_that_are_skipped_are_told(serve: Serve, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        commit(serve(answer(**WRITTEN | {"duplicate": True, "records": 0})))
    assert 'batch 3 of producer "p" was written before: its rows are skipped' in caplog.text


def test_rows_that_the_server_has_lost_are_an_error(serve: Serve) -> None:
    with pytest.raises(SinkError, match="2 parts of it were damaged"):
        commit(serve(answer(**WRITTEN | {"damaged": 2})))


def test_a_stream_is_never_taken_for_another_one() -> None:
    with pytest.raises(SinkError, match="give it a name with producer"):
        commit("http://127.0.0.1:1", topic="t")
