"""Columns as SQL-like text, such as `id bigint, tags array<string>`: parse and print. Opens nothing."""

import re
from collections.abc import Callable

import pyarrow as pa

_TYPES = {
    "string": pa.string(),
    "binary": pa.binary(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}
"""Types that every table format supports."""

_ALIASES = {"integer": "int", "long": "bigint", "real": "float", "bool": "boolean"}
_NAMES = {kind: name for name, kind in _TYPES.items()}
_TOKEN = re.compile(r"\s*(`(?:[^`]|``)+`|[<>(),:]|[^\s<>(),:`]+)")
_PLAIN = re.compile(r"[^\W\d]\w*")
_DEPTH_MAX = 20
_DIGITS_MAX = 38


def parse_columns(text: str) -> pa.Schema:
    """Parse the text of columns; raise ValueError with a sentence about what is not understood."""
    return pa.schema(_Parser(text).fields(""))


def columns_text(columns: pa.Schema) -> str:
    """Return the text from which `parse_columns` makes the same columns."""
    return ", ".join(f"{_quoted(field.name)} {_text(field.type)}" for field in columns)


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens = _TOKEN.findall(text)
        if left := _TOKEN.sub("", text).strip():
            raise ValueError(f"{left[:40]!r} is not understood")
        self._at = 0
        self._depth = 0

    def fields(self, end: str) -> list[pa.Field]:
        """Parse names with their types, up to the token `end`; an empty `end` means the end of the text."""
        found: list[pa.Field] = []
        while True:
            name = self._name()
            # Some formats do not distinguish upper and lower case.
            if name.lower() in (one.name.lower() for one in found):
                raise ValueError(f"the column {name!r} appears twice")
            self._takes(":")
            found.append(pa.field(name, self._type()))
            if self._takes(end):
                return found
            self._expect(",")

    def _name(self) -> str:
        found = self._next("a name")
        if found in "<>(),:":
            raise ValueError(f"expected a name, found {found!r}")
        return found[1:-1].replace("``", "`") if found.startswith("`") else found

    def _type(self) -> pa.DataType:
        self._depth += 1
        if self._depth > _DEPTH_MAX:
            raise ValueError(f"types are nested more than {_DEPTH_MAX} levels deep")
        name = self._next("a type").lower()
        make: Callable[[], pa.DataType] | None = {
            "array": self._array,
            "map": self._map,
            "struct": self._struct,
            "decimal": self._decimal,
        }.get(name)
        known = _TYPES.get(_ALIASES.get(name, name))
        if make is None and known is None:
            kinds = ", ".join([*_TYPES, "decimal(p, s), array<…>, map<string, …>, struct<…>"])
            raise ValueError(f"unknown type {name!r}: use one of {kinds}")
        found = make() if make is not None else known
        self._depth -= 1
        return found

    def _array(self) -> pa.DataType:
        self._expect("<")
        inner = self._type()
        self._expect(">")
        return pa.list_(pa.field("element", inner))

    def _map(self) -> pa.DataType:
        self._expect("<")
        if self._type() != pa.string():
            raise ValueError("keys of maps are strings")
        self._expect(",")
        inner = self._type()
        self._expect(">")
        return pa.map_(pa.string(), inner)

    def _struct(self) -> pa.DataType:
        self._expect("<")
        return pa.struct(self.fields(">"))

    def _decimal(self) -> pa.DataType:
        if not self._takes("("):
            return pa.decimal128(10, 0)
        precision = self._number()
        scale = self._number() if self._takes(",") else 0
        self._expect(")")
        if not 1 <= precision <= _DIGITS_MAX or scale > precision:
            raise ValueError(f"decimal({precision}, {scale}) is out of range")
        return pa.decimal128(precision, scale)

    def _number(self) -> int:
        found = self._next("a number")
        if not re.fullmatch("[0-9]{1,9}", found):
            raise ValueError(f"expected a number, found {found!r}")
        return int(found)

    def _takes(self, token: str) -> bool:
        """Consume the next token and return True if it is `token`. An empty `token` stands for the end."""
        found = self._tokens[self._at] if self._at < len(self._tokens) else ""
        self._at += found == token
        return bool(found == token)

    def _expect(self, token: str) -> None:
        found = self._next(repr(token))
        if found != token:
            raise ValueError(f"expected {token!r}, found {found!r}")

    def _next(self, what: str) -> str:
        if self._takes(""):
            raise ValueError(f"it ends where {what} is expected")
        self._at += 1
        return str(self._tokens[self._at - 1])


def _quoted(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else f"`{name.replace('`', '``')}`"


def _text(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return f"array<{_text(kind.value_type)}>"
    if pa.types.is_map(kind):
        return f"map<string, {_text(kind.item_type)}>"
    if pa.types.is_struct(kind):
        inner = (kind.field(number) for number in range(kind.num_fields))
        return f"struct<{', '.join(f'{_quoted(one.name)} {_text(one.type)}' for one in inner)}>"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision}, {kind.scale})"
    return _NAMES[kind]
