"""Channels of the JavaScript client in a real browser, against a real server that is killed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.testing import ServerProcess
from tests.js.channel_checks import channel_url, check_contents, check_crash, keep
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


def test_each_message_is_stored_and_received_once_when_the_server_is_killed(
    server: ServerProcess, pages: Pages, tmp_path: Path
) -> None:
    keep(server, "crash")
    with chromium(pages, "channelPush", channel_url(server), tmp_path / "profile") as reports:
        check_crash(server, reports)


def test_contents_are_the_same_on_the_other_side(
    server: ServerProcess, pages: Pages, tmp_path: Path
) -> None:
    keep(server, "contents")
    with chromium(pages, "channelContents", channel_url(server), tmp_path / "profile") as reports:
        check_contents(server, reports)
