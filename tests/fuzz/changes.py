"""Deterministic changes of a target's inputs, as a fuzzer makes them: of bytes, and of values in messages.

Changed bytes of JSON are rarely JSON, so most changes are made in a decoded value, which is encoded again.
Elsewhere: checksums, which would refuse every change of a file (`checksums.py`).
"""

import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import msgspec

from tests.fuzz.checksums import changed_journal, with_checksums_of_blocks
from tests.fuzz.corpus import SEEDS, joined
from tests.fuzz.targets import messages_of

_SINGLE = {"logux_messages", "channel_messages", "payloads"}
"""Targets whose input is one message."""
_SEVERAL = {
    *("wombat_server", "wombat_client", "wombat_session"),
    *("logux_session", "logux5_session", "channel_session"),
}
"""Targets whose input is the messages of one connection."""

_BYTES = (
    *(b"\x00", b"\xff", b"\x7f", b"\x80", b"\xff" * 4, b"\x00" * 8, b"\xa0"),
    *(b"\r\n", b"\n", b":", b"$"),
)
_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 255, 65_536, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1),
    *(0.5, -0.0, 1e300, "", "$", "$channel/c", "é\u202e", "a b", "a" * 120, "0" * 30),
    *([], {}, [[]], {"type": "a"}, [0, 0]),
]


def changed(target: str, data: bytes, chance: random.Random) -> bytes:
    """Return an input of a target with one to four changes."""
    if target in _SINGLE and chance.randrange(4):
        return _with_changed_value(target, data, chance)
    if target in _SEVERAL and chance.randrange(4):
        return _with_changed_messages(target, data, chance)
    if target == "journal":
        return changed_journal(data, chance, changed_bytes)
    data = changed_bytes(data, chance)
    if target == "batch_blocks" and chance.randrange(4):
        return with_checksums_of_blocks(data)
    return data


def changed_bytes(data: bytes, chance: random.Random) -> bytes:
    """Return bytes with one to four changes."""
    made = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(made) + 1)
        kind = chance.randrange(6)
        if kind == 0 and made:
            made[at % len(made)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            made[at:at] = chance.choice(_BYTES)
        elif kind == 2:
            del made[at : at + chance.randint(1, 8)]
        elif kind == 3:
            del made[at:]
        elif kind == 4:
            made[at:at] = made[at : at + chance.randint(1, 60)]
        else:
            made[at : at + 4] = chance.randbytes(4)
    return bytes(made)


def _with_changed_messages(target: str, data: bytes, chance: random.Random) -> bytes:
    messages = messages_of(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(messages) + 1)
        kind = chance.randrange(8)
        if kind == 0:
            del messages[at : at + 1]
        elif kind == 1:
            messages.insert(at, chance.choice(_messages_of_seeds(target)))
        elif kind == 2 and messages:
            messages.insert(at, chance.choice(messages))
        elif messages:
            at = chance.randrange(len(messages))
            messages[at] = _with_changed_value(target, messages[at], chance)
    return joined(messages)


def _with_changed_value(target: str, message: bytes, chance: random.Random) -> bytes:
    """Return a message with a change in its value; if it has none, with changed bytes."""
    for codec in (msgspec.json, msgspec.msgpack):
        try:
            value = codec.decode(message)
            return codec.encode(_changed_value(value, chance, _words(target)))
        except (msgspec.DecodeError, ValueError, TypeError, OverflowError, RecursionError):
            continue
    return changed_bytes(message, chance)


def _changed_value(value: Any, chance: random.Random, words: list[str]) -> Any:
    """Return a value with one change somewhere inside it."""

    def other() -> Any:
        return chance.choice(words if chance.randrange(2) else _VALUES)

    kind = chance.randrange(10)
    if isinstance(value, list):
        made, at = list(value), chance.randrange(len(value) + 1)
        if kind == 0:
            del made[at : at + 1]
        elif kind == 1:
            made.insert(at, other())
        elif kind == 2 and made:
            made.insert(at, chance.choice(made))
        elif made:
            at = chance.randrange(len(made))
            made[at] = _changed_value(made[at], chance, words)
        return made
    if isinstance(value, dict) and value:
        fields, key = dict(value), chance.choice(list(value))
        if kind == 0:
            del fields[key]
        elif kind == 1:
            fields[chance.choice(words)] = other()
        elif kind == 2:
            fields[chance.choice(words)] = fields.pop(key)
        else:
            fields[key] = _changed_value(fields[key], chance, words)
        return fields
    if type(value) is int and kind < 4:
        return value + chance.choice((-1, 1))
    if isinstance(value, str | bytes) and kind < 3:
        return value + value
    if isinstance(value, bytes) and kind < 7:
        return changed_bytes(value, chance)
    return other()


@cache
def _messages_of_seeds(target: str) -> list[bytes]:
    seeds = SEEDS[target]
    return [one for seed in seeds for one in messages_of(seed)] if target in _SEVERAL else seeds


@cache
def _words(target: str) -> list[str]:
    """Return all strings in the values of the target's seeds, in a fixed order."""
    found: dict[str, None] = {}
    for message in _messages_of_seeds(target):
        for decode in (msgspec.json.decode, msgspec.msgpack.decode):
            try:
                found |= dict.fromkeys(_strings_in(decode(message)))
                break
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
    return list(found)


def _strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _strings_in(one)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _strings_in(key)
            yield from _strings_in(one)


Mutate = Callable[[bytes, int], bytes]


def mutator(target: str, mutate: Mutate) -> Callable[[bytes, int, int], bytes]:
    """Return a mutator for libFuzzer: half of its changes are those of `mutate`, libFuzzer's own."""

    def custom(data: bytes, bytes_max: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if chance.randrange(2):
            return changed(target, data, chance)[:bytes_max]
        made = mutate(data, bytes_max)
        if target == "batch_blocks" and chance.randrange(2):
            return with_checksums_of_blocks(made)
        return made

    return custom
