"""Paths into JSON values: valid paths, and what they find."""

import pytest

from headrace.pipeline.json_path import find, parse_path

VALUE = {"a": {"b": [10, {"c d": True, "it's": 1, 'say "x"': 2}]}, "ü_1": 0, "n": None, "": 5}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("$", VALUE),
        ("$.a.b[0]", 10),
        ("$.a.b[1]['c d']", True),
        ('$["a"].b[1]["c d"]', True),
        (r"$.a.b[1]['it\'s']", 1),
        ("""$.a.b[1]['say "x"']""", 2),
        (r"""$.a.b[1]["say \"x\""]""", 2),
        (r"$['\u0061'].b[0]", 10),
        ("$.ü_1", 0),
        ("$['']", 5),
        ("$.n", None),
        ("$.n.x", None),
        ("$.a.b[2]", None),
        ("$.a[0]", None),
        ("$.a.b.c", None),
        ("$.a.b[0].c", None),
    ],
)
def test_a_path_finds_one_place(text, found):
    assert find(VALUE, parse_path(text)) == found


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "a path begins with [$], such as [$].id, and not as ''"),
        ("id", "a path begins with"),
        ("$.", "'.' in a path is not understood: it takes .name, "),
        ("$..id", "'..id' in a path is not understood"),
        ("$.a b", "' b' in a path is not understood"),
        ("$.a-b", "'-b' in a path is not understood"),
        ("$.1", "'.1' in a path is not understood"),
        ("$[*]", "one place and no choice of many"),
        ("$[-1]", "is not understood"),
        ("$[01]", "is not understood"),
        ("$[0:2]", "is not understood"),
        ("$['a','b']", "is not understood"),
        ("$['a]", "is not understood"),
        (r"$['\x']", r"'.x' in a path is no string: "),
        (r"$['\ud800']", "in a path is no string: "),
        ("$ ", "' ' in a path is not understood"),
    ],
)
def test_anything_else_is_refused_in_a_sentence(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_path(text)
