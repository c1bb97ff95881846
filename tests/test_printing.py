"""Printing of texts from outside: quoted in one way, without control characters, and without secrets."""

import ast
import json
import logging
import socket
from pathlib import Path

import pytest

from headrace.config.settings import Config, LogFormat
from headrace.printing import (
    described,
    for_terminal,
    masked,
    masked_secret,
    one_line,
    quoted,
    unreachable,
)
from headrace.server import diagnostics


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


def test_a_payload_on_a_terminal_keeps_its_lines_and_moves_no_cursor():
    assert for_terminal(b"a\tb\nw\xc3\xb6rld") == b"a\tb\nw\xc3\xb6rld"
    hostile = "\x1b]0;owned\x07\r\x9b31m\u202e".encode() + b"\xff"
    shown = for_terminal(hostile).decode()
    assert shown == "\\u001b]0;owned\\u0007\\r\\u009b31m\\u202e\ufffd"


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


SOURCES = sorted((Path(__file__).parent.parent / "src" / "headrace").rglob("*.py"))


def has_repr(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and "%r" in node.value
    if isinstance(node, ast.FormattedValue):
        return node.conversion == ord("r")
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "repr"


def test_no_log_line_has_the_repr_of_anything():
    levels = {"debug", "info", "warning", "error", "critical", "exception"}
    found = [
        f"{path.name}:{call.lineno}"
        for path in SOURCES
        for call in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in levels
        and getattr(call.func.value, "id", "") == "logger"
        and any(map(has_repr, ast.walk(call)))
    ]
    assert not found


def test_what_is_logged_is_one_line_without_secrets(capsys):
    before = logging.getLogger().handlers[:], logging.getLogger().level
    try:
        diagnostics.set_up(Config())
        logging.getLogger("test").warning("a\n%s", "postgresql://u:pw@h/d")
        diagnostics.set_up(Config(log_format=LogFormat.JSON))
        logging.getLogger("test").warning("a\n%s", "postgresql://u:pw@h/d")
    finally:
        logging.getLogger().handlers[:] = before[0]
        logging.getLogger().setLevel(before[1])
    human, as_json = capsys.readouterr().err.splitlines()
    assert human.endswith("WARNING a\\npostgresql://u:***@h/d")
    assert json.loads(as_json)["message"] == "a\npostgresql://u:***@h/d"
