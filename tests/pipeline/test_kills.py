"""Compaction and replay killed at every named point, compared with undisturbed runs."""

import pytest

from headrace.pipeline import audit
from headrace.pipeline.tasks import LocalRunner
from tests.pipeline.export.exporter import exporters
from tests.pipeline.lakes import rows_of
from tests.pipeline.made import MadeLake
from tests.pipeline.replayed import payloads_of


@pytest.fixture
def made(tmp_path) -> MadeLake:
    lake = MadeLake(tmp_path / "lake")
    for number in range(6):
        lake.batch("a", "b", day=number // 3)
    return lake


def test_a_compaction_that_is_killed_again_and_again_keeps_every_row(made, tmp_path):
    undisturbed = made.copy(tmp_path / "undisturbed")
    given = {"job": "compact", "lake": str(made.path)}
    with exporters(tmp_path) as processes:
        for point in ("merging", "merged", "committed", "merging", "swept"):
            processes.kill_at(point, **given)
            assert rows_of(made.path) == rows_of(undisturbed.path), point
        processes.finish(**given)
        processes.finish(**given | {"lake": str(undisturbed.path)})
    assert rows_of(made.path) == rows_of(undisturbed.path)
    # Partitions have the same bytes: the name of a file ends with the checksum of its bytes.
    assert [name[-16:] for name in sorted(made.table.files())] == [
        name[-16:] for name in sorted(undisturbed.table.files())
    ]
    assert not audit(made.path, runner=LocalRunner()).lost


def test_a_replay_that_is_killed_again_and_again_publishes_every_record_once(
    server, made, tmp_path
):
    given = {"job": "replay", "lake": str(made.path), "topic": "a", "url": server.http_url}
    topics = f"{tmp_path.name}/killed", f"{tmp_path.name}/undisturbed"
    with exporters(tmp_path) as processes:
        # The first run decides the division into batches, here in steps of ten records.
        for point, rate in (("uploaded", 10), ("decided", 1e6), ("uploaded", 1e6)):
            processes.kill_at(point, **given, to=topics[0], rate=rate)
        for topic in topics:
            processes.finish(**given, to=topic, rate=1e6)
    killed, undisturbed = (payloads_of(server, topic) for topic in topics)
    assert killed == undisturbed == made.payloads["a"]
