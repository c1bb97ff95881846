"""No command and no function of Python sends a token without TLS to another machine, unless it is told to.

Only loopback can be reached in a test, so loopback counts as another machine here. Proxies in front of a real
server keep what is sent.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType
from typer.main import get_command

import headrace
from headrace import channels, pipeline, tokens
from headrace.cli.main import app, main
from headrace.errors import HeadraceError, OptionError, RefusedError
from headrace.pipeline.job import JobArguments
from headrace.pipeline.tasks import LocalRunner
from headrace.reader.upload import encode_batch, upload
from headrace.reader.view import parse_place
from headrace.spark.options import parse_sink
from headrace.spark.sink import TaskUpload
from headrace.spark.source import HeadraceSource
from headrace.testing import ServerProcess, wait_until
from tests.fakes.recorder import Recorder

TOKEN = "hr_a_token_that_nobody_else_may_read"
TOPIC = "in-clear"

OVERRIDE = re.compile(r"is not sent to 127\.0\.0\.1 without TLS.*--insecure-token")


class Place(NamedTuple):
    """The server behind proxies, and a lake with its topic."""

    figg: Recorder
    ws: Recorder
    http: Recorder
    data_dir: str
    lake: str
    out: str
    token_file: str

    @property
    def proxies(self) -> tuple[Recorder, ...]:
        return self.figg, self.ws, self.http

    @property
    def urls(self) -> dict[str, str]:
        return {
            "figg": f"figg://{self.figg.host}",
            "wombat": f"wombat://{self.ws.host}",
            "ws": f"ws://{self.ws.host}",
            "http": f"http://{self.http.host}",
            "lake": self.lake,
            "out": self.out,
            "file": self.token_file,
        }


@pytest.fixture(scope="module")
def lake(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> str:
    with headrace.connect_blocking(server.figg_url) as client:
        client.publish(TOPIC, b"payload")
    made = str(tmp_path_factory.mktemp("lake") / "lake")
    pipeline.export(made, [TOPIC], url=server.http_url, runner=LocalRunner())
    return made


@pytest.fixture
def place(
    server: ServerProcess, lake: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    monkeypatch.setattr(tokens, "_is_loopback", lambda host: False)
    monkeypatch.setattr(JobArguments, "task_runner", lambda self, name: LocalRunner())
    monkeypatch.setenv("HEADRACE_TOKEN", TOKEN)
    for name in ("HEADRACE_URL", "HEADRACE_HTTP", "HEADRACE_WS", "HEADRACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token").write_text(TOKEN)
    with Recorder(server.figg) as figg, Recorder(server.ws) as ws, Recorder(server.http) as http:
        paths = (server.data_dir, lake, tmp_path / "out", tmp_path / "token")
        yield Place(figg, ws, http, *map(str, paths))


# Commands

COMMANDS = [
    f"publish {TOPIC} data --url FIGG",
    f"publish {TOPIC} data --url WOMBAT",
    f"subscribe {TOPIC} --from-start --url FIGG",
    f"subscribe {TOPIC} --until-end --http HTTP",
    f"subscribe {TOPIC} --from-start --url WOMBAT",
    "topics --http HTTP",
    "status --http HTTP",
    "status --health --http HTTP",
    f"inspect {TOPIC} --http HTTP",
    f"delete {TOPIC} --yes --http HTTP",
    f"trace --topic {TOPIC} --http HTTP",
    "channels --http HTTP",
    "channels explain room --http HTTP",
    "channels keep room --http HTTP",
    "channels destroy room --yes --http HTTP",
    "channels send room data --as me --http HTTP",
    "channels follow room --as me --http HTTP",
    "channels fetch room --as me --http HTTP",
    'logux add main {"type":"a"} --ws WS',
    "logux follow main --from-start --url FIGG",
    "clock --http HTTP",
    "clock confirm --http HTTP",
    f"pipeline export {TOPIC} --once --lake LAKE --http HTTP",
    f"pipeline aggregate {TOPIC} --lake LAKE --reducer last --into OUT --http HTTP",
    f"pipeline aggregate {TOPIC} --stream --reducer last --into OUT --http HTTP",
    f"pipeline replay {TOPIC} --to again --lake LAKE --http HTTP",
    f"pipeline report {TOPIC} --out OUT --http HTTP",
    f"pipeline audit {TOPIC} --http HTTP",
    f"pipeline audit {TOPIC} --lake LAKE --http HTTP",
]

WITHOUT_TOKEN = """
    serve verify backup restore config doctor man help logux token pipeline
    token create|token list|token revoke|token prune|pipeline compact|pipeline dedupe
