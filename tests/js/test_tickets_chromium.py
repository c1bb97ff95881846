"""Tickets in a real browser: pages get them from their application, which holds the token, and connect.

The application is the server of the pages: its path `/ticket` asks Headrace for a ticket over HTTP, with a
bearer token that no page sees. Elsewhere: tickets without a browser (`tests/system/test_identity.py`).
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest

from headrace.access.tokens import hash_of
from headrace.server.tickets import TICKET_S
from headrace.testing import ServerProcess
from tests.js.support import CHROMIUM, Pages, Reports, tool
from tests.pipeline.report.browser import Browser

TOKEN = "a-token-that-only-the-application-has"
GRANTS = (
    *("publish,create,subscribe:rooms/*", "join:a/*", "join:b/*"),
    *("inspect:*", "as:anna", "publish,create,subscribe:$logux/notes"),
)
TIMEOUT_S = 60
REASON = "refused, the ticket is not known, was used before, or is too old: get a new one"
UNREACHABLE = ["disconnected", "the server cannot be reached"]
"""All that a browser tells a page about a refused handshake."""

WITHOUT_PATIENCE = """
from headrace.server import tickets
tickets.TICKET_S = 0.0
from headrace.cli.main import main
main()
"""


class ServerWithoutPatience(ServerProcess):
    """A server whose tickets are too old at once: to wait half a minute would show nothing else."""

    @property
    def command(self) -> list[str]:
        python, _, _, *rest = super().command
        return [python, "-c", WITHOUT_PATIENCE, *rest]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    tool(*CHROMIUM)
    with Browser(tmp_path_factory.mktemp("browser") / "profile") as browser:
        yield browser


@pytest.fixture(scope="module")
def pages() -> Iterator[Pages]:
    tool(*CHROMIUM)  # skip before anything is started
    pages = Pages()
    try:
        yield pages
    finally:
        pages.close()


def flags_of(directory: Path, pages: Pages) -> tuple[str, ...]:
    """Return the settings of a server: one token, and the pages of `localhost` alone may connect."""
    config = directory / "headrace.toml"
    config.write_text(
        "[limits]\nrefusal_delay_s = 0\n"
        f"[listen]\norigins = ['no-same-host', '{pages.origin('localhost')}']\n"
        f"[[access.token]]\nname = 'application'\nsha256 = '{hash_of(TOKEN)}'\n"
        f"grants = {json.dumps(GRANTS)}\n"
    )
    return ("--config", str(config))


@pytest.fixture(scope="module")
def server(pages: Pages, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("tickets")
    with ServerProcess(directory / "data", *flags_of(directory, pages)) as server:
        yield server


def new_ticket(server: ServerProcess) -> str:
    request = Request(f"{server.http_url}/v1/tickets", method="POST")
    request.add_header("Authorization", f"Bearer {TOKEN}")
    with urlopen(request, timeout=TIMEOUT_S) as answer:
        found: str = json.load(answer)["ticket"]
        return found


def refused(server: ServerProcess) -> int:
    """Return how many credentials the server has refused on its HTTP and WebSocket listeners."""
    request = Request(f"{server.http_url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    with urlopen(request, timeout=TIMEOUT_S) as answer:
        lines = answer.read().decode()
    found = re.findall(
        r'^headrace_credentials_refused_total{protocol="http"} (\d+)', lines, re.MULTILINE
    )
    return sum(map(int, found))


@contextmanager
def page(
    browser: Browser, pages: Pages, scenario: str, url: str, host: str = "localhost"
) -> Iterator[Reports]:
    """Run a scenario in a page of that host."""
    reports = pages.reports = Reports()
    query = urlencode({"scenario": scenario, "url": url})
    address = f"{pages.origin(host)}/page.html?{query}"
    target = browser.ask("Target.createTarget", url=address)["targetId"]
    try:
        yield reports
    finally:
        browser.ask("Target.closeTarget", targetId=target)


def test_a_page_uses_every_protocol_with_tickets_and_comes_back_after_a_kill(
    browser: Browser, pages: Pages, server: ServerProcess
) -> None:
    given: list[str] = []

    def ticket() -> str:
        given.append(new_ticket(server))
        return given[-1]

    pages.answers["/ticket"] = ticket
    with page(browser, pages, "ticketsOfAllProtocols", server.wombat_url) as reports:
        reports.expect("half")
        server.kill()
        server.start()
        done = reports.expect("done")
    assert done["received"] == ["one", "one", "two", "two"]
    reason = (
        'the server refuses the credentials: the credentials have no grant for publish of "other"'
    )
    assert done["refused"] == f"RefusedError: {reason}"
    assert done["state"] == "closed"
    assert done["logux"] == ["headers", "connected", "synced", "logux/processed"]
    # Three WebSockets, the same after the kill, then two more. An attempt that came to nothing used one too.
    assert len(set(given)) == len(given) >= 8
    assert TOKEN not in server.stderr


def test_a_used_ticket_is_refused_over_every_protocol_and_the_page_sees_it(
    browser: Browser, pages: Pages, server: ServerProcess
) -> None:
    before = refused(server)
    seen = shown(browser, pages, server, lambda: new_ticket(server))
    assert seen == [["connected", ""], UNREACHABLE, UNREACHABLE, "close"]
    assert refused(server) == before + 3


def test_a_ticket_that_the_server_has_not_given_is_refused(
    browser: Browser, pages: Pages, server: ServerProcess
) -> None:
    for made_up in (f"{new_ticket(server)}A", TOKEN):
        seen = shown(browser, pages, server, lambda made_up=made_up: made_up)
        assert seen == [UNREACHABLE, UNREACHABLE, UNREACHABLE, "close"]


def test_an_expired_ticket_is_refused(browser: Browser, pages: Pages, tmp_path: Path) -> None:
    with ServerWithoutPatience(tmp_path / "data", *flags_of(tmp_path, pages)) as server:
        seen = shown(browser, pages, server, lambda: new_ticket(server))
        assert seen == [UNREACHABLE, UNREACHABLE, UNREACHABLE, "close"]
        assert REASON in server.stderr


def test_a_page_of_another_origin_gets_in_with_no_ticket_and_uses_none_up(
    browser: Browser, pages: Pages, server: ServerProcess
) -> None:
    is_late = True
    while is_late:  # on a busy machine, the ticket may expire before the second page shows it
        issued_s = time.monotonic()
        valid = new_ticket(server)
        stranger = shown(browser, pages, server, lambda valid=valid: valid, host="127.0.0.1")
        known = shown(browser, pages, server, lambda valid=valid: valid)
        is_late = time.monotonic() - issued_s > TICKET_S / 2
    assert stranger == [UNREACHABLE, UNREACHABLE, UNREACHABLE, "close"]
    assert known[0] == ["connected", ""]


def shown(
    browser: Browser,
    pages: Pages,
    server: ServerProcess,
    ticket: Callable[[], str],
    host: str = "localhost",
) -> list[Any]:
    """Let a page show one ticket several times, and return what it sees each time."""
    pages.answers["/ticket"] = ticket
    with page(browser, pages, "oneTicket", server.wombat_url, host) as reports:
        seen: list[Any] = reports.expect("done")["seen"]
        return seen


def test_a_page_gets_no_ticket_from_the_server_itself(
    browser: Browser, pages: Pages, server: ServerProcess
) -> None:
    """The HTTP API is for programs: the browser asks first, and the server does not allow it."""
    with page(browser, pages, "ticketOfPage", f"{server.http_url}/v1/tickets") as reports:
        assert reports.expect("done") == {"seen": "TypeError"}
