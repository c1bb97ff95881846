"""The Python code of docs/pipeline.md, run in order as a reader would; the page names every setting."""

import re
from pathlib import Path
from typing import Any

from headrace import connect_blocking
from headrace.cli.pipeline.options import updated
from headrace.config.load import SETTINGS
from headrace.config.pipeline import JOBS
from tests.spark.test_docs import examples, run

GUIDE = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text("utf-8")


def test_the_guide_does_what_it_says(server, shared_spark, tmp_path, capfd):
    assert shared_spark
    with connect_blocking(server.figg_url) as client:
        for payload in (b"one", b"two", b"three"):
            client.publish("orders", payload)
        client.publish("events", b'{"id": 1, "tags": ["new", "large"]}')
    names: dict[str, Any] = {}
    for code in examples(GUIDE):
        run(code, server, tmp_path / "lake", names)
    shown = capfd.readouterr().out
    assert "3 records of 1 topics in 1 batches" in shown
    assert "[('orders', 3)]" in shown


def test_the_guide_names_every_setting():
    named = set(re.findall(r"`(pipeline\.\w+)`", GUIDE))
    assert {key for key in SETTINGS if key.startswith("pipeline.")} <= named


def test_the_guide_has_the_options_of_every_job():
    """If this fails, run `make docs`."""
    assert re.findall(r"<!-- options of (\w+):", GUIDE) == list(JOBS)
    assert updated(GUIDE) == GUIDE
