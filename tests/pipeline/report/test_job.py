"""Reports on a real server's log and on its lake: the numbers are those of the published records."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from headrace.cli.main import main
from headrace.errors import HeadraceError
from headrace.pipeline.compact import compact
from headrace.pipeline.export.job import export
from headrace.pipeline.report.data import ReportData
from headrace.pipeline.report.job import report
from headrace.pipeline.tasks import LocalRunner
from headrace.testing import ServerProcess, wait_until
from tests.spark.support import SMALL, ask, publish, send, wait_applied

TOPICS = {f"topic {n:02}": [b"x" * (n + size) for size in range(60 - n)] for n in range(23)}
TOPICS["<b>&"] = [b"last but one", b""]
MESSAGES, DUPLICATES = 5, 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with topics, a slow reader, and a channel that has duplicates and was trimmed."""
    root = tmp_path_factory.mktemp("report")
    (root / "config.toml").write_text(SMALL)
    flags = (f"--config={root / 'config.toml'}", "--durability=written")
    with ServerProcess(root / "data", *flags) as process:
        for topic, payloads in TOPICS.items():
            publish(process.figg_url, topic, payloads)
        first = ask(process, "/v1/topic", name="topic 00")
        places = [{"topic": "topic 00", "epoch": first["epoch"], "offset": 4, "ordinal": 1}]
        send(process, "POST", "/v1/cursors", {"reader": "slow", "positions": places})
        _fill_channel(process)
        wait_applied(process, *TOPICS)
        yield process
        assert "Traceback" not in process.stderr, process.stderr


def _fill_channel(server: ServerProcess) -> None:
    with httpx.Client(base_url=server.http_url, timeout=30) as http:
        for processor in ("p", "q"):
            asked = {"name": "doc", "processor": processor}
            assert http.post("/v1/channel/join", params=asked).status_code == 200
        asked = {"name": "doc", "processor": "p"}
        for number in [*range(1, MESSAGES + 1), *range(1, DUPLICATES + 1)]:
            asked["number"] = str(number)
            last = http.post("/v1/channel/messages", params=asked, json={"n": number})
        for processor in ("p", "q"):
            asked = {"name": "doc", "processor": processor, "offset": last.json()["offset"]}
            assert http.post("/v1/channel/ack", params=asked).status_code == 200
    wait_until(lambda: _counter(server, "channels_trimmed") > 0, 120, "the channel to be trimmed")


def _counter(server: ServerProcess, name: str) -> int:
    lines = httpx.get(f"{server.http_url}/metrics").text.splitlines()
    [value] = [line.split()[1] for line in lines if line.startswith(f"headrace_{name}_total ")]
    return int(float(value))


def made(tmp_path: Path, **options: Any) -> ReportData:
    """Make a report without Spark, and read it from its JSON."""
    path = tmp_path / "report.json"
    report(tmp_path / "report.html", json=path, runner=LocalRunner(), **options)
    return msgspec.json.decode(path.read_bytes(), type=ReportData)


def check_topics(found: ReportData, topics: dict[str, list[bytes]]) -> None:
    assert found.topics_in_all == len(topics)
    assert found.messages == sum(map(len, topics.values()))
    assert found.bytes == sum(len(payload) for of in topics.values() for payload in of)
    for line in found.topics:
        payloads = topics[line.name]
        assert (line.messages, line.bytes) == (len(payloads), sum(map(len, payloads)))
        assert (sum(line.messages_over_time), sum(line.bytes_over_time)) == (
            line.messages,
            line.bytes,
        )


