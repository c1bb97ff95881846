"""Lakes made by hand: batches as an export leaves them, without a log and without Spark."""

import random
import shutil
from pathlib import Path

from headrace.lake.delta import DeltaLake
from headrace.lake.format import File, Manifest
from headrace.lake.manifests import Manifests
from headrace.model import Position
from headrace.pipeline.export import _CRC_KEY as CRC_KEY
from headrace.pipeline.export import APP
from tests.lake.rows import DAY_MS, NOON_MS, rows, write

EPOCH = 1


class MadeLake:
    """Of topics whose records get offsets, ordinals and times as the log gives them."""

    def __init__(self, path: Path, *, by_topic: bool = False) -> None:
        self.path = path
        self.table = DeltaLake.make(path, by_topic=by_topic)
        self.payloads: dict[str, list[bytes]] = {}
        self._number = 0
        self._chance = random.Random(7)

    def copy(self, path: Path) -> "MadeLake":
        shutil.copytree(self.path, path)
        made = MadeLake(path, by_topic=self.table.by_topic)
        made.payloads = {topic: list(known) for topic, known in self.payloads.items()}
        made._number = self._number
        return made

    def batch(self, *topics: str, count: int = 5, day: int = 0) -> list[str]:
        """Another one, with so many records for each topic; its files."""
        start, end, some = {}, {}, []
        for topic in sorted(topics):
            known = self.payloads.setdefault(topic, [])
            offset = sum(4 + len(payload) for payload in known)
            new = [
                b"%s %d " % (topic.encode(), len(known) + n) + self._chance.randbytes(n * 10)
                for n in range(count)
            ]
            ms = [NOON_MS + day * DAY_MS + self._number] * count
            some.append(rows(topic, new, offset=offset, ordinal=len(known), epoch=EPOCH, ms=ms))
            start[topic] = Position(EPOCH, offset, len(known))
            known += new
            size = sum(4 + len(payload) for payload in new)
            end[topic] = Position(EPOCH, offset + size, len(known))
        files = write(self.path, *some, by_topic=self.table.by_topic)
        manifest = Manifest(
            number=self._number,
            start=start,
            end=end,
            files=tuple(File(one.path, one.bytes, one.rows) for one in files),
            ranges=tuple(
                one._replace(file=place) for place, file in enumerate(files) for one in file.ranges
            ),
        )
        Manifests(self.path).write(manifest)
        noted = {CRC_KEY: str(manifest.crc)}
        assert self.table.commit(APP, self._number, files, noted)
        self._number += 1
        return [one.path for one in files]
