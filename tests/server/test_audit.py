"""The audit trail: the form of its records, their limits, and the settings of its topic."""

import json
from collections.abc import Callable

from headrace.config.settings import AUDIT_AGE_S, Config, PrefixRule
from headrace.log.records import split_records
from headrace.model import AUDIT_TOPIC, PAYLOAD_BYTES_MAX, Durability
from headrace.server.audit import FACT_CHARACTERS_MAX, LISTED_MAX, OPERATOR, Actor, Audit


class Topics:
    """A store that only remembers what was appended, and in which order."""

    def __init__(self) -> None:
        self.appended: list[tuple[str, bytes]] = []

    def topic(self, name: str) -> str:
        return name

    def append(self, batches: dict[str, list[bytes]], done: Callable[[], None]) -> None:
        for name, records in batches.items():
            for record in records:
                (whole,) = split_records(record, 1)
                self.appended.append((name, whole[4:]))


def recorded(*actions: tuple[str, Actor, dict[str, object]]) -> list[dict[str, object]]:
    store = Topics()
    audit = Audit(store, lambda: 1_800_000_000_000)  # type: ignore[arg-type]
    for action, who, facts in actions:
        audit.record(action, who, **facts)
    assert {name for name, _ in store.appended} == {AUDIT_TOPIC}
    assert all(len(payload) <= PAYLOAD_BYTES_MAX for _, payload in store.appended)
    return [json.loads(payload) for _, payload in store.appended]


def test_a_record_says_who_did_what_when_and_from_where():
    who = Actor("token:ops", "127.0.0.1:5000")
    [entry] = recorded(("topic.delete", who, {"topic": "orders", "records": 3}))
    assert entry == {
        "time_ms": 1_800_000_000_000,
        "action": "topic.delete",
        "principal": "token:ops",
        "address": "127.0.0.1:5000",
        "topic": "orders",
        "records": 3,
    }


def test_records_are_bounded_whatever_their_facts():
    facts = {"topic": "x" * 1_000_000, "topics": [str(number) for number in range(100_000)]}
    [entry] = recorded(("cursors.delete", OPERATOR, facts))
    assert entry["topic"] == "x" * FACT_CHARACTERS_MAX + "…"
    assert entry["topics"] == [*map(str, range(LISTED_MAX)), "…"]


def test_a_name_that_no_terminal_may_see_is_kept_as_it_is():
    [entry] = recorded(("topic.delete", OPERATOR, {"topic": "a\n\x1b[31m\u2028"}))
    assert entry["topic"] == "a\n\x1b[31m\u2028"


def test_the_trail_is_kept_for_a_year_and_on_disk_unless_a_rule_says_otherwise():
    config = Config(durability=Durability.MEMORY)
    rule = config.rule(AUDIT_TOPIC)
    assert (rule.retention_age_s, rule.retention_bytes) == (AUDIT_AGE_S, 0)
    assert rule.durability is Durability.WRITTEN
    own = Config(topics=(PrefixRule(prefix=AUDIT_TOPIC, retention_age_s=60.0),))
    assert own.rule(AUDIT_TOPIC).retention_age_s == 60.0
    assert own.rule("orders").retention_age_s == config.retention.age_s
