"""Bytes that are kept under a prefix: the counts alone, and those of a store compared with its topics."""

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.settings import Config, Journal, Limits, PrefixRule, Segment
from headrace.log.quota import Kept, Meter, Quotas
from headrace.log.records import pack_record
from headrace.model import CHANNEL_PREFIX, JUMP, Durability, Position, Span
from tests.fakes.store import StepStore


def position(offset: int, ordinal: int = 0) -> Position:
    return Position(1, offset, ordinal)


def made(**quotas: int) -> tuple[Quotas, list[Meter]]:
    freed: list[Meter] = []
    found = Quotas()
    found.set(quotas, lambda prefix: ())
    found.freed = freed.append
    return found, freed


def test_bytes_that_wait_for_their_commit_count():
    quotas, _ = made(a=100)
    [meter] = quotas.of("a/1")
    quotas.appending("a/1", [bytes(30), bytes(30)])
    assert not meter.is_full
    quotas.appending("a/2", [bytes(40)])
    assert meter.is_full
    quotas.appended("a/1", 60)
    assert (meter.bytes, meter.pending) == (60, 40) and meter.is_full


def test_a_topic_counts_for_every_prefix_it_has():
    quotas, _ = made(a=100, ab=100, c=100)
    assert [meter.prefix for meter in quotas.of("abc")] == ["a", "ab"]
    assert quotas.of("x") == ()


def test_room_is_announced_once_when_a_full_prefix_has_some_again():
    quotas, freed = made(a=100)
    quotas.appended("a", 150)
    quotas.deleted("a", position(0), position(20))
    assert not freed
    quotas.deleted("a", position(20), position(60))
    quotas.deleted("a", position(60), position(70))
    assert [meter.prefix for meter in freed] == ["a"]


def test_a_jump_is_not_counted():
    quotas, _ = made(a=100)
    quotas.appended("a", 50)
    quotas.deleted("a", position(0), position(50 + JUMP, 5 + JUMP))
    [meter] = quotas.of("a")
    assert meter.bytes == 0


def test_a_new_quota_counts_what_is_there_and_a_greater_one_makes_room():
    quotas, freed = made(a=100)
    quotas.set({"a": 100, "b": 10}, lambda prefix: [Kept(f"{prefix}/1", position(5), position(25))])
    [meter] = quotas.of("b/1")
    assert meter.bytes == 20 and meter.is_full
    quotas.appended("a/1", 100)
    freed.clear()
    quotas.set({"a": 200, "b": 10}, lambda prefix: ())
    assert [one.prefix for one in freed] == ["a"]
    quotas.set({"a": 200}, lambda prefix: ())
    assert [one.prefix for one in freed] == ["a", "b"]
    assert quotas.of("b/1") == ()


def test_a_meter_that_is_younger_than_a_request_never_counts_below_zero():
    quotas, _ = made(a=100)
    quotas.appended("a", 10)
    [meter] = quotas.of("a")
    assert (meter.bytes, meter.pending) == (10, 0)


# A store


def config(path: Path) -> Config:
    return Config(
        data_dir=path,
        journal=Journal(file_bytes=1 << 16, files=3),
        segment=Segment(bytes=256),
        limits=Limits(memory_topic_bytes_max=200),
        topics=(
            PrefixRule(prefix="a/", quota_bytes=1000),
            PrefixRule(prefix="a/m", durability=Durability.MEMORY, quota_bytes=500),
            PrefixRule(prefix="", quota_bytes=100_000),
        ),
    )


NAMES = ("a/1", "a/2", "a/m", "b", f"{CHANNEL_PREFIX}c")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from(NAMES), st.integers(0, 60)),
        st.tuples(st.just("trim"), st.sampled_from(NAMES), st.integers(0, 400)),
        st.tuples(st.just("destroy"), st.sampled_from(NAMES), st.just(0)),
        st.tuples(st.just("run"), st.just(""), st.just(0)),
        st.tuples(st.sampled_from(["restart", "settle"]), st.just(""), st.just(0)),
    ),
    max_size=30,
)


def check(store: StepStore) -> None:
    store.runner.run()
    topics = store.store.topics("", "", 100)
    assert store.store.count_topics("") == len(topics)
    channels = sum(topic.name.startswith(CHANNEL_PREFIX) for topic in topics)
    assert store.store.count_topics(CHANNEL_PREFIX) == channels
    for prefix, meter in store.store.quotas.meters.items():
        inside = [topic for topic in topics if topic.name.startswith(prefix)]
        kept = sum(Span.between(topic.start, topic.end).bytes for topic in inside)
        assert (meter.bytes, meter.pending) == (kept, 0)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_the_counts_of_a_store_are_those_of_its_topics(tmp_path_factory, steps):
    store = StepStore(config(tmp_path_factory.mktemp("quota") / "data"))
    try:
        for step, name, number in steps:
            if step == "append":
                store.store.append(
                    {store.store.topic(name): [pack_record(bytes(number))]}, lambda: None
                )
            elif step == "run":
                check(store)
            elif step == "restart":
                store.runner.run()
                store.crash()
                store = StepStore(store.config)
            elif step == "settle":
                store.settle()
            else:
                store.runner.run()
                topic = store.store.topic(name)
                if not topic.exists:
                    continue
                if step == "destroy":
                    store.store.destroy(topic, lambda: None)
                else:
                    at = store.store.locate_offset(
                        topic, min(topic.start_offset + number, topic.end_offset)
                    )
                    store.store.trim(topic, at, lambda: None)
        check(store)
    finally:
        store.crash()