def test_a_report_from_the_command_line_through_spark(
    shared_spark: Any, server: ServerProcess, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page, data = tmp_path / "report.html", tmp_path / "report.json"
    flags = [
        f"--http={server.http_url}",
        f"--out={page}",
        f"--json={data}",
        "--pattern=topic .*|<b>&",
    ]
    with pytest.raises(SystemExit) as ended:
        main(["pipeline", "report", *flags])
    said = capfd.readouterr()
    assert ended.value.code == 0, said.err
    assert said.out.startswith(f"{page} and {data}: 1,129 messages (")
    assert " of 24 topics, " in said.out and said.out.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json"]
    found = msgspec.json.decode(data.read_bytes(), type=ReportData)
    check_topics(found, TOPICS)
    assert [line.name for line in found.topics[:3]] == ["topic 00", "topic 01", "topic 02"]
    assert len(found.topics) == 20 and found.others_in_all == 4
    seen = found.server
    assert seen is not None
    assert (seen.duplicates_refused, seen.channels_destroyed) == (DUPLICATES, 0)
    assert seen.channels_trimmed >= 1
    [reader] = seen.readers
    assert (reader.name, reader.lag_records, reader.slowest_topic) == ("slow", 59, "topic 00")
    assert (seen.channels.channels, seen.channels.trimmed) == (1, 1)
    assert {member.processor for member in seen.channels.members} == {"p", "q"}
    assert "slow</b> is furthest behind: 59 records" in page.read_text("utf-8")
    # The shared session still works for the next user.
    assert shared_spark.sparkContext.parallelize([1]).count() == 1


def test_files_and_server_give_the_same_report(server: ServerProcess, tmp_path: Path) -> None:
    over_http = made(tmp_path, url=server.http_url, topics=TOPICS)
    files = made(tmp_path, data_dir=str(server.data_dir), topics=TOPICS)
    check_topics(files, TOPICS)
    assert files.server is None and over_http.server is not None
    both = [msgspec.to_builtins(one) for one in (over_http, files)]
    for one in both:
        for differs in ("log", "made_ms", "server"):
            del one[differs]
    assert both[0] == both[1]


def test_what_the_lake_has_is_counted_once_and_outlives_the_log(
    server: ServerProcess, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    topics = {"lake/a": [b"x" * n for n in range(50)], "lake/b": [b"yy"] * 7}
    for topic, payloads in topics.items():
        publish(server.figg_url, topic, payloads)
    export(lake, url=server.http_url, pattern="lake/.*", once=True, runner=LocalRunner())
    asked = {"url": server.http_url, "pattern": "lake/.*", "lake": lake}
    found = made(tmp_path, **asked)
    check_topics(found, topics)
    assert not found.sizes_are_means
    assert {bar.least: bar.count for bar in found.sizes} == {
        0: 1,
        1: 1,
        2: 9,
        4: 4,
        8: 8,
        16: 16,
        32: 18,
    }
    for more in ([b"more"] * 3, [b"", b"and more"]):
        publish(server.figg_url, "lake/a", more)
        topics["lake/a"] += more
        check_topics(made(tmp_path, **asked), topics)
        export(lake, url=server.http_url, pattern="lake/.*", once=True, runner=LocalRunner())
    before = made(tmp_path, **asked)
    compacted = compact(lake, runner=LocalRunner())
    assert compacted.merged > 1
    after = made(tmp_path, **asked)
    assert (after.topics, after.sizes, after.pauses_ms) == (
        before.topics,
        before.sizes,
        before.pauses_ms,
    )
    httpx.delete(f"{server.http_url}/v1/topic", params={"name": "lake/b"}).raise_for_status()
    check_topics(made(tmp_path, **asked), topics)
    only = made(tmp_path, url=server.http_url, lake=lake, topics=["lake/b"])
    check_topics(only, {"lake/b": topics["lake/b"]})
    # Other tests use the same server.
    httpx.delete(f"{server.http_url}/v1/topic", params={"name": "lake/a"}).raise_for_status()


def unwritable(path: Path) -> dict[str, Any]:
    (path / "file").touch()
    return {"out": path / "file" / "report.html"}


def empty_lake(path: Path) -> dict[str, Any]:
    (path / "lake").mkdir()
    return {"out": path / "x", "lake": path / "lake"}


BAD: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "nowhere": (
        lambda path: {"out": path / "no" / "report.html"},
        "report.html cannot be written: No such file or directory",
    ),
    "unwritable": (unwritable, "report.html cannot be written: Not a directory"),
    "a directory": (lambda path: {"out": path}, " is a directory: name a file"),
    "the same file": (
        lambda path: {"out": path / "x", "json": path / "x"},
        "the page and the JSON cannot be the same file: name two files",
    ),
    "no topic": (
        lambda path: {"out": path / "x", "topics": ["gone"]},
        "there is no topic 'gone' to report on",
    ),
    "no directory": (
        lambda path: {"out": path / "x", "url": "", "data_dir": str(path / "no")},
        "is not a data directory of Headrace: there is no such directory",
    ),
    "no log": (
        lambda path: {"out": path / "x", "url": ""},
        "say where the log is: give a server's address or a data directory",
    ),
    "no lake": (
        lambda path: {"out": path / "x", "lake": path / "no"},
        "is not a lake of Headrace: it does not exist",
    ),
    "an empty lake": (
        empty_lake,
        "is not a lake of Headrace: there is no table in it",
    ),
    "topics and a pattern": (
        lambda path: {"out": path / "x", "topics": ["a"], "pattern": "b"},
        "topics and a pattern exclude each other: give one of them",
    ),
}


@pytest.mark.parametrize(("options", "sentence"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_sentence_and_nothing_is_written(
    server: ServerProcess,
    tmp_path: Path,
    options: Callable[[Path], dict[str, Any]],
    sentence: str,
) -> None:
    asked = {"url": server.http_url} | options(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(HeadraceError) as refused:
        report(asked.pop("out"), runner=LocalRunner(), **asked)
    assert sentence in str(refused.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_report_that_fails_leaves_the_last_one_alone(
    server: ServerProcess, tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    page.write_text("the last one")

    class Failing(LocalRunner):
        def run(self, *_: Any) -> Any:
            raise HeadraceError("no")

    with pytest.raises(HeadraceError, match="no"):
        report(page, url=server.http_url, runner=Failing())
    assert page.read_text() == "the last one"
    assert list(tmp_path.iterdir()) == [page]
