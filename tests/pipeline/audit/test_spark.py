"""Audits from the command line: of a real server, running and stopped, with real Spark."""

import importlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import main
from headrace.pipeline import export
from headrace.pipeline.audit.job import audit
from headrace.pipeline.tasks import LocalRunner
from headrace.testing import ServerProcess
from tests.spark.support import publish, wait_applied

SIZES = (0, 1, 30, 30, 30, 300, 3000)


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["pipeline", "audit", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_running_server_and_its_lake_from_the_command_line(
    own_server: ServerProcess, shared_spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(3)
    payloads = [chance.randbytes(chance.choice(SIZES)) for _ in range(800)]
    publish(own_server.figg_url, "orders", payloads)
    publish(own_server.figg_url, "ü", payloads[:9])
    lake = tmp_path / "lake"
    export(lake, url=own_server.http_url, part_bytes=50_000, runner=LocalRunner())
    publish(own_server.figg_url, "orders", [b"not in the lake yet"])
    wait_applied(own_server, "orders", "ü")
    data = own_server.data_dir
    end = sum(4 + len(payload) for payload in payloads)

    assert run("orders", "--lake", lake, "--data-dir", data) == 0
    assert capsys.readouterr().out == (
        f"nothing lost: orders: lake offsets 0 to {end}, log offsets 0 to {end + 23}, "
        "ordinals 0 to 801\n"
    )
    assert run("--lake", lake, "--http", own_server.http_url, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert [topic["compared_bytes"] for topic in said["topics"]][:1] == [end]
    assert "its catalogue and its journal were not looked at" in said["notes"][0]

    copy = tmp_path / "copy"
    own_server.terminate()
    shutil.copytree(data, copy, ignore=shutil.ignore_patterns("*-shm", "lock"))
    segment = max(copy.glob("segments/*/*.log"), key=lambda path: path.stat().st_size)
    flip(segment, segment.stat().st_size // 2)
    assert run("--lake", lake, "--data-dir", copy) == 1
    first, *_, verdict = capsys.readouterr().out.splitlines()
    assert first.startswith("damaged: topic orders, epoch ")
    assert f"{segment.relative_to(copy)}: the checksum is wrong; the lake has these" in first
    assert verdict == "lost: 1 damaged"

    assert run("--lake", tmp_path / "none", "--data-dir", data) == 1
    assert "it does not exist" in capsys.readouterr().err
    assert run("--http", own_server.http_url, "--data-dir", data) == 2
    assert "exclude each other" in capsys.readouterr().err


def test_where_no_data_directory_is_the_server_is_asked(
    own_server: ServerProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[dict[str, Any]] = []

    def here(**given: Any) -> Any:
        asked.append(given)
        return audit(**given, runner=LocalRunner())

    monkeypatch.setattr(importlib.import_module("headrace.pipeline"), "audit", here)
    publish(own_server.figg_url, "orders", [b"one"])
    wait_applied(own_server, "orders")
    address = own_server.http_url.removeprefix("http://")
    config = tmp_path / "audit.toml"
    config.write_text(f'data_dir = "{tmp_path / "nowhere"}"\n[listen]\nhttp = "{address}"\n')
    assert run("--config", config) == 0
    said = capsys.readouterr()
    assert "nothing lost: orders: log offsets 0 to 7" in said.out
    assert said.err == (
        f"headrace: there is no directory {tmp_path / 'nowhere'} here: reading the log from "
        f"{own_server.http_url}\n"
    )
    # An existing directory gives more information. A directory that is named on the command line has to
    # exist.
    config.write_text(f'data_dir = "{own_server.data_dir}"\n')
    assert run("--config", config) == 0
    assert (asked[-1]["url"], str(asked[-1]["data_dir"])) == ("", str(own_server.data_dir))
    assert run("--config", config, "--data-dir", tmp_path / "nowhere") == 1
    assert (asked[-1]["url"], str(asked[-1]["data_dir"])) == ("", str(tmp_path / "nowhere"))


def test_damage_that_a_server_serves_is_found(own_server: ServerProcess) -> None:
    publish(own_server.figg_url, "t", [bytes([number]) * 300 for number in range(200)])
    wait_applied(own_server, "t")
    segment = next(own_server.data_dir.glob("segments/*/*.log"))
    flip(segment, 1000)
    (one,) = audit(url=own_server.http_url, runner=LocalRunner()).all_findings()
    assert (one.kind, one.topic, one.reason) == ("damaged", "t", "the checksum is wrong")
    assert one.range is not None
    assert one.range.offset <= 1000 < one.range.end
