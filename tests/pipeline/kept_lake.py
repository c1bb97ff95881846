"""Pack lakes of a version that named channels `channel/…` and Logux logs `logux/…`, with their log.

    python -m tests.pipeline.kept_lake tests/pipeline/old_names.tar.xz

was run with the last such version. The archive has the data directory and two lakes of different formats.
Each lake has three batches, two of which are compacted. For the first lake, jobs have made the rows without
duplicates and the states.
"""

import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from headrace.pipeline.aggregate.job import aggregate
from headrace.pipeline.compact import compact
from headrace.pipeline.dedupe.job import dedupe
from headrace.pipeline.export.job import export
from headrace.pipeline.tasks import LocalRunner
from headrace.testing import ServerProcess
from tests.fakes.store import block
from tests.log.old_versions.kept_format import _anonymous
from tests.log.old_versions.kept_names import Api, event

FLAGS = [f"--set={one}" for one in ("journal.file_bytes=65536", "journal.files=2")]
LAKES = {"delta": {"format": "delta"}, "parquet": {"format": "parquet", "by_topic": True}}


def write(api: Api, number: int) -> None:
    """Write two messages, an event, and a record to a topic on either side of these names."""
    api.send("room", 2 * number + 1)
    api.send("room", 2 * number + 2)
    topics = (("logux/main", event(number)), ("zebra", b"z%d" % number), ("apple", b"a"))
    api.write("etl", number, *(block(topic, [payload]) for topic, payload in topics))


def main() -> None:
    with TemporaryDirectory() as scratch:
        root = Path(scratch)
        with (
            ServerProcess(root / "data", *FLAGS) as server,
            httpx.Client(base_url=server.http_url) as client,
        ):
            api = Api(client)
            api.join("room", "a", "b")
            for number in range(3):
                write(api, number)
                for name, given in LAKES.items():
                    export(
                        root / name,
                        url=server.http_url,
                        take_over=True,
                        runner=LocalRunner(),
                        **given,
                    )
                    if number == 1:
                        compact(root / name, runner=LocalRunner())
            dedupe(root / "delta", root / "deduped", payload=True, runner=LocalRunner())
            aggregate(root / "delta", root / "states", reducer="count", runner=LocalRunner())
            server.terminate()
        with tarfile.open(sys.argv[1], "w:xz", preset=9) as archive:
            for name in ("data", *LAKES, "deduped", "states"):
                archive.add(root / name, name, filter=_anonymous)


if __name__ == "__main__":
    main()
