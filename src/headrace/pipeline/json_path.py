"""Paths into JSON values, such as `$.order.lines[0]['unit price']`: singular paths of RFC 9535. Pure."""

import re
from typing import Any

import msgspec

Path = tuple[str | int, ...]
"""Steps of a path: names of members, numbers of elements."""

_STEP = re.compile(
    r"""\.([^\W\d]\w*) | \[(0|[1-9][0-9]{0,8})\] | \[('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\]""",
    re.VERBOSE | re.DOTALL,
)
_IN_SINGLE_QUOTES = re.compile(r'\\.|"', re.DOTALL)
_AS_IN_DOUBLE = {"\\'": "'", '"': '\\"'}


def parse_path(text: str) -> Path:
    """Parse a path; raise ValueError with a sentence about the part that is not understood."""
    if not text.startswith("$"):
        raise ValueError(f"a path begins with $, such as $.id, and not as {text[:40]!r}")
    found: list[str | int] = []
    at = 1
    while at < len(text):
        step = _STEP.match(text, at)
        if step is None:
            raise ValueError(
                f"{text[at : at + 40]!r} in a path is not understood: it takes .name, ['any name'] and "
                "[0], one place and no choice of many"
            )
        name, number, quoted = step.groups()
        if number is not None:
            found.append(int(number))
        else:
            found.append(_unquoted(quoted) if quoted is not None else name)
        at = step.end()
    return tuple(found)


def find(value: Any, path: Path) -> Any:
    """Return the value at the path, or None if there is none."""
    for step in path:
        if isinstance(step, str):
            value = value.get(step) if isinstance(value, dict) else None
        else:
            value = value[step] if isinstance(value, list) and step < len(value) else None
    return value


def _unquoted(text: str) -> str:
    inner = text[1:-1]
    if text[0] == "'":
        inner = _IN_SINGLE_QUOTES.sub(lambda one: _AS_IN_DOUBLE.get(one[0], one[0]), inner)
    try:
        return msgspec.json.decode(f'"{inner}"', type=str)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ValueError(f"{text[:40]} in a path is no string: {error}") from None
