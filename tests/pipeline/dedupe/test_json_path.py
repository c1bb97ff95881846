"""Paths into JSON values: valid paths, and what they find."""

import pytest

from headrace.pipeline.dedupe.keys import find, parse_path

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
        ("", "a path begins with [$], such as [$].id; '' does not"),
        ("id", "a path begins with"),
        ("$.", "'.' is not a step of a path: use .name, "),
        ("$..id", "'..id' is not a step of a path"),
        ("$.a b", "' b' is not a step of a path"),
        ("$.a-b", "'-b' is not a step of a path"),
        ("$.1", "'.1' is not a step of a path"),
        ("$[*]", "a path names one place, not several"),
        ("$[-1]", "is not a step of a path"),
        ("$[01]", "is not a step of a path"),
        ("$[0:2]", "is not a step of a path"),
        ("$['a','b']", "is not a step of a path"),
        ("$['a]", "is not a step of a path"),
        (r"$['\x']", r"'.x' in a path is not a string: "),
        (r"$['\ud800']", "in a path is not a string: "),
        ("$ ", "' ' is not a step of a path"),
    ],
)
def test_anything_else_is_refused_in_a_sentence(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_path(text)
