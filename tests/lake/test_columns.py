"""Columns as text: accepted forms, refused forms with their messages, and reading the text back."""

import re

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.lake.columns import columns_text, parse_columns

SINGLE = st.sampled_from(
    [
        *(pa.string(), pa.binary(), pa.bool_(), pa.int32(), pa.int64(), pa.float32()),
        *(pa.float64(), pa.date32(), pa.timestamp("us", tz="UTC"), pa.decimal128(38, 4)),
    ]
)
NAMES = st.text(min_size=1, max_size=8).filter(lambda name: "\0" not in name)


def _lower(field: pa.Field) -> str:
    return str(field.name).lower()


def _structs(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    fields = st.lists(st.builds(pa.field, NAMES, inner), min_size=1, max_size=3, unique_by=_lower)
    return fields.map(pa.struct)


TYPES = st.recursive(
    SINGLE,
    lambda inner: (
        inner.map(lambda one: pa.list_(pa.field("element", one)))
        | inner.map(lambda one: pa.map_(pa.string(), one))
        | _structs(inner)
    ),
    max_leaves=6,
)


@given(st.lists(st.builds(pa.field, NAMES, TYPES), min_size=1, unique_by=_lower))
def test_columns_are_read_again_as_they_were(fields):
    columns = pa.schema(fields)
    assert parse_columns(columns_text(columns)) == columns


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("id LONG,name String", "id bigint, name string"),
        ("a: struct<x: int, y: array<real>>", "a struct<x int, y array<float>>"),
        ("price decimal", "price decimal(10, 0)"),
        ("`an id` map<string,decimal(5)>", "`an id` map<string, decimal(5, 0)>"),
    ],
)
def test_what_is_written_differently_is_the_same(text, same):
    assert columns_text(parse_columns(text)) == same


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it ends where a name is expected"),
        ("id", "it ends where a type is expected"),
        ("id int,", "it ends where a name is expected"),
        ("id array<int", "it ends where '>' is expected"),
        ("id int name string", "expected ',', found 'name'"),
        (", id int", "expected a name, found ','"),
        ("id number", "unknown type 'number': use one of string, binary"),
        ("id map<int, int>", "keys of maps are strings"),
        ("id int, ID string", "the column 'ID' appears twice"),
        ("a struct<x int, x int>", "the column 'x' appears twice"),
        ("id decimal(39, 2)", "decimal(39, 2) is out of range"),
        ("id decimal(5, x)", "expected a number, found 'x'"),
        ("id int `", "'`' is not understood"),
        ("id " + "array<" * 30, "nested more than 20 levels deep"),
    ],
)
def test_what_is_no_list_of_columns_is_refused(text, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        parse_columns(text)
