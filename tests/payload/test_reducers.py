"""Folding of a channel's messages into its state: the state is the same however calls divide the messages."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.payload import reducers
from headrace.payload.channel import Content, StoredMessage, check_json
from headrace.payload.json_limits import DEPTH_MAX
from headrace.payload.reducers import CannotFoldError, UnknownReducerError, reducer

keys = st.sampled_from(["a", "b", "é", 'q"', ""])
leaves = (
    st.none() | st.booleans() | st.integers() | st.text("xé\n", max_size=3)
    | st.floats(allow_nan=False, allow_infinity=False)
)  # fmt: skip
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)
patches = st.dictionaries(keys, values, max_size=4) | values
changes = st.builds(lambda key, value: {"key": key, "value": value}, keys, values) | st.builds(
    lambda key: {"key": key, "delete": True}, keys
)
bytes_or_json = st.binary(max_size=5) | values
cuts = st.lists(st.integers(0, 30), max_size=5)


def content(value: Any) -> Content:
    if isinstance(value, bytes):
        return Content(value, is_json=False)
    return Content(json.dumps(value, ensure_ascii=False).encode(), is_json=True)


def text(data: str) -> Content:
    return Content(data.encode(), is_json=True)


def messages(*values: Any) -> list[StoredMessage]:
    return [
        StoredMessage("a", number, value if isinstance(value, Content) else content(value))
        for number, value in enumerate(values, 1)
    ]


def fold(name: str, *values: Any, state: Content | None = None) -> Any:
    """Return the state as a Python value."""
    folded = reducer(name).fold(state, messages(*values))
    assert folded is not None
    return json.loads(folded.data) if folded.is_json else folded.data


def fold_in_pieces(
    one: reducers.Reducer, sent: list[StoredMessage], at: list[int]
) -> Content | None:
    state = None
    places = [0, *sorted(at), len(sent)]
    for start, end in pairwise(places):
        state = one.fold(state, iter(sent[start:end]))
    return state


# All reducers


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("last", Content(b"\xff", is_json=False)),
        ("merge", text("[ ]")),
        ("map", text('{"a": 1}')),
        ("count", text(" 5 ")),
        ("tests.payload.test_reducers:gather", text("[ ]")),
    ],
)
def test_without_messages_the_state_stays(name, state):
    assert reducer(name).fold(state, []) is state
    assert reducer(name).fold(None, iter([])) is None


@pytest.mark.parametrize("name", ["last", "merge", "map", "count", "uploaded"])
def test_a_reducer_is_known_by_its_name(name):
    found = reducer(name)
    assert (found.name, found.is_uploaded) == (name, name == "uploaded")


@pytest.mark.parametrize("name", ["", "Last", "maps", "json"])
def test_a_name_that_is_none_is_refused_with_those_there_are(name):
    with pytest.raises(
        UnknownReducerError,
        match=f"there is no reducer '{name}': use last, merge, map, count, uploaded or module",
    ):
        reducer(name)


def test_a_state_that_another_reducer_has_made_is_refused():
    for name, state in [
        ("count", text('"x"')),
        ("count", Content(b"5", is_json=False)),
        ("map", text("[]")),
        ("merge", Content(b"{}", is_json=False)),
    ]:
        with pytest.raises(CannotFoldError, match="the state is "):
            reducer(name).fold(state, messages({"key": "a", "value": 1}))


# Reducers that accept any message


@given(st.lists(bytes_or_json, min_size=1, max_size=20), cuts)
def test_last_is_the_content_of_the_last_message(sent, at):
    one, all_ = reducer("last"), messages(*sent)
    for message in all_:
        one.check(message.content)
    assert fold_in_pieces(one, all_, at) == content(sent[-1])


@given(st.lists(bytes_or_json, min_size=1, max_size=20), cuts)
def test_count_is_the_number_of_messages(sent, at):
    one, all_ = reducer("count"), messages(*sent)
    for message in all_:
        one.check(message.content)
    assert fold_in_pieces(one, all_, at) == text(str(len(sent)))


@pytest.mark.parametrize("name", ["last", "count"])
def test_these_decode_nothing(name):
    broken = Content(b"\xff no JSON", is_json=True)
    reducer(name).check(broken)
    assert reducer(name).fold(None, messages(broken)) in (broken, text("1"))


def test_what_is_uploaded_is_not_folded():
    one = reducer("uploaded")
    one.check(content(b"\xff"))
    one.check(content({"a": 1}))
    with pytest.raises(CannotFoldError, match="is uploaded, not folded"):
        one.fold(None, messages(1))


# Merge


@pytest.mark.parametrize(
    ("original", "patch", "result"),
    [
        ('{"a":"b"}', '{"a":"c"}', '{"a":"c"}'),
        ('{"a":"b"}', '{"b":"c"}', '{"a":"b","b":"c"}'),
        ('{"a":"b"}', '{"a":null}', "{}"),
        ('{"a":"b","b":"c"}', '{"a":null}', '{"b":"c"}'),
        ('{"a":["b"]}', '{"a":"c"}', '{"a":"c"}'),
        ('{"a":"c"}', '{"a":["b"]}', '{"a":["b"]}'),
        ('{"a":{"b":"c"}}', '{"a":{"b":"d","c":null}}', '{"a":{"b":"d"}}'),
        ('{"a":[{"b":"c"}]}', '{"a":[1]}', '{"a":[1]}'),
        ('["a","b"]', '["c","d"]', '["c","d"]'),
        ('{"a":"b"}', '["c"]', '["c"]'),
        ('{"a":"foo"}', "null", "null"),
        ('{"a":"foo"}', '"bar"', '"bar"'),
        ('{"e":null}', '{"a":1}', '{"e":null,"a":1}'),
        ("[1,2]", '{"a":"b","c":null}', '{"a":"b"}'),
        ("{}", '{"a":{"bb":{"ccc":null}}}', '{"a":{"bb":{}}}'),
    ],
)
def test_examples_of_rfc_7386(original, patch, result):
    assert reducer("merge").fold(text(original), messages(text(patch))) == text(result)


def merge_patch(target: Any, patch: Any) -> Any:
    """The pseudo code of RFC 7386, section 2."""
    if isinstance(patch, dict):
        if not isinstance(target, dict):
            target = {}
        for name, value in patch.items():
            if value is None:
                if name in target:
                    del target[name]
            else:
                target[name] = merge_patch(target.get(name), value)
        return target
    return patch


@given(st.lists(patches, min_size=1, max_size=12), cuts)
@example([{"a": {"b": None}}, {"a": 1}, {"a": {"c": {"d": None}}}], [1])
def test_merge_is_as_the_rfc_says_however_messages_are_cut(sent, at):
    one, all_ = reducer("merge"), messages(*sent)
    expected = None
    for value in sent:
        one.check(content(value))
        expected = merge_patch(expected, json.loads(json.dumps(value)))
    state = one.fold(None, all_)
    assert state is not None
    assert json.loads(state.data) == expected
    assert fold_in_pieces(one, all_, at) == state


def test_a_patch_that_is_no_object_replaces_everything():
    assert fold("merge", {"a": 1}, 5) == 5
    assert fold("merge", {"a": 1}, None, {"b": None, "c": [None]}) == {"c": [None]}
    assert fold("merge", {"a": None}) == {}


def test_merging_keeps_numbers_as_they_were_written():
    numbers = "[1.10,1e5,-0.0,3.14159265358979323846,1E-400,18446744073709551617]"
    state = reducer("merge").fold(None, messages(text(f'{{"a": {numbers}}}'), {"b": 1}))
    assert state == text(f'{{"a":{numbers},"b":1}}')


def test_only_json_is_merged():
    one = reducer("merge")
    with pytest.raises(CannotFoldError, match="it is bytes, and this reducer takes JSON"):
        one.check(content(b"{}"))
    with pytest.raises(
        CannotFoldError, match='message 2 of "a" cannot be folded: it is bytes, and'
    ):
        one.fold(None, messages({}, b"{}"))
    with pytest.raises(CannotFoldError, match="cannot be folded: it is not what this reducer"):
        one.fold(None, messages(text("{")))


def test_patches_as_deep_as_they_may_be_make_a_state_that_is_no_deeper():
    deep = text('{"a":' * DEPTH_MAX + "1" + "}" * DEPTH_MAX)
    state = reducer("merge").fold(None, messages(deep, {"b": [1]}, deep))
    assert state is not None
    check_json(state.data)


# Map


@given(st.lists(changes, min_size=1, max_size=20), cuts)
def test_map_is_a_dict_however_messages_are_cut(sent, at):
    one, all_ = reducer("map"), messages(*sent)
    model: dict[str, Any] = {}
    for change in sent:
        one.check(content(change))
        if "value" in change:
            model[change["key"]] = change["value"]
        else:
            model.pop(change["key"], None)
    state = one.fold(None, all_)
    assert state is not None
    assert list(json.loads(state.data).items()) == list(model.items())
    assert fold_in_pieces(one, all_, at) == state


def test_a_value_stays_as_it_was_written():
    sent = messages(
        text('{"value" : [ 1.50, 1e5 ] , "key":"a"}'), text('{"key":"\\u00e9","value":null}')
    )
    state = reducer("map").fold(None, sent)
    assert state == text('{"a":[ 1.50, 1e5 ],"é":null}')


def test_keys_are_in_the_order_of_their_first_writing_since_they_were_deleted():
    sent = [{"key": key, "value": 1} for key in "abc"]
    sent += [{"key": "b", "value": 2}, {"key": "a", "delete": True}, {"key": "a", "value": 3}]
    assert list(fold("map", *sent)) == ["b", "c", "a"]
    assert fold("map", {"key": "a", "delete": True}) == {}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (b"{}", "bytes, and this reducer takes JSON"),
        (5, "Expected `object`"),
        ([], "Expected `object`"),
        ({}, "missing required field `key`"),
        ({"value": 1}, "missing required field `key`"),
        ({"key": 5, "value": 1}, "Expected `str`"),
        ({"key": None, "delete": True}, "Expected `str`"),
        ({"key": "a"}, "either a `value`, or a `delete` that is true"),
        ({"key": "a", "delete": False}, "either a `value`"),
        ({"key": "a", "delete": None}, "Expected `bool`"),
        ({"key": "a", "delete": 1}, "Expected `bool`"),
        ({"key": "a", "value": 1, "delete": True}, "either a `value`"),
        ({"key": "a", "value": 1, "delete": False}, "either a `value`"),
        ({"key": "a", "value": 1, "more": 1}, "unknown field `more`"),
    ],
)
def test_what_is_no_change_of_a_map_is_refused_at_once(change, reason):
    with pytest.raises(CannotFoldError, match=f"^it .*{reason}"):
        reducer("map").check(content(change))
    with pytest.raises(CannotFoldError, match=f'message 2 of "a" cannot be folded: it .*{reason}'):
        reducer("map").fold(None, messages({"key": "a", "value": 1}, change))


def test_values_as_deep_as_they_may_be_make_a_state_that_is_no_deeper():
    depth = DEPTH_MAX - 1
    change = text('{"key":"a","value":' + "[" * depth + "1" + "]" * depth + "}")
    check_json(change.data)
    state = reducer("map").fold(None, messages(change))
    assert state is not None
    check_json(state.data)


# Sizes


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(reducers, "STATE_BYTES_MAX", 40)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("map", lambda key, value: {"key": key, "value": value}),
        ("merge", lambda key, value: {key: value}),
    ],
)
def test_a_state_grows_up_to_its_limit_and_shrinks_again(name, make):
    largest = "x" * (40 - len('{"a":""}'))
    assert len(fold(name, make("a", largest))["a"]) == len(largest)
    with pytest.raises(
        CannotFoldError,
        match=r'message 3 of "a" .*: a state may have 40 bytes, this one would have',
    ):
        fold(name, make("a", 1), make("b", 2), make("a", largest))
    assert fold(name, *[make("a", number) for number in range(100)]) == {"a": 99}


@given(
    st.lists(changes | patches, min_size=1, max_size=20), cuts, st.sampled_from(["map", "merge"])
)
def test_folding_fails_at_the_same_message_however_messages_are_cut(sent, at, name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducers, "STATE_BYTES_MAX", 40)
        one, all_ = reducer(name), messages(*sent)

        def outcome(folded: Callable[[], Content | None]) -> Any:
            try:
                return folded()
            except CannotFoldError as error:
                return str(error)

        whole = outcome(lambda: one.fold(None, all_))
        assert whole == outcome(lambda: fold_in_pieces(one, all_, at))
        assert whole == outcome(lambda: fold_in_pieces(one, all_, list(range(len(all_)))))


def test_the_limit_is_a_mebibyte():
    value = "x" * 200_000
    sent = [{"key": str(number), "value": value} for number in range(6)]
    fold("map", *sent[:5])
    with pytest.raises(CannotFoldError, match="may have 1048576 bytes"):
        fold("map", *sent)


# Functions of the application


def gather(state, message):
    return [*(state or []), message]


def total(state, message):
    return {"total": (state or {"total": 0})["total"] + message["n"]}


def check_total(message):
    if message["n"] < 0:
        raise ValueError("it goes down")


total.check = check_total

OF_TEST = "app:function"


def of(function: Any) -> reducers.Reducer:
    return reducer(OF_TEST, lambda _: function)


@given(st.lists(values, min_size=1, max_size=12), cuts)
def test_a_function_gives_the_state_however_messages_are_cut(sent, at):
    one, all_ = reducer("tests.payload.test_reducers:gather"), messages(*sent)
    state = one.fold(None, all_)
    assert state is not None
    assert json.loads(state.data) == sent
    assert fold_in_pieces(one, all_, at) == state


def test_a_function_is_found_by_whoever_loads_it():
    asked = []

    def load(name):
        asked.append(name)
        return total

    one = reducer(OF_TEST, load)
    assert (one.name, one.is_uploaded, asked) == (OF_TEST, False, [OF_TEST])
    assert one.fold(text('{"total":5}'), messages({"n": 1}, {"n": 2})) == text('{"total":8}')


@pytest.mark.parametrize(
    "name",
    [
        "no.such.module:f",
        "tests.payload.test_reducers:nothing",
        "tests.payload.test_reducers:",
        ":f",
        ".a:f",
        "a:b:c",
    ],
)
def test_a_function_that_is_not_there_is_refused(name):
    with pytest.raises(UnknownReducerError, match=f"reducer '{name}' cannot be loaded: "):
        reducer(name)


def test_what_is_named_has_to_be_a_function():
    with pytest.raises(
        UnknownReducerError, match=r"'tests.payload.test_reducers:OF_TEST' is not a funct"
    ):
        reducer("tests.payload.test_reducers:OF_TEST")


def test_a_function_is_given_exact_integers_and_bytes():
    given_: list[Any] = []

    def keep(state, message):
        given_.append((state, message))
        return message

    exact = 2**64 + 1
    state = of(keep).fold(None, messages({"n": exact}, b"\xff", [exact]))
    assert given_ == [(None, {"n": exact}), ({"n": exact}, b"\xff"), (b"\xff", [exact])]
    assert state == text(f"[{exact}]")
    assert of(keep).fold(None, messages(b"\xff")) == Content(b"\xff", is_json=False)


def test_a_function_may_refuse_messages():
    one = reducer("tests.payload.test_reducers:total")
    one.check(content({"n": 1}))
    with pytest.raises(CannotFoldError, match="total refuses it: ValueError: it goes down"):
        one.check(content({"n": -1}))
    with pytest.raises(CannotFoldError, match="total refuses it: KeyError: 'n'"):
        one.check(content({}))
    of(gather).check(content(b"anything"))


def test_a_function_that_fails_is_named_with_the_message_and_the_reason():
    with pytest.raises(
        CannotFoldError,
        match="message 2 of \"a\" cannot be folded: app:function has failed: KeyError: 'n'",
    ):
        of(total).fold(None, messages({"n": 1}, {}))


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (object(), "app:function returns neither JSON nor bytes: "),
        ({(1, 2): 3}, "app:function returns neither JSON nor bytes: "),
        (["\ud800"], "app:function returns neither JSON nor bytes: "),
        ([10**5000], "app:function returns neither JSON nor bytes: "),
        ({"a": (1, 2)}, "the state that app:function returns changes when it is encoded as JSON"),
        ({1: 2}, "the state that app:function returns changes when it is encoded as JSON"),
        ([float("nan")], "the state that app:function returns changes when it is encoded as JSON"),
        (
            [datetime.now(UTC)],
            "the state that app:function returns changes when it is encoded as JSON",
        ),
        ([b"x"], "the state that app:function returns changes when it is encoded as JSON"),
        ([10**309], "returns has an integer that is too large for a float"),
        (json.loads("[" * 101 + "1" + "]" * 101), "returns has arrays and objects that lie more"),
    ],
)
def test_a_state_that_cannot_be_kept_is_refused(state, reason):
    with pytest.raises(CannotFoldError, match=reason):
        of(lambda _, message: state).fold(None, messages(1))


@pytest.mark.parametrize("unit", ["x", b"x"])
def test_a_state_that_a_function_gives_has_the_same_limit(unit):
    with pytest.raises(CannotFoldError, match="may have 1048576 bytes, this one would have 1048"):
        of(lambda _, message: unit * ((1 << 20) + 1)).fold(None, messages(1))


def test_a_function_that_only_collects_is_stopped_before_it_fills_the_memory():
    def endless():
        for number in range(1, 1000):
            yield StoredMessage("a", number, content("x" * 100_000))
        pytest.fail("it collected all")

    with pytest.raises(CannotFoldError, match=r'message 11 of "a" .* a state may have 1048576'):
        of(gather).fold(None, endless())
