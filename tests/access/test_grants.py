"""Grants and their globs: what matches, what is refused, and that no mistake becomes a wider grant."""

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.access.grants import (
    EVERYTHING,
    Grant,
    Pattern,
    configured,
    is_old,
    parse_all,
    translated,
)
from headrace.access.operations import NAME_KINDS, Member, NameKind, Operation
from headrace.access.principals import OPEN, Kind, Principal, anonymous
from headrace.errors import BadGrantError

NAMES = st.text("ab/$*\\-é\u0085", max_size=12)
PATTERNS = st.text("ab/$*", min_size=1, max_size=12)


def allows(grant, operation, name):
    return Grant.parse(grant).allows(operation, name)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("orders", "orders"),
        ("orders/*", "orders/"),
        ("orders/*", "orders/a/b"),
        ("*", ""),
        ("*", "orders/a"),
        ("*/eu/*", "orders/eu/1"),
        ("a*a", "aa"),
        ("a*b*c", "a-b-b-c"),
        ("$*", "$audit"),
        ("$logux/*", "$logux/main"),
        (r"a\*b", "a*b"),
        (r"a\\*", "a\\b"),
        ("**", "orders"),
    ],
)
def test_a_pattern_matches(pattern, name):
    assert Pattern.parse(pattern).matches(name)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("orders", "orders/a"),
        ("orders/*", "orders"),
        ("orders/*", "order/a"),
        ("a*a", "a"),
        ("a*b*c", "a-c-b"),
        ("*", "$audit"),
        ("**", "$audit"),
        ("*audit", "$audit"),
        ("*$audit", "$audit"),
        ("$*", "audit"),
        (r"a\*b", "a-b"),
        ("[a]", "a"),
        ("?", "a"),
        ("Orders", "orders"),
    ],
)
def test_a_pattern_does_not_match(pattern, name):
    assert not Pattern.parse(pattern).matches(name)


@given(PATTERNS, NAMES)
def test_a_pattern_matches_as_the_shell_would_but_for_reserved_names(pattern, name):
    expected = fnmatch.fnmatchcase(name, pattern)
    if name.startswith("$") and pattern.startswith("*"):
        expected = False
    assert Pattern.parse(pattern).matches(name) == expected


@given(PATTERNS.filter(lambda pattern: not pattern.startswith("$")), NAMES)
def test_no_pattern_without_a_dollar_matches_a_reserved_name(pattern, name):
    assert not Pattern.parse(pattern).matches(f"${name}")


@given(NAMES.filter(bool))
def test_a_literal_pattern_means_the_same_when_it_is_read_again(name):
    pattern = Pattern.parse(str(Pattern.literal(name)))
    assert pattern == Pattern.literal(name)
    assert pattern.matches(name)
    assert not pattern.matches(f"{name}x")


class CountingName(str):  # noqa: SLOT000 - a subclass that counts
    """A name that counts the characters that each search may look at."""

    def __new__(cls, text):
        made = super().__new__(cls, text)
        made.searched = 0
        return made

    def find(self, part, at):
        found = super().find(part, at)
        end = len(self) if found < 0 else found + len(part)
        self.searched += end - at
        return found


@given(st.integers(1, 200), st.integers(1, 500))
def test_matching_takes_linear_time(stars, length):
    name = CountingName("a" * length)
    Pattern.parse("*a" * stars + "*b").matches(name)
    assert name.searched <= length


@pytest.mark.parametrize(
    "text",
    [
        "publish:orders/*",
        "publish,subscribe:orders/*",
        "subscribe:$audit",
        "cursors:group:orders",
        "join:orders/*",
        "join:a/b/worker-*",
        "as:alice",
        "admin:*",
        "all:*",
        "all:$*",
        r"publish:a\*",
        "inspect:*",
    ],
)
def test_a_grant_is_printed_as_it_was_written(text):
    assert str(Grant.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "publish",
        "publish:",
        ":orders",
        "*:orders",
        "*",
        "as",
        "as:",
        "a:*",
        "PUBLISH:orders",
        "publish :orders",
        "publish,:orders",
        "publish,as:*",
        "publish,join:a/b",
        "publsh:orders",
        "publish: orders",
        "publish:orders ",
        "publish:or\nders",
        "publish:or\u0085ders",
        "all:orders/*",
        "all,publish:*",
        "all:**",
        "admin:server",
        "join:orders",
        "join:/worker",
        "join:orders/",
        "publish:a\\",
        r"publish:a\b",
        "publish:" + "a" * 1024,
    ],
)
def test_a_mistake_is_refused_with_one_printable_sentence(text):
    with pytest.raises(BadGrantError) as refused:
        Grant.parse(text)
    assert str(refused.value).isprintable()


@given(st.text("publish,:*as$ad/", max_size=12))
def test_a_text_is_refused_or_grants_what_it_says(text):
    try:
        grant = Grant.parse(text)
    except BadGrantError:
        return
    assert Grant.parse(str(grant)) == grant
    for operation in Operation:
        name = Member("x", "y") if operation is Operation.JOIN else "x"
        if grant.allows(operation, name):
            assert operation in text or text.startswith("all:")


def test_a_grant_allows_only_its_operations():
    grant = "publish,subscribe:orders/*"
    assert allows(grant, Operation.PUBLISH, "orders/a")
    assert allows(grant, Operation.SUBSCRIBE, "orders/a")
    assert not allows(grant, Operation.CREATE, "orders/a")
    assert not allows(grant, Operation.ACT, "orders/a")


