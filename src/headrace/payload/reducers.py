"""How the messages of a channel fold into its last known state. Neither keeps it nor says when.

A reducer remembers nothing between calls: `fold` is given a state and the messages behind it. However these
are cut into calls, the state is the same to the byte; and what is built in fails at the same message.
"""

import importlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, Raw, UnsetType

from headrace.channel_envelope import Content, Message
from headrace.errors import HeadraceError
from headrace.json_limits import BadJSONError, decode_json

STATE_BYTES_MAX = 1 << 20
"""The largest state, inclusive."""

Function = Callable[..., Any]


class CannotFoldError(HeadraceError, ValueError):
    """A message cannot become part of the state: the text says why. The state before it is still good."""


class UnknownReducerError(HeadraceError, ValueError):
    """The caller named a reducer that is not there: use one that is built in, or `module:function`."""


class Reducer(Protocol):
    name: str
    is_uploaded: bool
    """Whether a processor uploads the state: then nothing is folded here."""

    def check(self, content: Content) -> None:
        """Raise CannotFoldError for a message that it could not fold."""

    def fold(self, state: Content | None, messages: Iterable[Message]) -> Content | None:
        """The state after these messages; None while there was none at all. Raises `CannotFoldError`."""


def reducer(name: str, load: Callable[[str], Function] | None = None) -> Reducer:
    """The one of this name; `load` finds the function where it is `module:function`."""
    if ":" in name:
        return _Calling(name, (load or _load)(name))
    for one in _BUILT_IN:
        if one.name == name:
            return one
    names = ", ".join(one.name for one in _BUILT_IN)
    raise UnknownReducerError(f"there is no reducer {name!r}: use {names} or module:function")


def _load(name: str) -> Function:
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UnknownReducerError(f"reducer {name!r} cannot be loaded: {error}") from None
    if not callable(found):
        raise UnknownReducerError(f"reducer {name!r} is not a function")
    return found  # type: ignore[no-any-return]


# Those that take any message


class _Last:
    name = "last"
    is_uploaded = False

    def check(self, content: Content) -> None:
        pass

    def fold(self, state: Content | None, messages: Iterable[Message]) -> Content | None:
        last = deque(messages, maxlen=1)
        return last[0].content if last else state


class _Count:
    name = "count"
    is_uploaded = False

    def check(self, content: Content) -> None:
        pass

    def fold(self, state: Content | None, messages: Iterable[Message]) -> Content | None:
        before = _decoded("the state", state, _decode_count) if state else 0
        counted = deque(enumerate(messages, before + 1), maxlen=1)
        return Content(b"%d" % counted[0][0], is_json=True) if counted else state


class _Uploaded:
    name = "uploaded"
    is_uploaded = True

    def check(self, content: Content) -> None:
        pass

    def fold(self, state: Content | None, messages: Iterable[Message]) -> Content | None:
        raise CannotFoldError("the state of this channel is uploaded, not folded")


# Those that take JSON


class _Merge:
    """RFC 7386. The first patch is applied to nothing: nulls in it are not kept either."""

    name = "merge"
    is_uploaded = False

    def check(self, content: Content) -> None:
        _check_is_json("it", content)

    def fold(self, state: Content | None, messages: Iterable[Message]) -> Content | None:
        value = _decoded("the state", state, _decode_tree) if state else None
        return _folded(state, value, messages, self._apply, _keep)

    def _apply(self, value: Any, content: Content) -> Any:
        return _merged(value, _decoded("it", content, _decode_tree))


def _merged(target: Any, patch: Any) -> Any:
    if type(patch) is not dict:
        return patch
    if type(target) is not dict:
        target = {}
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        else:
            target[key] = _merged(target.get(key), value) if type(value) is dict else value
    return target


class _Map:
    """The last value of each key; in the order in which keys were written first since they were deleted."""

    name = "map"
    is_uploaded = False

    def check(self, content: Content) -> None:
        self._apply({}, content)

    def fold(self, state: Content | None, messages: Iterable[Message]) -> Content | None:
        value = _decoded("the state", state, _decode_map) if state else {}
        return _folded(state, value, messages, self._apply, _keep)

    def _apply(self, value: dict[str, Raw], content: Content) -> dict[str, Raw]:
        change = _decoded("it", content, _decode_change)
        is_write = change.value is not _ABSENT
        if change.delete is not (UNSET if is_write else True):
            raise CannotFoldError("it has neither only a `value` nor only a `delete` that is true")
        if is_write:
            # A copy: the whole message would stay in memory, and may be much larger.
            value[change.key] = change.value.copy()
        else:
            value.pop(change.key, None)
        return value


