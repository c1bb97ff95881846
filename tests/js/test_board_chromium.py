"""The example pages of a channel in a real browser: effects of a reload, a second tab and a closed tab."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import pytest

from headrace.testing import ServerProcess
from tests.js.support import CHROMIUM, CLIENT, FILES, Pages, tool
from tests.pipeline.report.browser import Browser

EXAMPLES = CLIENT.parents[1] / "examples"
TIMEOUT_S = 60

SHOWN = "[...document.querySelectorAll('li')].map((item) => item.firstChild.data)"


DOCUMENTED = "channel://127.0.0.1:8120/board"
MANUAL = (CLIENT / "channels.md").read_text("utf-8").partition("```html\n")[2].partition("```")[0]


def waiting(condition: str) -> str:
    """Return a promise that a condition of the page becomes true; every change of the page checks it."""
    return (
        "new Promise((resolve) => {"
        f"const look = () => ({condition}) && resolve();"
        "new MutationObserver(look).observe(document, { childList: true, subtree: true });"
        "addEventListener('load', look); look(); })"
    )


class Tab:
    """One of several tabs of a browser."""

    def __init__(self, browser: Browser, url: str) -> None:
        self._browser = browser
        self._session: str | None = None
        self._target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self._ask("Target.attachToTarget", targetId=self._target, flatten=True)
        self._session = attached["sessionId"]
        self._ask("Page.enable")
        self._ask("Page.navigate", url=url)

    def reload(self) -> None:
        self.run("window.isOld = true")
        self._ask("Page.reload")

    def close(self) -> None:
        self._ask("Page.close")

    def add(self, text: str) -> None:
        form = f"document.querySelector('form').elements.text.value = {json.dumps(text)};"
        self.run(form + "document.querySelector('form').requestSubmit()")

    def shows(self, *texts: str) -> None:
        """Wait until the page shows exactly these items."""
        self.run(
            waiting(
                f"JSON.stringify({SHOWN}) === JSON.stringify({json.dumps(texts)})"
                " && document.querySelector('[role=status]')?.textContent === 'connected'"
                " && !window.isOld"
            )
        )

    def run(self, expression: str) -> Any:
        options = {"awaitPromise": True, "returnByValue": True, "timeout": TIMEOUT_S * 1000}
        # Promises are lost when another page is loaded. Then the new page is asked.
        while True:
            found = self._ask("Runtime.evaluate", expression=expression, **options)
            if found is not None:
                assert "exceptionDetails" not in found, found
                return found["result"].get("value")

    def _ask(self, method: str, **params: Any) -> Any:
        self._browser._session = self._session
        try:
            return self._browser.ask(method, **params)
        except AssertionError as error:
            if "Inspected target navigated" in str(error) or "context" in str(error):
                return None
            raise


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pages]:
    tool(*CHROMIUM)  # skip before anything is started
    monkeypatch.setitem(FILES, "/examples/board.html", (EXAMPLES / "board.html", "text/html"))
    for name in ("headrace.js", "channel.js", "channel_session.js"):
        monkeypatch.setitem(FILES, f"/clients/js/{name}", (CLIENT / name, "text/javascript"))
    pages = Pages()
    try:
        yield pages
    finally:
        pages.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_board_survives_reloads_and_tabs_leave_when_they_are_closed(
    pages: Pages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        ServerProcess(tmp_path / "data", "--set=channels.reducer=map") as server,
        Browser(tmp_path / "profile") as browser,
    ):

        def members() -> int:
            with urlopen(f"{server.http_url}/v1/channel?name=board", timeout=TIMEOUT_S) as answer:
                return len(json.load(answer)["members"])

        channel = server.wombat_url.replace("wombat://", "channel://") + "/board"
        url = f"{pages.origin()}/examples/board.html?channel={quote(channel, safe='')}"
        first = Tab(browser, url)
        first.shows()
        first.add("one")
        first.shows("one")
        first.add("two")
        first.shows("one", "two")
        first.reload()
        first.shows("one", "two")
        until(lambda: members() == 1)

        second = Tab(browser, url)
        second.shows("one", "two")
        second.add("three")
        first.shows("one", "two", "three")
        first.run("document.querySelector('li button').click()")
        second.shows("two", "three")
        assert members() == 2

        # The browser puts the page into its cache, and shows it again.
        second.run("dispatchEvent(new PageTransitionEvent('pagehide', { persisted: true }))")
        until(lambda: members() == 1)
        first.add("four")
        first.shows("two", "three", "four")
        second.run("dispatchEvent(new PageTransitionEvent('pageshow', { persisted: true }))")
        second.shows("two", "three", "four")
        until(lambda: members() == 2)

        second.close()
        until(lambda: members() == 1)
        first.add("five")
        first.shows("two", "three", "four", "five")
        first.close()
        until(lambda: members() == 0)

        channel = channel.replace("/board", "/manual")
        (tmp_path / "manual.html").write_text(MANUAL.replace(DOCUMENTED, channel), "utf-8")
        monkeypatch.setitem(FILES, "/manual.html", (tmp_path / "manual.html", "text/html"))
        page = Tab(browser, f"{pages.origin()}/manual.html")
        change = "const input = document.querySelector('input');"
        change += "input.value = 'a note'; input.dispatchEvent(new Event('change'))"
        page.run(waiting("document.querySelector('input')?.onchange"))
        page.run(f"{{ {change} }}")
        page.run(waiting("document.querySelector('p')?.textContent === 'a note'"))
        page.reload()
        page.run(waiting("!window.isOld && document.querySelector('p')?.textContent === 'a note'"))
