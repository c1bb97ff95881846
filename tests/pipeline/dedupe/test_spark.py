"""Deduplication as a command, on Spark: of records that a publisher resent after the server was killed."""

import json

from headrace import connect_blocking
from headrace.cli.main import app
from tests.pipeline.lakes import rows_of


def publish(server, orders):
    with connect_blocking(server.figg_url) as client:
        for order in orders:
            client.publish_nowait("orders", json.dumps(order).encode())
        client.flush(60)


def test_what_was_sent_again_is_one_row(own_server, shared_spark, tmp_path, capsys):
    assert shared_spark

    def said(*command):
        app(["pipeline", *map(str, command)], standalone_mode=False)
        return capsys.readouterr().out

    lake, into = tmp_path / "lake", tmp_path / "into"
    command = ["dedupe", "--lake", lake, "--into", into, "--json-path", "$.id"]
    orders = [{"id": number, "try": 1} for number in range(300)]
    publish(own_server, orders)
    own_server.kill()
    own_server.restart()
    # The publisher has received only the first hundred acknowledgements.
    publish(own_server, [{**order, "try": 2} for order in orders[100:]])
    said("export", "--lake", lake, "--once", "--http", own_server.http_url)
    assert said(*command) == f"kept 300 of 500 rows of 1 topic in {into}\n"
    publish(own_server, [*orders[200:], {"id": 300, "try": 1}, {"no": "id"}])
    said("export", "--lake", lake, "--once", "--http", own_server.http_url)
    said("compact", "--lake", lake)
    assert said(*command) == f"kept 2 of 102 rows of 1 topic in {into}; 1 without a key\n"
    assert said(*command) == f"nothing new for {into}\n"
    found = [json.loads(row.payload) for row in rows_of(into)]
    assert found == [*orders, {"id": 300, "try": 1}, {"no": "id"}]
    assert {*rows_of(into)} <= {*rows_of(lake)}
