"""Every invalid command line and every failure gives one clear line and an exit code."""

import json
import re
import subprocess
import sys
import tomllib

import pytest

from headrace import __version__
from tests.tools import takes_long

NOBODY = "127.0.0.1:1"
"""An address where nothing listens."""


def assert_one_line(done, code: int, text: str) -> None:
    assert done.returncode == code
    assert re.fullmatch(r"headrace: [^\n]+\n", done.stderr), done.stderr
    assert text in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["nope"], 'there is no command "nope" (see `headrace --help`)'),
        (["pubish"], "did you mean publish?"),
        (["publish"], "name the TOPIC"),
        (
            ["publish", "t", "data", "--timeout", "soon"],
            "a number of seconds, or a duration with a unit",
        ),
        (["publish", "t", "data", "--timeout", "1ms"], "--timeout must be at least 0.1 s"),
        (["help", "nope"], 'there is no command "nope"'),
        (["topics", "a", "--prefix", "b"], "give one of them"),
        (["publish", "", "data"], "a topic name must not be empty"),
        (["publish", "x" * 256, "data"], "255 bytes"),
        (["subscribe", b"\xff"], "must be valid UTF-8"),
        (["publish", "t", "data", "--nope"], "--nope"),
        (["publish", "t", "data", "--file", "f"], "DATA and --file exclude each other"),
        (["publish", "t", "data", "--url", "nope://x"], "must begin with figg://"),
        (["subscribe", "t", "--last", "1", "--from-start"], "--from-start and --last exclude"),
        (["subscribe", "t", "--since", "1h", "--from-offset", "1"], "exclude each other"),
        (["subscribe", "t", "--since", "soon"], "--since takes how long ago"),
        (["subscribe", "t", "--from-offset", "-1"], "--from-offset"),
        (["subscribe", "t", "--count", "0"], "--count"),
        (["inspect", "t", "--data-dir", "d", "--http", NOBODY], "exclude each other"),
        (["topics", "--http", "ftp://x"], "--http takes HOST:PORT"),
        (["topics", "--http", "x:port"], "--http takes HOST:PORT"),
        (["delete", "t"], "add --yes"),
        (["config", "--json", "--toml"], "--json and --toml exclude each other"),
        (["config", "--set", "x"], "--set takes KEY=VALUE"),
        (["config", "--set", "durability=memory", "--durability", "synced"], "given twice"),
        (["pipeline", "exprot"], "did you mean export?"),
        (["pipeline", "export", "--onec"], "No such option: --onec"),
        (["pipeline", "audit", "--http", "x", "--data-dir", "y"], "exclude each other"),
        (["pipeline", "export", "--once"], "--lake DIR is missing"),
        (["pipeline", "export", "--lake", "x", "--every", "soon"], "(flag --every)"),
        (["pipeline", "export", "t", "--lake", "x", "--pattern", "t"], "exclude each other"),
        (["pipeline", "export", "--lake", "x", "--pattern", "["], "is not a regular expression"),
        (["pipeline", "aggregate", "--lake", "x", "--into", "y"], "--reducer NAME"),
        (["pipeline", "aggregate", "--lake", "x", "--reducer", "last"], "--into DIR"),
        (["pipeline", "compact"], "--lake DIR is missing"),
        (["pipeline", "compact", "--lake", "x", "--file-bytes", "0"], "(flag --file-bytes)"),
        (["pipeline", "compact", "--lake", "x", "--sweep-after", "soon"], "a duration with a unit"),
        (["pipeline", "compact", "--lake", "x", "--sweep-after", "5m"], "3600"),
        (["pipeline", "dedupe", "--lake", "x", "--payload"], "--into DIR"),
        (["pipeline", "dedupe", "--into", "x", "--payload"], "--lake DIR is missing"),
        (["pipeline", "dedupe", "--lake", "x", "--into", "y"], "--key, --json-path and --payload"),
        (
            ["pipeline", "dedupe", "--lake", "x", "--into", "y", "--payload", "--key", "id"],
            "identifies a row: one of --key",
        ),
        (["pipeline", "dedupe", "--into", "y", "--payload", "--window", "0d"], "above 0, or all"),
        (
            ["pipeline", "dedupe", "--into", "y", "--payload", "--window", "now"],
            "a duration with a unit",
        ),
        (
            ["pipeline", "dedupe", "--lake", "x", "--into", "y", "--json-path", "id"],
            "begins with $",
        ),
        (["pipeline", "replay", "t", "--lake", "x"], "--to"),
        (["pipeline", "replay", "t", "--to", "u"], "--lake DIR is missing"),
        (
            ["pipeline", "replay", "t", "--to", "$logux/u", "--lake", "x"],
            "only its own protocol publishes",
        ),
        (["pipeline", "replay", "t", "--to", "u", "--lake", "x", "--since", "2h"], "same moment"),
        (["pipeline", "replay", "t", "--to", "u", "--lake", "x", "--until", "soon"], "ISO 8601"),
        (["pipeline", "report", "t", "--pattern", "t"], "exclude each other"),
        (["serve", "--figg", "nowhere"], "listen.figg must be HOST:PORT"),
        (["serve", "--config", "missing.toml"], "cannot read the configuration file missing.toml"),
        (["serve", "--set", "journal.file=1"], "journal.file_bytes also takes a plain number"),
        (["serve", "--set", "journal.filez=1"], "did you mean journal.files?"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(headrace, args, text):
    assert_one_line(headrace(*args), 2, text)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["publish", "t", "--file", "/tmp"], "cannot read /tmp: Is a directory"),
        (["publish", "t", "--file", "missing"], "cannot read missing: No such file or directory"),
        (
            ["publish", "t", "data", "--url", f"figg://{NOBODY}", "--timeout", "1"],
            f"no server at {NOBODY}; is it running? (`headrace serve` starts one)",
        ),
        (["subscribe", "t", "--url", f"figg://{NOBODY}", "--timeout", "1"], "no connection"),
        (
            ["subscribe", "t", "--last", "1", "--http", NOBODY],
            f"no server at {NOBODY}; is it running?",
        ),
        (
            ["subscribe", "t", "--until-end", "--http", NOBODY],
            "ask the server's HTTP address: give it with --http",
        ),
        (["topics", "--http", NOBODY], f"no server at {NOBODY}; is it running?"),
        (["status", "--http", NOBODY], f"no server at {NOBODY}; is it running?"),
        (["channels", "--http", NOBODY], f"no server at {NOBODY}; is it running?"),
        (["delete", "t", "--yes", "--http", NOBODY], "no server at"),
        (["inspect", "t", "--http", NOBODY], "no server at"),
    ],
)
def test_a_failure_is_exit_code_1(headrace, args, text):
    assert_one_line(headrace(*args), 1, text)


