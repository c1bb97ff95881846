"""The page of a report: well-formed, complete, escaped, with every number that it is about."""

import html.parser
import re
from typing import Any

import numpy as np
import pytest

from headrace.pipeline.report import data as data
from headrace.pipeline.report import figures
from headrace.pipeline.report.data import ReportData, Runs, ServerSeen
from headrace.pipeline.report.job import channels_of, readers_of
from headrace.pipeline.report.page import page

START_MS = 1_763_000_000_000
EVIL = "</title><script>alert(1)</script>\"' onload=x &amp; \u202e\x00"

VOID = {"meta", "br", "input"}


def seen() -> ServerSeen:
    cursors = [
        {"reader": reader, "topic": topic, "lag_records": lag, "lag_bytes": lag * 9}
        | {"gone_records": 3 if lag == 40 else 0, "ms": START_MS}
        for reader, topic, lag in (
            *(("slow", "a", 40), ("slow", "b", 60), ("lake", "a", 0)),
            *(("lake:start", "a", 1000), (EVIL, EVIL, 1)),
        )
    ]
    channels: list[dict[str, Any]] = [
        {"name": name, "exists": exists, "messages": 5, "bytes": 50, "start": start}
        | {"destroyed_ms": 1 if name == "c" else None, "members": members}
        for name, exists, start, members in (
            ("a", True, 0, []),
            ("b", False, 70, []),
            ("c", True, 70, [member("p", 4), member(EVIL, 9)]),
        )
    ]
    return ServerSeen(7, 8, 9, readers_of(iter(cursors)), 3, channels_of(channels, more=False))


def member(name: str, lag: int) -> dict[str, Any]:
    return {"processor": name, "present": lag < 5, "lag_messages": lag, "missed_messages": 2}


def made(topics: int = 30, server: ServerSeen | None = None, name: str = "") -> ReportData:
    found = []
    for number in range(topics):
        times = START_MS + np.arange(40 - number, dtype=np.int64) * 3_600_000
        ones = np.ones(len(times), np.int64)
        found.append(
            Runs(f"{name or 'topic '}{number}", number, 0, ones * 3, ones * 300 * number, times)
        )
    overview = data.overview([data.look(found)])
    plan = data.plan(overview)
    counts = [data.count(found, plan)]
    return data.report(
        overview, plan, counts, made_ms=START_MS, log=name or "here", lake=name, server=server
    )


class Checked(html.parser.HTMLParser):
    """Parser that checks that every element is closed correctly, and remembers the content."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def checked(report: ReportData) -> Checked:
    parser = Checked()
    parser.feed(page(report))
    parser.close()
    assert parser.open == []
    return parser


REPORTS = {
    "many topics": lambda: made(30, seen()),
    "one topic, no server": lambda: made(1),
    "nothing": lambda: made(0),
    "hostile names": lambda: made(3, seen(), EVIL),
}


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS.keys())
def test_a_page_is_well_formed_and_needs_nothing_else(report):
    found = checked(report())
    tags = {tag for tag, _ in found.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "use", "image", "a"}
    for _, attributes in found.elements:
        assert not any(name.startswith("on") for name in attributes)
        assert not attributes.keys() & {"src", "href", "xlink:href", "srcset", "data"}
    text = page(report())
    assert "url(" not in text and "@import" not in text
    assert "default-src 'none'" in text
    assert "nan" not in re.findall(r"[\d.,]*nan[\d.,]*", text)


def test_names_are_shown_as_they_are_and_never_taken_for_anything_else():
    text = page(made(3, seen(), EVIL))
    assert "<script>" not in text and "\u202e" not in text and "\x00" not in text
    assert "alert(1)" in "".join(checked(made(3, seen(), EVIL)).text)


def test_the_numbers_of_the_report_are_in_the_page():
    report = made(30, seen())
    text = "".join(checked(report).text)
    assert f"{report.topics[0].messages:,}" in text
    assert "10 other topics" in text
    assert "slow is furthest behind: 100 records, most of all in b." in text
    assert "3 records were gone" in text
    assert "7 duplicates came" in text
    assert (
        "3 channels are known: 1 with a log of which the beginning is trimmed, as everyone has it, "
        "1 whose log is destroyed." in text
    )
    assert "lake:start" not in text


def test_without_a_server_the_page_says_what_it_does_not_know():
    assert "No server was asked" in "".join(checked(made(1)).text)


# Plots


def test_areas_are_drawn_where_there_is_something_and_inside_of_the_plot():
    over = figures.Over(START_MS, 1000, 4)
    plot = figures.stacked(
        [[1, 0, 0, 5], [1, 0, 2, 0], [0, 0, 0, 1]], ["a"] * 4, over, binary=False, label="x"
    )
    heights = [float(y) for y in re.findall(r"V([\d.]+)", plot)]
    assert min(heights) >= 0 and max(heights) <= 250
    assert plot.count("<title>") == 4
    assert all(f'class="{kind}"' in plot for kind in ("c0", "c1", "crest"))
    first = re.search(r'class="c0" d="([^"]+)"', plot)
    assert first is not None and first[1].count("M") == 2, "two areas, with nothing between them"


@pytest.mark.parametrize("top", [0, 1, 3, 7, 99, 100, 101, 12_345, 10**9])
@pytest.mark.parametrize("binary", [False, True])
def test_an_axis_has_a_few_round_numbers_up_to_the_top(top, binary):
    plot = figures.stacked([[top]], ["x"], figures.Over(0, 1000, 1), binary=binary, label="x")
    labels = re.findall(r'class="axis end"[^>]*>([^<]+)<', plot)
    assert 2 <= len(labels) <= 6
    assert len(set(labels)) == len(labels)


# Wording


@pytest.mark.parametrize(
    ("ms", "expected"),
    [
        *((0, "0 ms"), (999, "999 ms"), (1000, "1 s"), (1340, "1.3 s"), (61_000, "1 min 1 s")),
        *((600_000, "10 min"), (3_660_000, "1 h 1 min"), (90_000_000, "1 d 1 h")),
        (40 * 86_400_000, "40 d"),
    ],
)
def test_spans_have_the_units_that_matter(ms, expected):
    assert figures.span(ms) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((0, "0"), (0.25, "0.2"), (9990, "9,990"), (12_345, "12.3k"), (999_499, "999k")),
        *((999_999, "1M"), (1_230_000, "1.23M"), (7.5e15, "7,500T")),
    ],
)
def test_numbers_are_short_in_pictures(value, expected):
    assert figures.short(value) == expected


def test_a_time_that_no_calendar_has_is_still_shown():
    assert figures.moment(1 << 62).startswith(str(1 << 62))
    assert figures.tick(1 << 62, 1000) == ""
