"""Settings that change while a server runs, and settings that wait for a restart."""

from headrace.config.load import SETTINGS, load
from headrace.config.settings import Config, PrefixRule
from headrace.model import Durability
from headrace.server.reload import merge


def wanted(**settings: str) -> Config:
    return load({key.replace("__", "."): value for key, value in settings.items()}, {}).config


def test_nothing_changes_where_nothing_has():
    assert merge(Config(), Config()) == (Config(), [], [])


def test_settings_that_reload_change_and_others_wait():
    found = merge(
        Config(),
        wanted(
            retention__age="1d",
            log_level="debug",
            limits__connections_max="7",
            limits__refusal_delay_s="3s",
            listen__origins="*",
            journal__files="8",
            listen__figg="127.0.0.1:1",
            pipeline__every="9s",
        ),
    )
    assert found.config.retention.age_s == 86_400
    assert found.config.log_level == "debug"
    assert found.config.limits.connections_max == 7
    assert found.config.journal == Config().journal
    assert found.config.listen.figg == Config().listen.figg
    assert found.config.listen.origins == ("*",)
    changed = {"retention.age_s", "log_level", "limits.connections_max", "listen.origins"}
    changed |= {"limits.refusal_delay_s"}
    assert set(found.changed) == changed
    assert found.waiting == ["listen.figg", "journal.files"], (
        "the server reads nothing of [pipeline]"
    )


def test_rules_change_their_retention_and_keep_what_needs_a_restart():
    before = Config(
        topics=(
            PrefixRule(prefix="a/", retention_age_s=5.0, durability=Durability.WRITTEN),
            PrefixRule(prefix="b/", retention_age_s=5.0),
        )
    )
    after = Config(
        topics=(
            PrefixRule(prefix="a/", retention_age_s=9.0, durability=Durability.SYNCED),
            PrefixRule(prefix="c/", retention_bytes=6, segment_bytes=64),
        )
    )
    found = merge(before, after)
    assert found.config.rule("a/x")[:2] == (Durability.WRITTEN, 9.0)
    assert found.config.rule("b/x") == Config().rule("b/x")
    assert found.config.rule("c/x").retention_bytes == 6
    assert found.config.rule("c/x").segment_bytes == Config().segment.bytes
    assert found.changed == ["topics"]
    assert set(found.waiting) == {"topics.durability", "topics.segment_bytes"}
    # A rule that was removed from the file stays in force for settings that need a restart.
    gone = merge(found.config, Config())
    assert gone.config.rule("a/x")[:2] == (Durability.WRITTEN, Config().retention.age_s)
    assert gone.waiting == ["topics.durability"]


def test_every_limit_reloads():
    assert all(one.reloads for key, one in SETTINGS.items() if key.startswith("limits."))