CLOSED = ["<&-", ">&-", "<&- >&-"]


@pytest.mark.parametrize(
    ("command", "redirection"),
    [
        pytest.param(command, closed, marks=[] if closed == CLOSED[number % 3] else takes_long)
        for number, command in enumerate(
            ["publish t", "subscribe t", "topics", "delete t", "config"]
        )
        for closed in CLOSED
    ],
)
def test_a_closed_standard_stream_is_no_fault_of_our_own(command, redirection):
    there = f"HEADRACE_URL=figg://{NOBODY} HEADRACE_HTTP={NOBODY}"
    wait = " --timeout 0.1" if command in ("publish t", "subscribe t") else ""
    done = subprocess.run(
        f"{there} {sys.executable} -m headrace {command}{wait} {redirection}",
        shell=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert "fault" not in done.stderr
    assert done.stderr.count("\n") == (0 if command == "config" else 1)


@pytest.mark.usefixtures("executed")
@pytest.mark.parametrize(("args", "code"), [(["publish"], 2), (["topics", "--http", NOBODY], 1)])
def test_an_executed_command_fails_like_a_forked_one(headrace, args, code):
    """Tests fork most commands: see `tests/forked.py`."""
    assert_one_line(headrace(*args), code, "")


def test_debug_shows_the_traceback_wherever_it_stands(headrace):
    done = headrace("topics", "--http", NOBODY, "--debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_without_arguments_the_help_is_shown(headrace):
    done = headrace()
    assert (done.returncode, done.stderr) == (0, "")
    assert "headrace publish greetings" in done.stdout


@pytest.mark.parametrize(
    "command",
    [
        *(
            "serve",
            "publish",
            "subscribe",
            "topics",
            "inspect",
            "delete",
            "verify",
            "config",
            "status",
            "help",
        ),
        *(
            "pipeline",
            "pipeline export",
            "pipeline audit",
            "pipeline aggregate",
            "pipeline compact",
            "pipeline replay",
            "pipeline report",
        ),
    ],
)
def test_every_help_has_an_example(headrace, command):
    assert re.search(
        rf"^ +(.*\| )?headrace {command}", headrace(*command.split(), "-h").stdout, re.MULTILINE
    )


@pytest.mark.usefixtures("executed")
def test_the_version(headrace):
    assert headrace("--version").stdout == f"headrace {__version__}\n"
    assert headrace("-V").stdout == f"headrace {__version__}\n"


def test_help_is_a_command_too(headrace):
    assert headrace("help", "publish").stdout == headrace("publish", "--help").stdout
    assert headrace("help").stdout == headrace("--help").stdout


def test_help_shows_arguments_without_types_of_python(headrace):
    export = headrace("help", "pipeline", "export").stdout
    assert "Usage: headrace pipeline export [OPTIONS] [TOPIC…]" in export
    assert re.search(r"^  TOPIC… +Only these topics", export, re.MULTILINE)
    publish = headrace("help", "publish").stdout
    assert "Usage: headrace publish [OPTIONS] [TOPIC] [DATA]" in publish
    assert "Usage: headrace delete [OPTIONS] TOPIC" in headrace("help", "delete").stdout
    assert "<" not in export + publish


def test_a_shell_can_complete_commands_and_options(headrace):
    # `--show-completion` prints this script for the shell that it is called from.
    script = headrace(environ={"_HEADRACE_COMPLETE": "source_bash"})
    assert "_HEADRACE_COMPLETE=complete_bash" in script.stdout, script.stderr
    environ = {
        "_HEADRACE_COMPLETE": "complete_bash",
        "COMP_WORDS": "headrace pub",
        "COMP_CWORD": "1",
    }
    assert headrace(environ=environ).stdout.split() == ["publish"]


def test_config_prints_no_password(headrace):
    url = "postgresql://user:s3cret@db.example/headrace"
    settings = ["--set", f"channels.snapshots_url={url}", "--set", "logux.credentials=s3cret"]
    for form in ([], ["--json"], ["--toml"]):
        shown = headrace("config", *settings, *form).stdout
        assert "s3cret" not in shown
        assert "postgresql://user:***@db.example/headrace" in shown
    wrong = headrace("config", "--set", "channels.snapshots_url=mysql://user:s3cret@x")
    assert wrong.returncode == 2
    assert "s3cret" not in wrong.stderr
    # The output can be read back, except for masked values.
    printed = tomllib.loads(headrace("config", *settings, "--toml").stdout)
    assert "snapshots_url" not in printed["channels"]


def test_config_says_where_each_value_comes_from(headrace, tmp_path):
    (tmp_path / "h.toml").write_text(
        'log_level = "debug"\n[[topics]]\nprefix = "t/"\nretention_bytes = 9\n'
    )
    args = ["config", "--config", "h.toml", "--figg", "[::1]:0", "--set", "journal.files=8"]
    environ = {"HEADRACE_DURABILITY": "written"}
    text = headrace(*args, environ=environ).stdout
    assert re.search(r"^log_level +debug +file h.toml *$", text, re.MULTILINE)
    assert re.search(
        r"^durability +written +environment HEADRACE_DURABILITY *$", text, re.MULTILINE
    )
    assert re.search(r"^listen.figg +\[::1\]:0 +flag --figg *$", text, re.MULTILINE)
    assert re.search(r"^journal.files +8 +flag --set journal.files *$", text, re.MULTILINE)
    assert re.search(r"^retention.bytes +0 +default *$", text, re.MULTILINE)
    assert re.search(r'^topics "t/" +retention_bytes = 9 +file h.toml *$', text, re.MULTILINE)

    printed = json.loads(headrace(*args, "--json", environ=environ).stdout)
    assert printed["settings"]["journal.files"] == {
        "value": 8,
        "from": "flag --set journal.files",
        "unit": "files",
    }
    assert printed["topics"][0] == {"prefix": "t/", "from": "file h.toml", "retention_bytes": 9}


def test_hashes_of_tokens_are_in_the_file_only(headrace, tmp_path):
    hashed = "ab" * 32
    (tmp_path / "c.toml").write_text(f'[[access.token]]\nname = "t"\nsha256 = "{hashed}"\n')
    for form in ([], ["--json"]):
        shown = headrace("config", "--config", "c.toml", *form).stdout
        assert hashed not in shown
        assert "***" in shown
    # Without its tokens, the file would leave the API open.
    assert hashed in headrace("config", "--config", "c.toml", "--toml").stdout


def test_http_at_the_figg_port_is_told_where_http_listens(headrace, server):
    figg, http = ("{}:{}".format(*place) for place in (server.figg, server.http))
    text = f"this is HTTP, and the port speaks Figg: HTTP listens at {http}"
    assert_one_line(headrace("topics", "--http", figg), 1, text)
