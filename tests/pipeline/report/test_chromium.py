"""A report in a real browser: it is drawn in light and dark mode, and requests nothing."""

from pathlib import Path

from headrace.pipeline.report.page import page
from tests.pipeline.report.browser import Browser
from tests.pipeline.report.test_page import EVIL, made, seen

PLOTS = """
[...document.querySelectorAll("svg")].map(svg => {
  const box = svg.getBoundingClientRect();
  return [svg.getAttribute("class"), box.width, box.height, svg.querySelectorAll("*").length];
})
"""
COLOURS = """
["body", "section", "path.c0", "text.axis"].map(what => {
  const style = getComputedStyle(document.querySelector(what));
  return what === "body" || what === "section" ? style.backgroundColor : style.fill;
})
"""
CLIPPED = """
document.querySelectorAll("details").forEach(one => one.open = true);
[...document.querySelectorAll("main *")]
  .filter(one => !one.closest("svg") && one.scrollWidth > one.clientWidth && one.clientWidth)
  .map(one => [one.tagName, one.querySelector(".plot") ? "plot" : one.textContent.slice(0, 50)])
"""
"""Elements that are wider than their place, so that a part of them is invisible."""
IS_TOO_WIDE = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


def test_a_page_is_drawn_and_asks_for_nothing(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    colours = []
    with Browser(tmp_path / "profile") as browser:
        for name, dark, width in (("", False, 1200), (EVIL, True, 1200), (EVIL, False, 420)):
            file.write_text(page(made(30, seen(), name) if name else made(30, seen())), "utf-8")
            browser.open(file, dark=dark, width=width)
            plots = browser.evaluate(PLOTS)
            assert {kind for kind, *_ in plots} == {"plot", "bar", "spark"}
            assert sum(kind == "plot" for kind, *_ in plots) == 5
            for kind, wide, high, parts in plots:
                assert parts, kind
                assert wide >= (300 if kind == "plot" else 40), (kind, wide)
                assert high >= (100 if kind == "plot" else 4), (kind, high)
            assert not browser.evaluate(IS_TOO_WIDE)
            for narrow in (1000, 700, 390):
                browser.resize(narrow)
                assert not browser.evaluate(IS_TOO_WIDE), narrow
                clipped = browser.evaluate(CLIPPED)
                # On a phone, plots scroll, because nobody could read them at that size.
                assert [one for one in clipped if one[1] != "plot" or narrow > 390] == [], narrow
            colours.append(browser.evaluate(COLOURS))
            requests = [one["request"]["url"] for one in browser.told("Network.requestWillBeSent")]
            assert requests == [file.as_uri()]
            assert browser.told("Log.entryAdded") == []
            assert browser.told("Runtime.exceptionThrown") == []
            assert browser.told("Page.javascriptDialogOpening") == []
            browser.close_page()
    by_day, by_night, _ = colours
    assert all(day != night for day, night in zip(by_day, by_night, strict=True))
    assert len(set(by_day)) == len(by_day)