"""
"""Commands that ask no server."""


def commands(group: Any, path: str = "") -> Iterator[tuple[str, set[str]]]:
    """Yield each command with its flags."""
    for name, one in group.commands.items():
        here = f"{path} {name}".strip()
        yield here, {flag for parameter in one.params for flag in parameter.opts}
        if hasattr(one, "commands"):
            yield from commands(one, here)


def test_every_command_that_takes_a_token_has_a_row() -> None:
    flags = dict(commands(get_command(app)))
    with_token = {name for name, some in flags.items() if "--token" in some}
    lines = [line.split(" --")[0] for line in COMMANDS]
    named = {
        max((name for name in flags if f"{line} ".startswith(f"{name} ")), key=len)
        for line in lines
    }
    assert named == with_token
    single, pairs = WITHOUT_TOKEN.strip().splitlines()
    assert flags.keys() - with_token == {*single.split(), *pairs.strip().split("|")}
    for name in with_token:
        assert {"--token-file", "--insecure-token", "--ca"} <= flags[name], name


def words_of(line: str, place: Place) -> list[str]:
    return [place.urls[word.lower()] if word.isupper() else word for word in line.split()]


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_sends_no_token_in_clear(
    place: Place, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        place.urls.get(word.lower(), word) if word.isupper() else word for word in line.split()
    ]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code in (1, 2)
    said = capsys.readouterr().err
    assert re.fullmatch(r"headrace: [^\n]+\n", said), said
    assert OVERRIDE.search(said), said
    assert_kept_to_itself(place)


def assert_kept_to_itself(place: Place) -> None:
    def is_over() -> bool:
        ended = [proxy.ended for proxy in place.proxies]
        return any(ended) and ended == [len(proxy.sent) for proxy in place.proxies]

    wait_until(is_over, what="the end of the connections")
    assert not any(proxy.has_seen(TOKEN.encode()) for proxy in place.proxies)


@pytest.mark.parametrize(
    "line",
    [
        f"publish {TOPIC} data --url FIGG",
        f"publish {TOPIC} data --url WOMBAT",
        'logux add main {"type":"a"} --ws WS',
        "topics --http HTTP",
        f"pipeline audit {TOPIC} --http HTTP",
        f"pipeline audit {TOPIC} --token-file FILE --http HTTP",
    ],
)
def test_a_command_sends_it_when_it_is_told_to(
    place: Place, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "FILE" in line:
        monkeypatch.delenv("HEADRACE_TOKEN")
    words = [
        place.urls.get(word.lower(), word) if word.isupper() else word for word in line.split()
    ]
    with pytest.raises(SystemExit):
        main([*words, "--insecure-token"])
    wait_until(
        lambda: any(proxy.has_seen(TOKEN.encode()) for proxy in place.proxies), what="the token"
    )


# Functions of Python

SPARK = {"token": TOKEN, "subscribe": TOPIC}
PAYLOADS = StructType().add("payload", "binary")


def read(place: Place, **more: str) -> None:
    options = {**SPARK, "url": place.urls["http"], **more}
    HeadraceSource(options).reader(PAYLOADS).partitions()


def stream(place: Place) -> None:
    reader = HeadraceSource({**SPARK, "url": place.urls["http"]}).streamReader(PAYLOADS)
    try:
        reader.initialOffset()
    finally:
        reader.stop()


def write(place: Place, **more: str) -> list[str]:
    """Upload a row as a task of the sink does."""
    options = {"token": TOKEN, "topic": TOPIC, "url": place.urls["http"], **more}
    sink = parse_sink(options, streaming=False)
    return upload(sink.place, encode_batch(TOPIC, pa.array([b"x"])))


def commit(place: Place) -> None:
    """Append an upload as the driver of the sink does."""
    options = {"token": TOKEN, "producer": "p", "topic": TOPIC, "url": place.urls["http"]}
    writer = HeadraceSource(options).streamWriter(PAYLOADS, overwrite=False)
    writer.commit([TaskUpload(["upload"], "query")], 0)


def ask(place: Place, **more: Any) -> None:
    from headrace.reader.server import ServerLog

    with closing(ServerLog(parse_place(place.urls["http"], TOKEN, **more))) as log:
        log.topics(None)


def given(place: Place) -> dict[str, Any]:
    return {"url": place.urls["http"], "token": TOKEN}


FUNCTIONS: dict[str, Callable[[Place], object]] = {
    "connect figg": lambda at: headrace.connect_blocking(at.urls["figg"], token=TOKEN),
    "connect wombat": lambda at: headrace.connect_blocking(at.urls["wombat"], token=TOKEN),
    "join": lambda at: channels.join_blocking(
        f"channel://{at.ws.host}/room", processor="me", token=TOKEN
    ),
    "connect channels": lambda at: channels.connect_blocking(
        f"channel://{at.ws.host}", processor="me", token=TOKEN
    ),
    "Spark source": read,
    "Spark stream": stream,
    "Spark sink, task": write,
    "Spark sink, driver": commit,
    "ServerLog": ask,
    "export": lambda at: pipeline.export(at.out, [TOPIC], **given(at)),
    "export, which only tells the server": lambda at: pipeline.export(
        at.lake, [TOPIC], data_dir=at.data_dir, **given(at)
    ),
    "aggregate": lambda at: pipeline.aggregate(
        at.lake, at.out, [TOPIC], reducer="last", **given(at)
    ),
    "aggregate_stream": lambda at: pipeline.aggregate_stream(
        at.out, [TOPIC], reducer="last", **given(at)
    ),
    "replay": lambda at: pipeline.replay(at.lake, TOPIC, "again", **given(at)),
    "report": lambda at: pipeline.report(at.out, [TOPIC], **given(at)),
    "audit": lambda at: pipeline.audit(topics=[TOPIC], **given(at)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_sends_no_token_in_clear(place: Place, name: str) -> None:
    with pytest.raises(HeadraceError) as caught:
        FUNCTIONS[name](place)
    assert isinstance(caught.value, OptionError | RefusedError)
    assert OVERRIDE.search(str(caught.value))
    assert_kept_to_itself(place)


@pytest.mark.parametrize(
    "send",
    [
        lambda at: read(at, insecureToken="true"),
        lambda at: write(at, insecureToken="true"),
        lambda at: ask(at, insecure_token=True),
        lambda at: pipeline.audit(topics=[TOPIC], insecure_token=True, **given(at)),
    ],
)
def test_a_function_sends_it_when_it_is_told_to(
    place: Place, send: Callable[[Place], object]
) -> None:
    send(place)
    wait_until(lambda: place.http.has_seen(TOKEN.encode()), what="the token")
