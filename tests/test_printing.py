"""How texts from outside look: quoted in one way, without control characters, and without secrets."""

import socket

import pytest

from headrace.printing import described, masked, masked_secret, one_line, quoted, unreachable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("orders", '"orders"'),
        ("it's", '"it\'s"'),
        ('a"b\\c', '"a\\"b\\\\c"'),
        ("a\nb\x1b[2J", '"a\\nb\\u001b[2J"'),
        ("wörld \u202e", '"wörld \\u202e"'),
        ("\U000e0001", '"\\U000e0001"'),
        ("\udcff", '"\\udcff"'),
        ("", '""'),
    ],
)
def test_a_name_is_quoted_without_what_a_terminal_obeys(text, shown):
    assert quoted(text) == shown


def test_a_long_text_is_cut():
    assert quoted("x" * 1000) == '"' + "x" * 300 + '"…'


def test_a_line_stays_one_line():
    assert one_line('peer: "a"\nfake line') == 'peer: "a"\\nfake line'


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://u:pw@h/d", "postgresql://u:***@h/d"),
        (
            "cannot open postgresql://u:p@w:x/y@h:5/d now",
            "cannot open postgresql://u:***@h:5/d now",
        ),
        ("postgresql://u@h/d?password=pw&x=1", "postgresql://u@h/d?password=***&x=1"),
        ("host=h password='p w' user=u", "host=h password=*** user=u"),
        ("http://127.0.0.1:8121/v1", "http://127.0.0.1:8121/v1"),
        ("figg://h:1 and figg://h:2", "figg://h:1 and figg://h:2"),
    ],
)
def test_passwords_are_masked(text, shown):
    assert masked(text) == shown


def test_a_secret_that_is_no_url_is_masked_whole():
    assert masked_secret("hunter2") == "***"
    assert masked_secret("") == ""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConnectionRefusedError(111, "x"), "no server at h:1; is it running?"),
        (socket.gaierror(-2, "x"), "the host of h:1 has no known address"),
        (TimeoutError(), "no answer from h:1"),
        (ConnectionResetError(104, "x"), "h:1 closed the connection"),
        (OSError(101, "Network is unreachable"), "Network is unreachable"),
    ],
)
def test_a_failed_connection_is_told_in_words(error, text):
    assert unreachable(error, "h:1") == text


def test_an_exception_is_one_line_without_its_repr():
    assert described(ValueError("a\nb")) == "ValueError: a b"
    assert described(KeyError()) == "KeyError"
