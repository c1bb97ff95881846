"""Lakes made by hand: batches as an export leaves them, without a log and without Spark."""

import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.lake.format import File, Manifest, Shape
from headrace.lake.manifests import Manifests
from headrace.lake.storage.storage import storage_of
from headrace.lake.table import make_table
from headrace.model import Position
from headrace.pipeline.job import EXPORT_APP as APP
from tests.lake.rows import DAY_MS, NOON_MS, rows, write

EPOCH = 1


class MadeLake:
    """Lake of topics whose records get offsets, ordinals and times as the log assigns them."""

    def __init__(self, path: Path, *, by_topic: bool = False, kind: str = "delta") -> None:
        self.path = path
        self.table = make_table(storage_of(path), kind, Shape(by_topic))
        self.payloads: dict[str, list[bytes]] = {}
        self._number = 0
        self._chance = random.Random(7)

    def copy(self, path: Path) -> "MadeLake":
        shutil.copytree(self.path, path)
        made = MadeLake(path, by_topic=self.table.shape.by_topic)
        made.payloads = {topic: list(known) for topic, known in self.payloads.items()}
        made._number = self._number
        return made

    def batch(self, *topics: str, count: int = 5, day: int = 0) -> list[str]:
        """Add a batch with `count` records for each topic, and return its files."""
        payloads = {}
        for topic in sorted(topics):
            known = len(self.payloads.get(topic, ()))
            payloads[topic] = [
                b"%s %d " % (topic.encode(), known + n) + self._chance.randbytes(n * 10)
                for n in range(count)
            ]
        return self.add(payloads, NOON_MS + day * DAY_MS + self._number)

    def add(self, payloads: Mapping[str, Sequence[bytes]], ms: int) -> list[str]:
        """Add a batch of these records, all with the same time, and return its files."""
        start, end, some = {}, {}, []
        for topic, new in sorted(payloads.items()):
            known = self.payloads.setdefault(topic, [])
            offset = sum(4 + len(payload) for payload in known)
            times = [ms] * len(new)
            some.append(rows(topic, new, offset=offset, ordinal=len(known), epoch=EPOCH, ms=times))
            start[topic] = Position(EPOCH, offset, len(known))
            known += new
            size = sum(4 + len(payload) for payload in new)
            end[topic] = Position(EPOCH, offset + size, len(known))
        files = write(
            self.path, *some, by_topic=self.table.shape.by_topic, layout=self.table.layout
        )
        manifests = Manifests(storage_of(self.path))
        before = manifests.predecessors(self.table.last(APP))
        manifest = Manifest(
            number=self._number,
            start=start,
            end=end,
            files=tuple(File(one.path, one.bytes, one.rows) for one in files),
            ranges=tuple(
                one._replace(file=place) for place, file in enumerate(files) for one in file.ranges
            ),
            merged=before.merged,
            since=before.since,
        )
        manifests.write(manifest)
        assert self.table.commit(APP, self._number, files, manifest.crc)
        self._number += 1
        return [one.path for one in files]
