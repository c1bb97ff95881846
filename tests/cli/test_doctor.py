"""`headrace doctor`: what each check makes of a machine, and the command on this machine."""

import errno
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli import doctor
from headrace.cli.doctor import (
    Level,
    examine,
    judge_clock,
    judge_file_system,
    judge_files,
    judge_flush,
    judge_space,
)
from headrace.config.load import load
from tests.certificates import Authority

NOW_S = 1_800_000_000.0


def findings_of(data_dir: Path, **flags: object) -> dict[str, doctor.Finding]:
    flags = {
        "listen.figg": "127.0.0.1:0",
        "listen.ws": "127.0.0.1:0",
        "listen.http": "127.0.0.1:0",
    } | flags
    config = load({"data_dir": str(data_dir), **flags}, {}).config
    return {one.subject: one for one in examine(config)}


@pytest.mark.parametrize(
    ("finding", "level", "advice"),
    [
        (judge_flush(5e-6), Level.PROBLEM, "a power failure would lose acknowledged records"),
        (judge_flush(2e-4), Level.OK, "200 µs"),
        (judge_flush(0.05), Level.WARNING, "20 messages a second at most"),
        (judge_file_system("tmpfs"), Level.PROBLEM, "a reboot loses every record"),
        (judge_file_system("nfs4"), Level.WARNING, "Choose a local disk"),
        (judge_file_system("ext4"), Level.OK, "ext4"),
        (judge_files(1024, 10_768), Level.WARNING, "LimitNOFILE=10768"),
        (judge_files(-1, 10_768), Level.OK, "any number of files"),
        (judge_space(1 << 20, 1 << 28), Level.PROBLEM, "journal.file_bytes lower"),
        (judge_space(1 << 29, 1 << 28), Level.WARNING, "retention.bytes"),
        (judge_space(1 << 40, 1 << 28), Level.OK, "1.0 TiB are free"),
        (judge_clock(0.0, synchronised=True), Level.PROBLEM, "1970-01-01"),
        (judge_clock(NOW_S, synchronised=False), Level.WARNING, "chrony"),
        (judge_clock(NOW_S, synchronised=None), Level.OK, "2027"),
    ],
)
def test_each_check_says_what_to_change(finding, level, advice):
    assert finding.level is level
    assert advice in finding.text


def test_a_new_directory_is_examined_where_it_will_be_and_nothing_is_left(tmp_path):
    found = findings_of(tmp_path / "not" / "yet")
    assert found["data directory"].level is Level.OK
    assert "the server creates it" in found["data directory"].text
    assert "a flush of 512 bytes takes" in found["disk flush"].text
    assert list(tmp_path.iterdir()) == []


def test_a_file_instead_of_a_directory_is_a_problem(tmp_path):
    (tmp_path / "data").write_text("")
    assert findings_of(tmp_path / "data")["data directory"].level is Level.PROBLEM


def test_a_directory_that_everyone_may_enter_is_warned_of(tmp_path):
    tmp_path.chmod(0o755)
    found = findings_of(tmp_path)["data directory"]
    assert found.level is Level.WARNING
    assert f"chmod o-rwx {tmp_path}" in found.text


def test_a_file_of_keys_that_is_wrong_is_a_problem(tmp_path):
    file = tmp_path / "keys.json"
    file.write_text('{"keys": []}')
    found = findings_of(tmp_path, **{"access.jwt.key_file": str(file)})["access.jwt.key_file"]
    assert found == (
        Level.PROBLEM,
        "access.jwt.key_file",
        f"{file}: there is no key for signatures",
    )
    assert "access" not in findings_of(tmp_path, **{"access.jwt.key_file": str(file)})
    file.write_text(
        '{"keys": [{"kty": "oct", "k": "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY"}]}'
    )
    found = findings_of(tmp_path, **{"access.jwt.key_file": str(file)})["access.jwt.key_file"]
    assert found.level is Level.OK
    assert "access.jwt.key_file" not in findings_of(tmp_path)


def test_an_address_of_a_network_is_a_problem_without_access_control(tmp_path):
    public = {"listen.figg": "0.0.0.0:0"}
    assert findings_of(tmp_path)["access"].level is Level.OK
    found = findings_of(tmp_path, **public)["access"]
    assert found.level is Level.PROBLEM
    assert "headrace token create" in found.text
    found = findings_of(tmp_path, **public, **{"listen.insecure_open": True})["access"]
    assert found.level is Level.WARNING
    found = findings_of(tmp_path, **public, **{"access.anonymous": "subscribe:*"})["access"]
    assert found.level is Level.OK
    (tmp_path / "tokens.json").write_text("{")
    found = findings_of(tmp_path, **public)["access"]
    assert found.level is Level.PROBLEM
    assert "restore it from a backup" in found.text


def test_a_certificate_that_the_server_could_not_load_is_a_problem(tmp_path):
    assert "TLS" not in findings_of(tmp_path)
    found = findings_of(tmp_path, **{"listen.tls.cert": str(tmp_path / "none.pem")})["TLS"]
    assert found.level is Level.PROBLEM
    assert "none.pem" in found.text
    pair = Authority.make(tmp_path).issue("server")
    pair.key.chmod(0o600)
    tls = {"listen.tls.cert": str(pair.certificate), "listen.tls.key": str(pair.key)}
    assert findings_of(tmp_path, **tls)["TLS"].level is Level.OK


def test_an_address_in_use_is_warned_of(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        found = findings_of(tmp_path, **{"listen.ws": address})["listen.ws"]
    assert found.level is Level.WARNING
    assert f"{address} cannot be opened" in found.text


def test_a_check_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    def fail(directory):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(doctor, "_flush_s", fail)
    found = findings_of(tmp_path)
    assert found["disk flush"] == (
        Level.WARNING,
        "disk flush",
        "this could not be checked: Input/output error",
    )
    assert "Java" in found


def test_the_command_prints_every_finding_and_fails_only_for_problems(tmp_path, environment):
    (tmp_path / "data").write_text("")
    command = [sys.executable, "-m", "headrace", "doctor", "--data-dir", "data"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 1
    assert "problem  data directory: " in done.stdout
    assert done.stderr == ""
    done = subprocess.run(
        [*command, "--json"], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    told = json.loads(done.stdout)
    assert told["problems"] >= 1
    assert {"level", "subject", "text"} == set(told["findings"][0])