_ABSENT = Raw()


class _Change(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    key: str
    value: Raw = _ABSENT
    delete: bool | UnsetType = UNSET


_encode = msgspec.json.Encoder().encode
_decode_count = msgspec.json.Decoder(int).decode
_decode_map = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_change = msgspec.json.Decoder(_Change).decode
# Numbers stay as they were written: nothing is lost, and what is encoded is no longer than what was decoded.
_decode_tree = msgspec.json.Decoder(float_hook=Raw).decode


def _folded(
    state: Content | None,
    value: Any,
    messages: Iterable[Message],
    apply: Callable[[Any, Content], Any],
    keep: Callable[[Any], Content],
) -> Content | None:
    number = 0
    # Never less than the size of the value, where all that a message adds was in the message.
    size = len(state.data) if state else 0
    for processor, number, content in messages:
        try:
            value = apply(value, content)
            size += len(content.data)
            if size > STATE_BYTES_MAX:
                size = len(keep(value).data)
        except CannotFoldError as error:
            raise CannotFoldError(
                f"message {number} of {processor!r} cannot be folded: {error}"
            ) from error
    return keep(value) if number else state


def _keep(value: Any) -> Content:
    return _sized(Content(_encode(value), is_json=True))


def _sized(state: Content) -> Content:
    if len(state.data) > STATE_BYTES_MAX:
        raise CannotFoldError(
            f"a state may have {STATE_BYTES_MAX} bytes, this one would have {len(state.data)}"
        )
    return state


def _decoded(what: str, content: Content, decode: Callable[[bytes], Any]) -> Any:
    _check_is_json(what, content)
    try:
        return decode(content.data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, BadJSONError) as error:
        raise CannotFoldError(f"{what} is not what this reducer takes: {error}") from None


def _check_is_json(what: str, content: Content) -> None:
    if not content.is_json:
        raise CannotFoldError(f"{what} is bytes, and this reducer takes JSON")


# Functions of the application


class _Calling:
    """`function(state, message)` gives the next state; `function.check(message)` may refuse a message.

    What it gives is looked at once in a call of `fold`, and for every so many bytes of messages: not each
    time, which would cost as much as the state is large.
    """

    is_uploaded = False

    def __init__(self, name: str, function: Function) -> None:
        self.name = name
        self._function = function
        self._check: Function | None = getattr(function, "check", None)

    def check(self, content: Content) -> None:
        if self._check is None:
            return
        message = _plain("it", content)
        try:
            self._check(message)
        except Exception as error:
            raise CannotFoldError(f"{self.name} refuses it: {_told(error)}") from error

    def fold(self, state: Content | None, messages: Iterable[Message]) -> Content | None:
        value = _plain("the state", state) if state else None
        return _folded(state, value, messages, self._apply, self._keep)

    def _apply(self, value: Any, content: Content) -> Any:
        message = _plain("it", content)
        try:
            return self._function(value, message)
        except Exception as error:
            raise CannotFoldError(f"{self.name} has failed: {_told(error)}") from error

    def _keep(self, value: Any) -> Content:
        if isinstance(value, bytes):
            return _sized(Content(value, is_json=False))
        try:
            data = _encode(value)
            again = decode_json(data)
        except BadJSONError as error:
            raise CannotFoldError(f"the state that {self.name} gives {error}") from None
        except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
            raise CannotFoldError(f"{self.name} gives no JSON and no bytes: {error}") from None
        # A tuple comes back as a list, a date as a string: the function would not know its state again.
        if again != value:
            raise CannotFoldError(f"the state that {self.name} gives is another one after JSON")
        return _sized(Content(data, is_json=True))


def _plain(what: str, content: Content) -> Any:
    return _decoded(what, content, decode_json) if content.is_json else content.data


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


_BUILT_IN: tuple[Reducer, ...] = (_Last(), _Merge(), _Map(), _Count(), _Uploaded())
