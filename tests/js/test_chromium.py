"""The JavaScript client in a real browser, against a real server that is killed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.testing import ServerProcess, wait_until
from tests.js.checks import check_crash, check_payloads, check_slow
from tests.js.support import CHROMIUM, Pages, chromium, tool


@pytest.fixture
def pages() -> Iterator[Pages]:
    tool(*CHROMIUM)  # skip before anything is started
    pages = Pages()
    try:
        yield pages
    finally:
        pages.close()


@pytest.fixture
def server(pages: Pages, tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "data") as server:
        yield server


def test_nothing_acknowledged_is_lost_when_the_server_is_killed(
    server: ServerProcess, pages: Pages, tmp_path: Path
) -> None:
    with chromium(pages, "crash", server.wombat_url, tmp_path / "profile") as reports:
        check_crash(server, reports)


def test_a_slow_subscriber_loses_nothing(
    server: ServerProcess, pages: Pages, tmp_path: Path
) -> None:
    with chromium(pages, "slow", server.wombat_url, tmp_path / "profile") as reports:
        check_slow(reports)


def test_payloads_and_offsets_are_the_same_as_over_figg(
    server: ServerProcess, pages: Pages, tmp_path: Path
) -> None:
    with chromium(pages, "payloads", server.wombat_url, tmp_path / "profile") as reports:
        check_payloads(server, reports)


def test_localhost_and_127_0_0_1_are_one_host(
    server: ServerProcess, pages: Pages, tmp_path: Path
) -> None:
    profile = tmp_path / "profile"
    with chromium(pages, "admission", server.wombat_url, profile, host="localhost") as reports:
        assert reports.expect("done") == {"state": "connected"}


def test_a_page_that_may_not_connect_is_refused(pages: Pages, tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path / "data", "--set=listen.origins=no-same-host") as server,
        chromium(
            pages, "admission", server.wombat_url, tmp_path / "profile", host="localhost"
        ) as reports,
    ):
        assert reports.expect("done") == {"state": "disconnected"}
        wait_until(lambda: f'["no-same-host", "{pages.origin("localhost")}"]' in server.stderr)


def test_a_page_of_an_allowed_origin_is_let_in(pages: Pages, tmp_path: Path) -> None:
    allowed = f"listen.origins=no-same-host,{pages.origin('localhost')}"
    with (
        ServerProcess(tmp_path / "data", f"--set={allowed}") as server,
        chromium(
            pages, "admission", server.wombat_url, tmp_path / "profile", host="localhost"
        ) as reports,
    ):
        assert reports.expect("done") == {"state": "connected"}
