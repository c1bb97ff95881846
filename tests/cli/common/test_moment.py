"""Points in time as `--since` takes them."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from headrace.cli.common.options import parse_moment

NOW = datetime(2025, 3, 1, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "ago"),
    [
        ("90s", timedelta(seconds=90)),
        ("10m", timedelta(minutes=10)),
        ("1.5h", timedelta(hours=1.5)),
        ("7d", timedelta(days=7)),
        ("1w", timedelta(weeks=1)),
    ],
)
def test_how_long_ago(text, ago):
    assert parse_moment(text, NOW) == (NOW - ago).timestamp() * 1000


@pytest.mark.parametrize(
    "text", ["2025-03-01T11:00:00Z", "2025-03-01 12:00+01:00", "2025-03-01T11:00", "1740826800000"]
)
def test_one_moment_in_several_spellings(text):
    assert parse_moment(text, NOW) == 1740826800000


def test_a_time_without_zone_is_local():
    here = NOW.astimezone(timezone(timedelta(hours=2)))
    assert parse_moment("2025-03-01T13:00", here) == 1740826800000


def test_a_day_begins_at_midnight():
    assert parse_moment("2025-03-01", NOW) == parse_moment("20250301", NOW) == 1740787200000


def test_before_1970_means_everything():
    assert parse_moment("9999w", NOW) == parse_moment("1960-01-01", NOW) == 0


@pytest.mark.parametrize("text", ["", "soon", "10", "10 y", "m", "-5m", "2025-13-01", "٣h"])
def test_anything_else_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011 - the caller writes the sentence
        parse_moment(text, NOW)
