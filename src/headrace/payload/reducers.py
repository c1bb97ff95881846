"""Reducers fold the messages of a channel into its state. Elsewhere: storing the state, and when to fold.

A reducer keeps nothing between calls: `fold` takes a state and the messages after it. The resulting state is
the same to the byte however the messages are divided into calls. Built-in reducers also fail at the same
message however the messages are divided.
"""

import importlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from headrace.errors import HeadraceError
from headrace.payload.channel import Content, StoredMessage
from headrace.payload.json_limits import BadJSONError, decode_json
from headrace.printing import quoted

STATE_BYTES_MAX = 1 << 20
"""Maximum size of a state, inclusive."""

Function = Callable[..., Any]


class CannotFoldError(HeadraceError, ValueError):
    """A message cannot be folded into the state: the text says why. The state before it stays valid."""


class UnknownReducerError(HeadraceError, ValueError):
    """The caller named a reducer that does not exist: use a built-in one, or `module:function`."""


class Reducer:
    name: str
    is_uploaded = False
    """True if a processor uploads the state. Then the server folds nothing."""

    def check(self, content: Content) -> None:
        """Raise CannotFoldError for a message that this reducer cannot fold."""

    def fold(self, state: Content | None, messages: Iterable[StoredMessage]) -> Content | None:
        """Return the state after these messages; None without any message yet. Raises `CannotFoldError`."""
        raise NotImplementedError


def reducer(name: str, load: Callable[[str], Function] | None = None) -> Reducer:
    """Return the reducer with this name. If the name is `module:function`, `load` finds the function."""
    if ":" in name:
        return _Calling(name, (load or _load)(name))
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    names = ", ".join(_BUILT_IN)
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


# Reducers that take any message


class _Last(Reducer):
    name = "last"

    def fold(self, state: Content | None, messages: Iterable[StoredMessage]) -> Content | None:
        last = deque(messages, maxlen=1)
        return last[0].content if last else state


class _Count(Reducer):
    name = "count"

    def fold(self, state: Content | None, messages: Iterable[StoredMessage]) -> Content | None:
        before = _decoded("the state", state, _decode_count) if state else 0
        counted = deque(enumerate(messages, before + 1), maxlen=1)
        return Content(b"%d" % counted[0][0], is_json=True) if counted else state


class _Uploaded(Reducer):
    name = "uploaded"
    is_uploaded = True

    def fold(self, state: Content | None, messages: Iterable[StoredMessage]) -> Content | None:
        raise CannotFoldError("the state of this channel is uploaded, not folded")


# Reducers that hold the state as a value while they fold


class _Folding(Reducer):
    def fold(self, state: Content | None, messages: Iterable[StoredMessage]) -> Content | None:
        value, apply = self._value(state), self._apply
        number = 0
        # `size` is at least the size of the value, as long as a message adds only bytes that it contains.
        size = len(state.data) if state else 0
        for processor, number, content in messages:
            try:
                value = apply(value, content)
                size += len(content.data)
                if size > STATE_BYTES_MAX:
                    size = len(self._keep(value).data)
            except CannotFoldError as error:
                raise CannotFoldError(
                    f"message {number} of {quoted(processor)} cannot be folded: {error}"
                ) from error
        return self._keep(value) if number else state

    def _value(self, state: Content | None) -> Any:
        raise NotImplementedError

    def _apply(self, value: Any, content: Content) -> Any:
        """Return the value after a message. Raises CannotFoldError."""
        raise NotImplementedError

    def _keep(self, value: Any) -> Content:
        return _sized(Content(_encode(value), is_json=True))


class _Merge(_Folding):
    """JSON merge patch (RFC 7386). The first patch is applied to nothing: its nulls are dropped too."""

    name = "merge"

    def check(self, content: Content) -> None:
        _check_is_json("it", content)

    def _value(self, state: Content | None) -> Any:
        return _decoded("the state", state, _decode_tree) if state else None

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


class _Map(_Folding):
    """Last value of each key. Keys are in the order of their first write since their last deletion."""

    name = "map"

    def check(self, content: Content) -> None:
        self._apply({}, content)

    def _value(self, state: Content | None) -> Any:
        return _decoded("the state", state, _decode_map) if state else {}

    def _apply(self, value: dict[str, Raw], content: Content) -> dict[str, Raw]:
        change = _decoded("it", content, _decode_change)
        is_write = change.value is not _ABSENT
        if change.delete is not (UNSET if is_write else True):
            raise CannotFoldError(
                "it needs either a `value`, or a `delete` that is true, and not both"
            )
        if is_write:
            # Without the copy the whole message, which may be much larger, would stay in memory.
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
# Numbers stay as they were written. So nothing is lost, and the encoded value is not longer than the input.
_decode_tree = msgspec.json.Decoder(float_hook=Raw).decode


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


class _Calling(_Folding):
    """A function of the application. `function(state, message)` returns the next state.

    `function.check(message)` may refuse a message. `_keep` checks the returned state at the end of `fold`,
    and earlier only when state and messages together exceed `STATE_BYTES_MAX`. A check after every message
    would cost time in proportion to the size of the state.
    """

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

    def _value(self, state: Content | None) -> Any:
        return _plain("the state", state) if state else None

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
            raise CannotFoldError(f"the state that {self.name} returns {error}") from None
        except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
            raise CannotFoldError(f"{self.name} returns neither JSON nor bytes: {error}") from None
        # JSON turns a tuple into a list and a date into a string. The function would get a state that differs
        # from the one it returned.
        if again != value:
            raise CannotFoldError(
                f"the state that {self.name} returns changes when it is encoded as JSON"
            )
        return _sized(Content(data, is_json=True))


def _plain(what: str, content: Content) -> Any:
    return _decoded(what, content, decode_json) if content.is_json else content.data


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


_BUILT_IN = {one.name: one for one in (_Last(), _Merge(), _Map(), _Count(), _Uploaded())}
