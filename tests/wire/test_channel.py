"""Channel messages: errors for clients that send invalid ones, and the fields of valid ones."""

import msgspec
import pytest

from headrace.payload.channel import BadMessageError
from headrace.wire import channel as wire
from headrace.wire.channel import message_fields


def refusal(text: str) -> str:
    with pytest.raises(wire.BadChannelMessageError) as caught:
        wire.decode(text)
    return str(caught.value)


def sending(payload: str) -> str:
    return f'{{"type":"send","channel":"c","number":1,"payload":{payload}}}'


@pytest.mark.parametrize(
    ("text", "half"),
    [
        (sending(r'"\ud83d"'), r"\ud83d"),
        (sending(r'"\uD83Dxxxxxxxxxx"'), r"\uD83D"),
        (sending(r'"\ud83d\n\u0041"'), r"\ud83d"),
        (sending(r'"\ude00\ud83d"'), r"\ude00"),
        (sending(r'"\ud83d\ude00\\\udc00"'), r"\udc00"),
        (sending(r'{"\ud83d":1}'), r"\ud83d"),
        (r'{"type":"join","channel":"\ud83d"}', r"\ud83d"),
    ],
)
def test_half_of_a_surrogate_pair_is_told_as_what_it_is(text: str, half: str) -> None:
    assert refusal(text) == (
        f"this is no message of a channel's client: {half} is one half of a surrogate pair, and no character"
    )


@pytest.mark.parametrize(
    "text",
    [
        '{"type":"send","chan',
        r'{"type":"join","channel":"\ud83',
        r'{"type":"join","channel":"\ud83d\ude00',
        r'{"type":"join","channel":"\\ud83d',
    ],
)
def test_what_was_cut_off_is_told_as_that(text: str) -> None:
    assert refusal(text).endswith("Input data was truncated")


def test_a_whole_pair_is_a_character() -> None:
    for payload in (r'"\ud83d\ude00"', r'"\\ud83d"', r'"\\\ud83d\ude00"'):
        message = wire.decode(sending(payload))
        assert isinstance(message, wire.Send)
        assert wire.content_of(message, binary=False) == (payload.encode(), True)


@pytest.mark.parametrize("binary", [False, True])
def test_a_content_is_one_of_two_fields(binary: bool) -> None:
    none = wire.Send("c", 1)
    with pytest.raises(BadMessageError, match=r"^it has neither a `payload` nor `bytes`$"):
        wire.content_of(none, binary=binary)
    both = wire.Send("c", 1, msgspec.Raw(b"1"), b"x")
    with pytest.raises(BadMessageError, match=r"^it has a `payload` and `bytes`"):
        wire.content_of(both, binary=binary)


def test_a_client_is_told_which_integers_there_are() -> None:
    for number in (-(2**63), 2**64 - 1):
        message_fields([number], "p")
    with pytest.raises(BadMessageError, match=r"int from -2\^63 to 2\^64-1"):
        message_fields([2**70 + 1], "p")


@pytest.mark.parametrize(
    ("fields", "origin", "lease_s"),
    [
        ("", msgspec.UNSET, msgspec.UNSET),
        (',"from":null,"lease_s":null', None, None),
        (',"from":"state","lease_s":60', "state", 60.0),
        (',"from":0,"lease_s":1.5', 0, 1.5),
    ],
)
def test_a_join_says_where_to_begin_and_for_how_long(
    fields: str, origin: object, lease_s: object
) -> None:
    message = wire.decode(f'{{"type":"join","channel":"c"{fields}}}')
    assert isinstance(message, wire.Join)
    assert (message.origin, message.lease_s) == (origin, lease_s)


@pytest.mark.parametrize(
    "fields",
    [
        *('"from":"end"', '"from":-1', '"from":1.5', f'"from":{2**63}', '"from":[]'),
        *('"lease_s":0.9', '"lease_s":31536001', '"lease_s":"60"'),
    ],
)
def test_a_join_that_makes_no_sense_is_refused(fields: str) -> None:
    assert refusal(f'{{"type":"join","channel":"c",{fields}}}')


def test_a_join_of_an_older_client_is_the_same_bytes_as_ever() -> None:
    joined = msgspec.json.encode(wire.Join("c", "poll"))
    assert joined == b'{"type":"join","channel":"c","receive":"poll"}'
    assert msgspec.json.encode(wire.Leave("c")) == b'{"type":"leave","channel":"c"}'
