"""Flipped bits and truncated files of every kind: the rest is served, and no wrong data ever is.

The tests decide what may be missing from the published records and the place of the damage, not by asking the
server. A usual run damages files of most kinds in each way either after a stop or after a kill.
HEADRACE_TORTURE=N does both, with N / 20 times as many cases.
"""

import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headrace.testing import ServerProcess, wait_until
from tests.system.conftest import Start
from tests.system.figg import foreign as figg
from tests.system.figg.foreign import DATA, Wire
from tests.system.support import FailingServer, children, metrics, verify
from tests.tools import TORTURE

CASES = max(1, TORTURE // 20)
SEED = int(os.environ.get("HEADRACE_SEED", "1"))

# A journal file is full after 128 KiB and never closed by age, so that the last records stay in the journal.
CONFIG = """
[journal]
file_bytes = 131072
files = 3
rotate_s = 3600
commit_bytes_max = 32768
[segment]
bytes = 65536
"""

RUN_RECORDS_MAX = 500
MARKER = b"published after the damage"

KINDS = {
    "journal": "journal/*.journal",
    "segment": "segments/**/*.log",
    "index": "segments/**/*.idx",
    "catalogue": "catalogue.sqlite",
    "write-ahead log": "catalogue.sqlite-wal",
    "shared memory": "catalogue.sqlite-shm",
    "backup": "catalogue.backup.sqlite",
    "lock": "lock",
    "clock": "clock",
}


@dataclass
class Known:
    """A data directory, and the acknowledged records that were published to it."""

    path: Path
    records: dict[bytes, dict[int, bytes]] = field(default_factory=dict)  # topic -> start -> bytes

    def published(self, topic: bytes, payloads: list[bytes]) -> None:
        records = self.records.setdefault(topic, {})
        begin = max((b + 4 + len(data) for b, data in records.items()), default=0)
        for payload in payloads:
            records[begin] = payload
            begin += 4 + len(payload)


@pytest.fixture(scope="module", params=["stop", "kill"])
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Known:
    """Topics of different shapes; their first part is in segments, the rest in the journal."""
    directory = tmp_path_factory.mktemp(request.param)
    (directory / "config.toml").write_text(CONFIG)
    known = Known(directory / "data")
    chance = random.Random(SEED)
    with ServerProcess(known.path, f"--config={directory}/config.toml") as server:
        with Wire(server.figg) as wire:
            for part in range(12):
                for topic, count, size in [
                    (b"small", 600, 8),
                    (b"mixed", 60, 900),
                    (b"big", 1, 20_000),
                ]:
                    sizes = [chance.randrange(size) for _ in range(count)]
                    payloads = [
                        b"%d/%d/" % (part, i) + chance.randbytes(n) for i, n in enumerate(sizes)
                    ]
                    wire.publish(topic, *payloads)
                    known.published(topic, payloads)
        _wait_applied(known, server)
        if request.param == "stop":
            assert server.terminate() == 0
            # A server makes a backup from time to time, too rarely to wait for it here.
            shutil.copy(known.path / "catalogue.sqlite", known.path / "catalogue.backup.sqlite")
        else:
            wait_until((known.path / "clock").exists, 30, "the time to be saved")
            # An applier that sees the end of its server closes the catalogue, and SQLite removes two files.
            (applier,) = children(server.pid)
            os.kill(applier, signal.SIGSTOP)
            server.kill()
            os.kill(applier, signal.SIGKILL)
    return known


def _wait_applied(known: Known, server: ServerProcess) -> None:
    """Wait until segments hold all but the last journal file, which may not count yet while it is written."""
    wait_until(lambda: not metrics(server)["headrace_journal_files_waiting"], 30, "the applier")
    published = sum(4 + len(d) for records in known.records.values() for d in records.values())
    applied = sum(file.stat().st_size for file in known.path.glob("segments/**/*.log"))
    assert published - 131072 < applied < published


@dataclass
class Damaged:
    """A copy of the directory with one damaged file, and the offsets that may be missing."""

    known: Known
    path: Path
    kind: str
    file: Path
    position: int


def flip(damaged: Damaged, chance: random.Random) -> None:
    data = bytearray(damaged.file.read_bytes())
    damaged.position = _somewhere(data, chance)
    data[damaged.position] ^= 1 << chance.randrange(8)
    damaged.file.write_bytes(data)


def cut(damaged: Damaged, chance: random.Random) -> None:
    data = damaged.file.read_bytes()
    damaged.position = _somewhere(data, chance)
    damaged.file.write_bytes(data[: damaged.position])


def remove(damaged: Damaged, chance: random.Random) -> None:
    damaged.position = 0
    damaged.file.unlink()


def zero(damaged: Damaged, chance: random.Random) -> None:
    """Overwrite a sector with zeros, as after a lost write."""
    data = bytearray(damaged.file.read_bytes())
    damaged.position = _somewhere(data, chance) // 512 * 512
    data[damaged.position : damaged.position + 512] = bytes(len(data[damaged.position :][:512]))
    damaged.file.write_bytes(data)


def _somewhere(data: bytes | bytearray, chance: random.Random) -> int:
    """Return a position in the header, in bytes that are not zero, or anywhere."""
    where = chance.random()
    if where < 0.25:
        return chance.randrange(min(64, len(data)))
    if where < 0.75:
        first = chance.randrange(len(data))
        return next((i for i in range(first, len(data)) if data[i]), first)
    return chance.randrange(len(data))


HOW = [(flip, 2), (cut, 1), (zero, 1), (remove, 1)]


@pytest.mark.parametrize(
    ("how", "case"), [(how, case) for how, weight in HOW for case in range(weight * CASES)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_damage_takes_nothing_else_with_it(
    known: Known,
    start: Start,
    tmp_path: Path,
    kind: str,
    how: Callable[[Damaged, random.Random], None],
    case: int,
) -> None:
    end = known.path.parent.name[:4]
    if not (TORTURE or kind in ("journal", "segment") or end == end_of(kind, how.__name__, case)):
        pytest.skip("takes long: see `make torture`")
    chance = random.Random(f"{SEED} {end} {kind} {how.__name__} {case}")
    files = sorted(f for f in known.path.glob(KINDS[kind]) if f.stat().st_size)
    if not files:
        pytest.skip(f"does not apply: this directory has no {kind}")
    shutil.copytree(known.path, tmp_path / "data")
    file = tmp_path / "data" / chance.choice(files).relative_to(known.path)
    damaged = Damaged(known, tmp_path / "data", kind, file, 0)
    how(damaged, chance)
    print(f"{how.__name__} {file} at {damaged.position}")
    if kind == "clock" and how is not remove:
        assert "clock: the file is damaged" in verify(damaged.path).stdout
    server = start(config=CONFIG)
    missing = {}
    for topic in known.records:
        served = read_to_marker(server, topic)
        wrong = {begin for begin, data in served.items() if known.records[topic].get(begin) != data}
        assert not wrong, f"{topic!r}: other bytes than published at {sorted(wrong)[:5]}"
        lost = sorted(set(known.records[topic]) - set(served))
        if lost:
            missing[topic] = lost
    if kind == "clock" and how is not remove:
        assert "clock: the file is damaged" in server.stderr
    print("missing", {topic: (len(lost), lost[0], lost[-1]) for topic, lost in missing.items()})
    check_loss(damaged, how.__name__, missing)
    # Only at the end of the journal does damage look like a write that never finished.
    unfinished = kind == "journal" and all(
        max(lost) == max(known.records[topic]) for topic, lost in missing.items()
    )
    if missing and not unfinished:
        assert re.search("damage|quarantin", server.stderr, re.IGNORECASE), "lost without a word"


def end_of(kind: str, how: str, case: int) -> str:
    """Return how the server ended before this damage, in a usual run."""
    if kind == "backup":
        return "stop"  # a killed server has not made one yet
    if kind in ("write-ahead log", "shared memory"):
        return "kill"  # a stopped server leaves none
    ways = [name.__name__ for name, _ in HOW]
    return ("stop", "kill")[(list(KINDS).index(kind) + ways.index(how) + case) % 2]


def read_to_marker(server: ServerProcess, topic: bytes) -> dict[int, bytes]:
    """Return all records of the topic by start offset, up to a marker record that this function publishes."""
    with Wire(server.figg) as wire:
        wire.publish(topic, MARKER)
        wire.attach(topic, 0)
        served = {}
        last = 0
        while (message := wire.expect(DATA)).data != MARKER:
            assert message.number > last
            last = message.number
            served[message.number - 4 - len(message.data)] = message.data
        return served


def check_loss(damaged: Damaged, how: str, missing: dict[bytes, list[int]]) -> None:
    """Check that the damage explains the loss."""
    for topic, lost in missing.items():
        begins = sorted(damaged.known.records[topic])
        first = begins.index(lost[0])
        assert begins[first : first + len(lost)] == lost, "one damage, one hole"
    if damaged.kind == "journal":
        # Only records that were not in segments yet may be lost, and none after a clean stop.
        assert not missing or damaged.known.path.parent.name.startswith("kill")
        return
    if damaged.kind not in ("segment", "index"):
        assert not missing
        return
    assert len(missing) <= 1, "a file holds one topic"
    base, size = segment_of(damaged)
    for topic, lost in missing.items():
        records = damaged.known.records[topic]
        assert base <= lost[0], "before the damaged file"
        assert lost[-1] < base + size, "after the damaged file"
        if how == "flip":
            assert len(lost) <= RUN_RECORDS_MAX
        if damaged.kind == "segment":
            position = base + damaged.position
            if how == "flip":
                assert lost[0] <= position < lost[-1] + 4 + len(records[lost[-1]])
            before = [begin for begin in lost if begin + 4 + len(records[begin]) <= position]
            assert len(before) <= RUN_RECORDS_MAX, "before the run that is damaged"


def segment_of(damaged: Damaged) -> tuple[int, int]:
    """Return the first offset and the size, before the damage, of the segment that a file belongs to."""
    relative = damaged.file.relative_to(damaged.path).with_suffix(".log")
    return int(relative.stem.split("-")[1]), (damaged.known.path / relative).stat().st_size


@pytest.mark.parametrize(("block", "garbage"), [(0, False), (1, True)])
def test_a_bad_header_of_a_journal_file_costs_nothing(
    known: Known, start: Start, tmp_path: Path, block: int, garbage: bool
) -> None:
    shutil.copytree(known.path, tmp_path / "data")
    for file in _files(tmp_path / "data", "journal"):
        data = bytearray(file.read_bytes())
        data[4096 * block : 4096 * (block + 1)] = random.randbytes(4096) if garbage else bytes(4096)
        file.write_bytes(data)
    killed = known.path.parent.name.startswith("kill")
    assert verify(tmp_path / "data").returncode == killed
    server = start(config=CONFIG)
    for topic, records in known.records.items():
        assert read_to_marker(server, topic) == records
    assert ("a copy of the file's header is damaged" in server.stderr) is killed


def test_a_sound_directory_verifies(known: Known, tmp_path: Path) -> None:
    shutil.copytree(known.path, tmp_path / "data")
    found = verify(tmp_path / "data")
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("case", range(CASES))
@pytest.mark.parametrize("kind", ["segment", "index"])
def test_verify_finds_a_flipped_bit(known: Known, tmp_path: Path, kind: str, case: int) -> None:
    chance = random.Random(f"{SEED} verify {kind} {case}")
    shutil.copytree(known.path, tmp_path / "data")
    file = chance.choice(sorted((tmp_path / "data").glob(KINDS[kind])))
    damaged = Damaged(known, tmp_path / "data", kind, file, 0)
    flip(damaged, chance)
    print(f"{file} at {damaged.position}")
    found = verify(tmp_path / "data")
    assert found.returncode == 1, found.stdout + found.stderr
    assert found.stdout + found.stderr


def test_every_kind_of_file_is_damaged_here(known: Known) -> None:
    """A new kind of file must be added to KINDS."""
    # A file whose creation was killed is written again by the next start.
    there = {f for f in known.path.rglob("*") if f.is_file() and f.suffix != ".new"}
    assert there == {f for pattern in KINDS.values() for f in known.path.glob(pattern)}


def test_a_damaged_server_keeps_what_is_published_afterwards(
    known: Known, start: Start, tmp_path: Path
) -> None:
    shutil.copytree(known.path, tmp_path / "data")
    chance = random.Random(SEED)
    for kind in ("segment", "index", "catalogue"):
        flip(Damaged(known, tmp_path, kind, _first(tmp_path / "data", kind), 0), chance)
    server = start(config=CONFIG)
    for _ in range(3):
        with Wire(server.figg) as wire:
            end = wire.attach(b"small")
        with Wire(server.figg) as wire:
            wire.publish(b"small", *[b"x" * 100] * 100)
        server.kill()
        server.start()
        with Wire(server.figg) as wire:
            wire.send(figg.attach(b"small", end))
            assert wire.expect(figg.ATTACHED).number == end
            assert [m.data for m in wire.expect_data(100)] == [b"x" * 100] * 100


def _first(path: Path, kind: str) -> Path:
    return next(iter(_files(path, kind)))


def _files(path: Path, kind: str) -> Iterator[Path]:
    return iter(sorted(path.glob(KINDS[kind])))


def test_errors_of_the_disk_that_pass_are_no_damage(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.replace("3600", "0.1"))
    payloads = [b"%d" % number * 200 for number in range(200)]
    with FailingServer(
        tmp_path / "data", f"--config={config}", inject="preadv2:error=EIO:when=2+20"
    ) as server:
        with figg.Client(server.figg) as client:
            for payload in payloads:
                client.publish(b"t", payload, 30)
            client.flush(30)
        idle = "headrace_journal_files_waiting"
        segments = server.data_dir / "segments"
        wait_until(lambda: any(segments.glob("*/*.log")) and not metrics(server)[idle], 20)
        with Wire(server.figg) as wire:
            wire.send(figg.attach(b"t", 0))
            wire.expect(figg.ATTACHED)
            assert [wire.expect(DATA).data for _ in payloads] == payloads
        assert "damage" not in server.stderr
        assert "Traceback" not in server.stderr
