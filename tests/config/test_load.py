"""The configuration: sources of values, their precedence, and the errors for invalid ones."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from headrace.access.grants import configured
from headrace.access.operations import Operation
from headrace.cli.config import to_markdown
from headrace.cli.pipeline.options import Given
from headrace.config.load import SETTINGS, load
from headrace.config.pipeline import (
    CompactOptions,
    DedupeOptions,
    ExportOptions,
    JobOptions,
    fields_of,
)
from headrace.config.protocols import Access, AccessToken
from headrace.config.settings import Config, PrefixRule, old_names
from headrace.config.values import UNITS_HELP, Address, Origins, Quantity
from headrace.errors import ConfigError
from headrace.model import Durability

REPOSITORY = Path(__file__).parents[2]


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "headrace.toml"
    file.write_text(text)
    return file


def refusal(flags=None, environ=None, file=None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(flags or {}, environ or {}, file)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_without_any_source_every_value_is_the_default():
    loaded = load({}, {})
    assert loaded.config == Config()
    assert set(loaded.origins.values()) == {"default"}


def test_flags_win_over_the_environment_which_wins_over_the_file(tmp_path):
    file = write(tmp_path, "[journal]\nfiles = 5\nrotate_s = 5\nfsync_s = 5\n")
    environ = {"HEADRACE_JOURNAL_ROTATE_S": "6", "HEADRACE_JOURNAL_FSYNC_S": "6"}
    loaded = load({"journal.fsync_s": "7"}, environ, file)
    journal = loaded.config.journal
    assert (journal.files, journal.rotate_s, journal.fsync_s) == (5, 6.0, 7.0)
    assert loaded.origins["journal.files"] == f"file {file}"
    assert loaded.origins["journal.rotate_s"] == "environment HEADRACE_JOURNAL_ROTATE_S"
    assert loaded.origins["journal.fsync_s"] == "flag --set journal.fsync_s"
    assert loaded.origins["journal.file_bytes"] == "default"


def test_a_flag_of_none_is_no_flag():
    assert load({"data_dir": None}, {"HEADRACE_DATA_DIR": "elsewhere"}).config.data_dir == Path(
        "elsewhere"
    )


def test_the_environment_can_name_the_file(tmp_path):
    file = write(tmp_path, 'durability = "written"\n')
    assert load({}, {"HEADRACE_CONFIG": str(file)}).config.durability is Durability.WRITTEN


@pytest.mark.parametrize("key", SETTINGS)
def test_every_setting_can_be_given_in_each_way(key, tmp_path):
    setting = SETTINGS[key]
    text = str(setting.default).lower() if setting.type is bool else str(setting.default)
    literal = text if isinstance(setting.default, int | float) else f'"{text}"'
    section, _, name = key.rpartition(".")
    file = write(tmp_path, f"[{section}]\n{name} = {literal}" if section else f"{name} = {literal}")
    for loaded in (
        load({key: text}, {}),
        load({}, {setting.variable: text}),
        load({}, {}, file),
    ):
        assert loaded.config == Config()
        assert loaded.origins[key] != "default"


def test_every_setting_is_documented():
    for setting in SETTINGS.values():
        assert setting.doc.endswith(".")
        is_number = isinstance(setting.default, int | float) and setting.type is not bool
        assert setting.unit or not is_number


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:0", Address("127.0.0.1", 0)),
        ("[::1]:65535", Address("::1", 65535)),
        ("localhost:8119", Address("localhost", 8119)),
    ],
)
def test_an_address_reads_as_it_prints(text, address):
    assert load({"listen.figg": text}, {}).config.listen.figg == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", "8119", ":8119", "host:", "::1:8119", "h:65536", "h:-1", "h:٣"]
)
def test_an_address_that_is_none_is_refused_with_an_example(text):
    assert refusal({"listen.figg": text}) == (
        "listen.figg must be HOST:PORT such as 127.0.0.1:8119 or [::1]:8119, "
        f'not "{text}" (flag --figg)'
    )


def test_two_listeners_on_one_port_are_refused():
    message = refusal({"listen.figg": "127.0.0.1:8121"})
    assert "listen.http (default) and listen.figg (flag --figg) are both 127.0.0.1:8121" in message


def test_two_listeners_may_both_ask_for_a_free_port():
    load(
        {"listen.figg": "127.0.0.1:0", "listen.ws": "127.0.0.1:0", "listen.http": "127.0.0.1:0"}, {}
    )


def test_an_unknown_key_is_refused_with_the_nearest_one(tmp_path):
    file = write(tmp_path, "[journal]\nfile_byte = 1\n")
    assert refusal(file=file) == (
        f"there is no setting journal.file_byte (file {file}); did you mean journal.file_bytes?"
    )


def test_a_key_without_its_section_is_refused_with_the_whole_name():
    assert refusal({"rotate_s": "1"}).endswith("did you mean journal.rotate_s?")


@pytest.mark.parametrize("name", ["x", "retention.q", "retention.until", "topic", "journal.kind"])
def test_a_name_that_is_not_near_gets_no_hint(name):
    assert refusal({name: "1"}) == f"there is no setting {name} (flag --set {name})"
    variable = "HEADRACE_" + name.upper().replace(".", "_")
    assert refusal(environ={variable: "1"}) == (
        f"the environment sets {variable}, which is no setting"
    )


def test_an_unknown_section_is_refused_with_the_nearest_one(tmp_path):
    file = write(tmp_path, "[journals]\n")
    assert refusal(file=file).endswith("did you mean journal?")


def test_an_unknown_variable_is_refused_with_the_nearest_one():
    assert refusal(environ={"HEADRACE_DATADIR": "x"}) == (
        "the environment sets HEADRACE_DATADIR, which is no setting; "
        "did you mean HEADRACE_DATA_DIR?"
    )


@pytest.mark.parametrize(
    "variable",
    [
        "HEADRACE_URL",
        "HEADRACE_PORT_8119_TCP_ADDR",
        "HEADRACE_SERVICE_HOST",
        "HEADRACE_TORTURE",
        "PATH",
    ],
)
def test_variables_that_are_not_settings_are_left_alone(variable):
    assert load({}, {variable: "tcp://10.0.0.1:8119"}).config == Config()


@pytest.mark.parametrize(
    ("key", "text", "must_be"),
    [
        ("journal.files", "1", "a whole number of at least 2 and at most 1024"),
        ("journal.files", "2.5", "a whole number of at least 2 and at most 1024"),
        ("journal.files", "many", "a whole number of at least 2 and at most 1024"),
        ("journal.rotate_s", "0", "a number over 0 and at most 3600"),
        ("retention.age_s", "-1", "a number of at least 0"),
        ("retention.age_s", "nan", "a number of at least 0"),
        ("retention.age_s", "inf", "a number of at least 0"),
        ("retention.bytes", "99999999999999999999999", "a whole number of at least 0"),
        ("durability", "fsync", "one of synced, written, memory"),
        ("log_level", "INFO", "one of debug, info, warning, error"),
        ("data_dir", "", "a path"),
    ],
)
def test_a_value_out_of_bounds_is_told_what_it_must_be(key, text, must_be):
    variable = SETTINGS[key].variable
    if SETTINGS[key].unit in UNITS_HELP:
        must_be += ", or " + UNITS_HELP[SETTINGS[key].unit]
    assert refusal(environ={variable: text}) == (
        f'{key} must be {must_be}, not "{text}" (environment {variable})'
    )


@pytest.mark.parametrize("literal", ['"5"', "true", "5.0", "[5]", "{}"])
def test_the_file_must_use_the_right_type(tmp_path, literal):
    file = write(tmp_path, f"[journal]\nfiles = {literal}\n")
    assert refusal(file=file).startswith("journal.files must be a whole number of at least 2")


def test_a_value_where_a_section_belongs_is_refused(tmp_path):
    file = write(tmp_path, "journal = 5\n")
    assert refusal(file=file) == f"journal must be a section [journal], not 5 (file {file})"


def test_a_file_that_is_not_there_or_not_toml_is_refused(tmp_path):
    missing = tmp_path / "missing.toml"
    assert refusal(file=missing) == (
        f"cannot read the configuration file {missing}: No such file or directory"
    )
    assert refusal(file=tmp_path).endswith("Is a directory")
    assert "is not valid TOML" in refusal(file=write(tmp_path, "durability =\n"))
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    assert "is not valid TOML" in refusal(file=binary)


def test_each_value_of_a_topic_comes_from_the_longest_prefix_that_sets_it(tmp_path):
    file = write(
        tmp_path,
        """
        [retention]
        age_s = 10.0
        [[topics]]
        prefix = "a/"
        durability = "memory"
        retention_bytes = 7
        [[topics]]
        prefix = "a/b/"
        durability = "written"
        segment_bytes = 64
        """,
    )
    config = load({}, {}, file).config
    assert config.rule("a/b/c")[:5] == (Durability.WRITTEN, 10.0, 7, 64, ())
    assert config.rule("a/c")[:5] == (Durability.MEMORY, 10.0, 7, config.segment.bytes, ())
    assert config.rule("b")[:5] == (Durability.SYNCED, 10.0, 0, config.segment.bytes, ())


def test_channels_have_values_by_prefix_and_are_never_in_memory_only(tmp_path):
    file = write(
        tmp_path,
        """
        durability = "memory"
        [channels]
        grace_s = 7.0
        [[topics]]
        prefix = "$channel/doc/"
        reducer = "merge"
        lease_s = 5.0
        last_state = "dropped"
        """,
    )
    config = load({}, {}, file).config
    assert config.rule("$channel/doc/1")[5:] == ("merge", 5.0, 7.0, "dropped")
    assert config.rule("$channel/room")[5:] == ("last", 604_800.0, 7.0, "kept")
    assert config.rule("$channel/room").durability is Durability.WRITTEN
    assert config.rule("room").durability is Durability.MEMORY


def test_a_rule_for_names_of_earlier_versions_counts_for_the_present_ones(tmp_path):
    text = """
        [[topics]]
        prefix = "channel/doc/"
        reducer = "merge"
        [[topics]]
        prefix = "channel/doc/long/"
        lease_s = 5.0
        """
    config = load({}, {}, write(tmp_path, text)).config
    assert config.rule("$channel/doc/1").reducer == "merge"
    assert config.rule("$channel/doc/long/1")[5:7] == ("merge", 5.0)
    assert config.rule("$channel/room").reducer == "last"
    assert old_names(config)[0] == (
        'the [[topics]] rule for "channel/doc/" counts for "$channel/doc/" too, where channels and logs of '
        'Logux are now: write "$channel/doc/", or add a rule for that if "channel/doc/" is meant'
    )
    assert len(old_names(config)) == 2
    both = text + '[[topics]]\nprefix = "$channel/doc/"\nreducer = "count"\n'
    config = load({}, {}, write(tmp_path, both)).config
    assert config.rule("$channel/doc/1").reducer == "count"
    assert config.rule("channel/doc/1").reducer == "merge"
    assert len(old_names(config)) == 1
    assert old_names(Config()) == []


def may_read(token: AccessToken, topic: str) -> bool:
    grants = configured(token.grants, token.user)
    return any(grant.allows(Operation.SUBSCRIBE, topic) for grant in grants)


def test_a_token_whose_grant_has_a_mistake_is_refused(tmp_path):
    digest = "0" * 64
    token = f'[[access.token]]\nname = "app"\nsha256 = "{digest}"\n'
    message = refusal(file=write(tmp_path, f'{token}grants = ["publsh:orders/*"]'))
    assert 'the token "app"' in message
    assert '"publsh"' in message
    message = refusal(file=write(tmp_path, f'{token}user = "a"\ngrants = ["publish:orders/*"]'))
    assert "as:a" in message


def test_grants_of_peers_without_credentials_are_read_from_any_source(tmp_path):
    wanted = ("subscribe:news/*", "inspect:news/*")
    file = write(tmp_path, f"[access]\nanonymous = {json.dumps(wanted)}")
    for loaded in (
        load({"access.anonymous": " ".join(wanted)}, {}),
        load({}, {"HEADRACE_ACCESS_ANONYMOUS": json.dumps(wanted)}),
        load({}, {}, file),
    ):
        assert loaded.config.access.anonymous == wanted
    assert "access.anonymous must be" in refusal({"access.anonymous": "publish"})


@pytest.mark.parametrize(
    "host", ["log.example.com", "LOG.example.com:8121", "localhost:1", "127.0.0.1"]
)
def test_a_host_is_known_by_its_name(host):
    hosts = load({"listen.hosts": "log.example.com"}, {}).config.listen.hosts
    assert hosts.has(host)
    assert not hosts.has("evil.example.com")
    assert not hosts.has("10.0.0.1")
    assert hosts.has("10.0.0.1", any_address=True)


def test_a_grant_for_names_of_earlier_versions_is_one_for_the_present_ones():
    old = AccessToken(name="app", sha256="0" * 64, grants=("channel/mine/", "http"))
    assert may_read(old, "$channel/mine/1")
    new = AccessToken(name="app", sha256="0" * 64, grants=("$channel/mine/",))
    assert may_read(new, "$channel/mine/1")
    assert not may_read(new, "channel/mine/1")
    assert not may_read(new, "$channel/other")
    told = old_names(Config(access=Access(token=(old, new))))
    assert told == [
        'the grant "channel/mine/" of the token "app" counts as "$channel/mine/": write that'
    ]


@pytest.mark.parametrize("topic", ["$logux/main", "$channel/1"])
def test_name_spaces_with_rules_of_their_own_have_no_retention(topic):
    assert Config().rule(topic)[1:3] == (0, 0)
    assert Config().rule("loguxmain").retention_age_s == 604_800


@pytest.mark.parametrize("topic", ["$logux/main", "$channel/1"])
def test_no_retention_of_the_user_reaches_into_such_a_name_space(topic):
    for prefix in ("", topic[:3], topic):
        rules = (PrefixRule(prefix=prefix, retention_age_s=5.0, retention_bytes=6),)
        assert Config(topics=rules).rule(topic)[1:3] == (0, 0)
    broad = Config(topics=(PrefixRule(prefix="", retention_age_s=5.0, retention_bytes=6),))
    assert broad.rule("other")[1:3] == (5.0, 6)


@pytest.mark.parametrize("prefix", ["$channel/", "$channel/doc/", "$logux/", "$logux/main"])
@pytest.mark.parametrize("key", ["retention_age_s", "retention_bytes"])
def test_a_retention_that_would_never_count_is_refused(tmp_path, prefix, key):
    text = f'[[topics]]\nprefix = "a"\n{key} = 9\n[[topics]]\nprefix = "{prefix}"\n{key} = '
    file = write(tmp_path, text + "2000")
    assert refusal(file=file) == (
        f'{key} must be 0 or left out for the prefix "{prefix}" (file {file}): topics under '
        f"{prefix[: prefix.index('/') + 1]} are never trimmed by age or size"
    )
    assert load({}, {}, write(tmp_path, text + "0")).config.rule(prefix + "x")[1:3] == (0, 0)


def test_a_rule_that_leaves_retention_alone_does_not_bring_it_back_to_a_name_space():
    rules = (PrefixRule(prefix="$logux/main", durability=Durability.WRITTEN),)
    rule = Config(topics=rules).rule("$logux/main")
    assert (rule.durability, rule.retention_age_s) == (Durability.WRITTEN, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[topics]]\ndurability = "memory"', "prefix is missing ([[topics]] number 1"),
        ('[[topics]]\nprefix = ""\n[[topics]]\nprefix = ""', 'the prefix "" has two rules'),
        (
            '[[topics]]\nprefix = "a"\nretention = 1',
            "there is no setting retention ([[topics]] number 1",
        ),
        (
            '[[topics]]\nprefix = "a"\nsegment_bytes = 1',
            "segment_bytes must be a whole number of at least 64",
        ),
        ('[topics]\nprefix = "a"', "topics must be a list of tables, each under [[topics]]"),
        ("topics = [1]", "topics must be a list of tables, each under [[topics]]"),
    ],
)
def test_a_wrong_topic_rule_is_refused(tmp_path, text, message):
    assert refusal(file=write(tmp_path, text)).startswith(message)


DIGEST = "0123456789abcdefABCDEF0123456789" * 2


def test_tokens_of_the_http_api_come_from_the_file(tmp_path):
    text = "".join(
        f'[[access.token]]\nname = "{name}"\nsha256 = "{DIGEST}"\n' for name in ("a", "é b")
    )
    loaded = load({}, {"HEADRACE_TOKEN": "not a setting"}, write(tmp_path, text))
    assert [token.name for token in loaded.config.access.token] == ["a", "é b"]
    assert {token.sha256 for token in loaded.config.access.token} == {DIGEST}
    assert loaded.origins["access.token"].startswith("file ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f'name = "a"\nsha256 = "{DIGEST[1:]}"', "sha256 must be 64 hexadecimal digits"),
        (f'name = "a"\nsha256 = "{DIGEST}0"', "sha256 must be 64 hexadecimal digits"),
        (f'name = "a"\nsha256 = "{DIGEST}\\n"', "sha256 must be 64 hexadecimal digits"),
        (f'name = "a"\nsha256 = "{DIGEST[1:]}g"', "sha256 must be 64 hexadecimal digits"),
        ('name = "a"\nsha256 = 5', "sha256 must be 64 hexadecimal digits"),
        ('name = "a"', "sha256 is missing ([[access.token]] number 1"),
        (f'sha256 = "{DIGEST}"', "name is missing ([[access.token]] number 1"),
        (f'name = "a"\nsha256 = "{DIGEST}"\ngrants = 5', "grants must be a list of texts, not 5"),
        (f'name = ""\nsha256 = "{DIGEST}"', "name must be a text of 1 to 255 characters"),
        (f'name = "a"\nsha256 = "{DIGEST}"\nnope = 1', "there is no setting nope"),
        (
            f'name = "a"\nsha256 = "{DIGEST}"\n[[access.token]]\nname = "a"\nsha256 = "{DIGEST}"',
            'the name "a" has two tokens ([[access.token]] number 2',
        ),
    ],
)
def test_a_wrong_token_is_refused_and_not_shown(tmp_path, text, message):
    refused = refusal(file=write(tmp_path, f"[[access.token]]\n{text}"))
    assert refused.startswith(message)
    assert DIGEST[1:] not in refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("access = 1", "access must be a section [access], not 1"),
        ("[access]\ntoken = 1", "access.token must be a list of tables, each under"),
        ("[access]\ntoken = [1]", "access.token must be a list of tables, each under"),
        ('[access]\nuser = "a"', "there is no setting access.user"),
        ("[[access]]\nname = 1", "access must be a section [access]"),
    ],
)
def test_a_wrong_section_of_access_is_refused(tmp_path, text, message):
    assert refusal(file=write(tmp_path, text)).startswith(message)


def test_readers_are_a_list_or_a_text_with_commas(tmp_path):
    file = write(tmp_path, '[retention]\nwait_for = ["group:a", "b, c", "group:a"]\n')
    assert load({}, {}, file).config.retention.wait_for == ("group:a", "b, c")
    for text, readers in (("group:a,b", ("group:a", "b")), ("", ())):
        for loaded in (
            load({"retention.wait_for": text}, {}),
            load({}, {"HEADRACE_RETENTION_WAIT_FOR": text}),
        ):
            assert loaded.config.retention.wait_for == readers


@pytest.mark.parametrize("value", ["5", '[""]', "[1]", f'["{"x" * 256}"]', "{ a = 1 }"])
def test_what_is_no_list_of_readers_is_refused(tmp_path, value):
    file = write(tmp_path, f'[[topics]]\nprefix = "a"\nretention_wait_for = {value}\n')
    assert refusal(file=file).startswith("retention_wait_for must be a list of readers' names")


def test_the_printed_toml_is_read_back_as_the_same_configuration(tmp_path, headrace):
    file = write(
        tmp_path,
        'data_dir = "a \\"quoted\\" \\\\ dir\\u007f\\u00e9"\n'
        '[[topics]]\nprefix = "t/"\nretention_age_s = 1.5\nretention_wait_for = ["group:a"]\n'
        f'[[access.token]]\nname = "a \\"b\\""\nsha256 = "{DIGEST}"\n'
        '[retention]\nwait_for = ["b", "c"]\n',
    )
    printed = headrace("config", "--config", file, "--toml").stdout
    tomllib.loads(printed)
    again = tmp_path / "again.toml"
    again.write_text(printed)
    assert load({}, {}, again).config == load({}, {}, file).config


def test_the_reference_page_is_up_to_date():
    page = (REPOSITORY / "docs/configuration.md").read_text()
    assert page == to_markdown(), "run `make docs`"
    assert "None" not in page


@pytest.mark.parametrize(
    ("listed", "origin", "allowed"),
    [
        (("same-host",), "http://app.example:3000", True),
        (("same-host",), "https://APP.example", True),
        (("same-host",), "http://other.example", False),
        (("same-host",), "null", False),
        (("same-host",), "same-host", False),
        (("same-host",), "http://[::1", False),
        (("same-host",), "", False),
        (("https://other.example",), "https://other.example", True),
        (("https://other.example",), "http://other.example", False),
        (("https://other.example",), "http://app.example", True),
        (("same-host", "https://other.example"), "http://app.example", True),
        (("no-same-host", "https://other.example"), "http://app.example", False),
        (("no-same-host", "https://other.example"), "https://other.example", True),
        (("no-same-host",), "no-same-host", False),
        (("*",), "https://anything.example", True),
        (("null",), "null", True),
        ((), "http://app.example", False),
    ],
)
def test_pages_are_let_in_by_their_origin(
    listed: tuple[str, ...], origin: str, allowed: bool
) -> None:
    assert Origins(listed).allow(origin, "app.example:8120") is allowed


@pytest.mark.parametrize(
    "page", ["localhost:8000", "127.0.0.1:8000", "[::1]:8000", "app.localhost", "127.0.0.9"]
)
@pytest.mark.parametrize("host", ["localhost:8120", "127.0.0.1:8120", "[::1]:8120"])
def test_all_names_of_this_machine_are_one_host(page: str, host: str) -> None:
    origins = Config().listen.origins
    assert origins.allow(f"http://{page}", host)
    assert not origins.allow(f"http://{page}", "headrace.example:8120")
    assert not origins.allow("http://localhost.evil.example", host)


def test_origins_are_a_list_in_the_file_and_have_commas_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('[listen]\norigins = ["same-host", "https://App.example"]\n')
    wanted = ("same-host", "https://app.example")
    assert load({}, {}, file).config.listen.origins == wanted
    assert (
        load({"listen.origins": "same-host, https://app.example"}, {}).config.listen.origins
        == wanted
    )


@pytest.mark.parametrize("text", ["app.example", "https://app.example/path", "https://", ""])
def test_what_is_no_origin_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"listen\.origins must be .*https://app\.example\.com"):
        load({"listen.origins": text}, {})


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("7d", 604_800, "seconds"),
        ("500ms", 0.5, "seconds"),
        ("1.5h", 5400, "seconds"),
        ("10 min", 600, "seconds"),
        ("2w", 1_209_600, "seconds"),
        ("64MiB", 64 << 20, "bytes"),
        ("64mib", 64 << 20, "bytes"),
        ("1.5KiB", 1536, "bytes"),
        ("2GB", 2_000_000_000, "bytes"),
        ("100B", 100, "bytes"),
    ],
)
def test_a_quantity_has_a_unit(text, value, unit):
    assert Quantity.parse(text) == (value, unit)


@pytest.mark.parametrize(
    "text", ["7", "d", "7y", "-7d", "7dd", "7d5", "0.3B", "1e3s", "\u0667d", "", 7]
)
def test_what_is_no_quantity_is_none(text):
    assert Quantity.parse(text) is None


def test_settings_take_units_in_every_source_and_their_short_names_too(tmp_path):
    file = write(
        tmp_path,
        """
        [retention]
        age = "7d"
        bytes = "1GiB"
        [limits]
        output_bytes_max = "2MiB"
        [[topics]]
        prefix = "a/"
        retention_age = "12h"
        segment_bytes = "1MiB"
        """,
    )
    environ = {"HEADRACE_JOURNAL_FILE": "1MiB", "HEADRACE_CHANNELS_GRACE_S": "2m"}
    config = load({"limits.staged_age": "3h", "journal.rotate_s": "500ms"}, environ, file).config
    assert (config.retention.age_s, config.retention.bytes) == (604_800, 1 << 30)
    assert (config.limits.output_bytes_max, config.limits.staged_age_s) == (2 << 20, 10_800)
    assert (config.journal.file_bytes, config.journal.rotate_s) == (1 << 20, 0.5)
    assert config.channels.grace_s == 120
    assert config.rule("a/b")[1:4] == (43_200, 1 << 30, 1 << 20)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("retention.age", "7", "retention.age must be a duration with a unit (ms, s, m, h, d, w)"),
        ("retention.age", "7", "retention.age_s also takes a plain number of seconds"),
        ("retention.age", "7MiB", "must be a duration with a unit"),
        ("retention.age_s", "7MiB", "must be a number of at least 0, or a duration with a unit"),
        (
            "retention.bytes",
            "7d",
            "or a size with a unit (B, KiB, MiB, GiB, TiB, or KB, MB, GB, TB)",
        ),
        ("journal.rotate_s", "2h", "a number over 0 and at most 3600"),
        ("journal.files", "7d", "a whole number of at least 2 and at most 1024, not"),
        ("retention.wait", "7d", "there is no setting retention.wait"),
    ],
)
def test_a_wrong_unit_is_told_what_is_accepted(key, value, text):
    assert text in refusal({key: value})


def test_options_of_jobs_take_units(monkeypatch):
    monkeypatch.delenv("HEADRACE_CONFIG", raising=False)

    def settings(job: type[JobOptions], **values: str) -> Any:
        fields = [field for field in fields_of(job) if field.name in values]
        return Given(values, None, fields).settings

    found = settings(ExportOptions, every_s="30s", batch_bytes="256MiB")
    assert (found.every_s, found.batch_bytes) == (30, 256 << 20)
    assert settings(CompactOptions, file_bytes="1GB").file_bytes == 10**9
    assert settings(ExportOptions, every_s="30", batch_bytes="256").every_s == 30
    assert settings(DedupeOptions, window_s="12h").dedupe_window_s == 43_200
    assert settings(DedupeOptions, window_s="90").dedupe_window_s == 90


def test_a_setting_under_two_names_is_refused(tmp_path):
    file = write(tmp_path, '[retention]\nage = "7d"\nage_s = 7\n')
    assert "retention.age and retention.age_s are the same setting" in refusal(file=file)
    assert "same setting" in refusal({"retention.age": "7d", "retention.age_s": "7"})
    both = {"HEADRACE_RETENTION_AGE": "7d", "HEADRACE_RETENTION_AGE_S": "7"}
    assert "same setting" in refusal(environ=both)
    # With two sources, the usual precedence decides.
    over = load({"retention.age": "1d"}, {"HEADRACE_RETENTION_AGE_S": "7"})
    assert over.config.retention.age_s == 86_400