def test_no_slash_moves_the_border_between_channel_and_processor():
    assert allows("join:a/*", Operation.JOIN, Member("a", "b/c"))
    assert not allows("join:a/*", Operation.JOIN, Member("a/b", "c"))
    assert allows("join:a/*/c", Operation.JOIN, Member("a/b", "c"))
    assert not allows("join:a/*/c", Operation.JOIN, Member("a", "b/c"))


def test_the_name_of_a_producer_a_reader_or_a_user_is_in_a_space_of_its_own():
    for operation in Operation:
        if operation is not Operation.ACT and operation is not Operation.JOIN:
            assert not allows("as:a", operation, "a")
    assert not allows("subscribe:lake", Operation.CURSORS, "lake")


def every_name():
    for operation in Operation:
        if NAME_KINDS[operation] is NameKind.MEMBER:
            yield from (
                (operation, Member(*pair))
                for pair in (("a", "b"), ("$a", "b"), ("a", "$b"), ("$a", "$b"))
            )
        elif operation is Operation.ADMIN:
            yield operation, ""
        else:
            yield from ((operation, name) for name in ("a", "a/b", "$audit"))


def test_both_grants_of_everything_allow_everything():
    everyone = Principal(Kind.TOKEN, "admin", EVERYTHING)
    for operation, name in every_name():
        assert everyone.allows(operation, name)
        assert OPEN.allows(operation, name)
        assert not anonymous().allows(operation, name)


def test_the_first_grant_of_everything_leaves_out_reserved_names():
    [ordinary] = parse_all(["all:*"])
    assert ordinary.allows(Operation.DELETE, "orders")
    assert not ordinary.allows(Operation.SUBSCRIBE, "$audit")
    assert ordinary.allows(Operation.ADMIN, "")


# Grants of the first form


def principal(grants, user=None):
    return Principal(Kind.TOKEN, "old", translated(grants, user))


def test_an_old_token_without_grants_allows_everything():
    for operation, name in every_name():
        assert principal(None).allows(operation, name)


def test_an_old_token_of_a_user_acts_as_this_user_only():
    alice = principal(None, "alice")
    assert alice.allows(Operation.ACT, "alice")
    assert not alice.allows(Operation.ACT, "bob")
    assert alice.allows(Operation.JOIN, Member("orders", "alice:1"))
    assert not alice.allows(Operation.JOIN, Member("orders", "alice1"))
    assert not alice.allows(Operation.JOIN, Member("orders", "bob"))
    assert alice.may_join_as("alice")
    assert not alice.may_join_as("bob")


def test_the_old_grant_for_http_is_no_grant_to_act_as_a_user():
    http = principal(["http"])
    for operation, name in every_name():
        assert http.allows(operation, name) == (operation is not Operation.ACT)


def test_an_old_prefix_is_for_the_topics_that_begin_with_it():
    main = principal(["$logux/main"])
    assert main.allows(Operation.PUBLISH, "$logux/main2")
    assert main.allows(Operation.ACT, "anyone")
    assert not main.allows(Operation.PUBLISH, "$logux/other")
    assert not main.allows(Operation.DELETE, "$logux/main")
    assert not main.allows(Operation.JOIN, Member("orders", "alice"))
    channel = principal(["$channel/orders"], "alice")
    assert channel.allows(Operation.JOIN, Member("orders/eu", "alice"))
    assert not channel.allows(Operation.JOIN, Member("billing", "alice"))
    assert principal(["logux/main"]).allows(Operation.PUBLISH, "$logux/main")
    assert principal(["channel/"]).allows(Operation.JOIN, Member("orders", "alice"))
    assert principal([""]).allows(Operation.SUBSCRIBE, "$audit")
    assert principal(["a*"]).allows(Operation.PUBLISH, "a*b")
    assert not principal(["a*"]).allows(Operation.PUBLISH, "ab")


@given(st.lists(st.text("$logux/chanel*", max_size=10), max_size=3), NAMES)
def test_an_old_prefix_allows_the_same_topics_as_before(prefixes, rest):
    names = [f"{lead}{rest}" for lead in ("", "$logux/", "$channel/", "logux/", "$log")]
    for name in names:
        legacy = name[1:] if name.startswith(("$logux/", "$channel/")) else name
        before = any(known.startswith(prefix) for prefix in prefixes for known in (name, legacy))
        assert principal(prefixes).allows(Operation.PUBLISH, name) == before


def test_a_token_of_the_configuration_may_have_grants_of_both_forms():
    both = configured(["$logux/main", "inspect:*"], None)
    assert any(grant.allows(Operation.INSPECT, "") for grant in both)
    assert any(grant.allows(Operation.SUBSCRIBE, "$logux/main") for grant in both)
    only_new = configured(["publish:a"], None)
    assert not any(grant.allows(Operation.ACT, "alice") for grant in only_new)
    assert configured([], None) == ()
    with pytest.raises(BadGrantError, match="as:alice"):
        configured(["publish:a"], "alice")


def test_old_grants_are_recognised():
    assert is_old("http")
    assert is_old("$logux/main")
    assert is_old("$channel/a:b")
    assert not is_old("publish:orders")
    assert not is_old("publsh:orders")
