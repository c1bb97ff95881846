"""Pages of strangers in a real browser on the server's machine: other sites, and names that are rebound.

Chromium resolves every name to loopback, as an attacker's name server would. The test itself answers the
request for the page, so the page has the stranger's origin, and every later request reaches the real server.
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace import connect_blocking
from headrace.testing import ServerProcess
from tests.js.support import CHROMIUM, tool
from tests.pipeline.report.browser import Browser

STRANGER = "evil.stranger.example"
GUARDS = (
    *("LocalNetworkAccessChecks", "BlockInsecurePrivateNetworkRequests"),
    *("PrivateNetworkAccessSendPreflights", "HttpsUpgrades", "HttpsFirstBalancedModeAutoEnable"),
)
"""Features with which the browser itself stops such pages, or soon will. The server does not rely on them."""
FLAGS = ("--host-resolver-rules=MAP * 127.0.0.1", f"--disable-features={','.join(GUARDS)}")
ATTACK = """
(async (http, ws) => {
  const found = {};
  const ask = async (what, path, options) => {
    try {
      const answer = await fetch(http + path, options);
      found[what] = answer.type === "opaque" ? "opaque" : answer.status;
    } catch {
      found[what] = "blocked";
    }
  };
  const form = { method: "POST", mode: "no-cors", headers: { "Content-Type": "text/plain" } };
  await ask("list", "/v1/topics");
  await ask("read", "/v1/range?topic=topic&from=0&to=7");
  await ask("delete", "/v1/topic?name=topic", { method: "DELETE" });
  await ask("form", "/v1/cursors", { ...form, body: CURSORS });
  await ask("join", "/v1/channel/join?name=c&processor=p", form);
  await ask("upload", "/v1/staged", { ...form, body: "x" });
  await new Promise((resolve) => {
    const image = new Image();
    image.onload = image.onerror = resolve;
    image.src = http + "/v1/channel/messages?name=c&processor=p";
  });
  for (const path of ["/v1/ws", "/v1/channels", "/v1/logux/log"]) {
    found[path] = await new Promise((resolve) => {
      const socket = new WebSocket(ws + path);
      socket.onopen = () => resolve("open");
      socket.onclose = () => resolve("closed");
    });
  }
  return JSON.stringify(found);
})
""".replace(
    "CURSORS",
    json.dumps(
        '{"reader": "r", "positions": [{"topic": "topic", "epoch": 0, "offset": 0, "ordinal": 0}]}'
    ),
)
SOCKETS = ("/v1/ws", "/v1/channels", "/v1/logux/log")
CLOSED = dict.fromkeys(SOCKETS, "closed")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    tool(*CHROMIUM)
    with Browser(tmp_path_factory.mktemp("browser") / "profile", *FLAGS) as browser:
        target = browser.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.ask("Target.attachToTarget", targetId=target, flatten=True)
        browser._session = attached["sessionId"]
        browser.ask("Page.enable")
        browser.ask("Runtime.enable")
        yield browser


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "data") as process:
        with connect_blocking(process.figg_url) as client:
            client.publish("topic", b"foo")
        yield process
        assert "Traceback" not in process.stderr, process.stderr


def attack(browser: Browser, origin: str, http: str, ws: str) -> dict[str, Any]:
    """Run the attack in a page of this origin, and return what came of each attempt."""
    browser.ask("Fetch.enable", patterns=[{"urlPattern": f"{origin}/page"}])
    browser.events.clear()
    browser.ask("Runtime.evaluate", expression=f"location = {json.dumps(f'{origin}/page')}")
    paused = browser.next_event("Fetch.requestPaused")
    browser.ask(
        "Fetch.fulfillRequest",
        requestId=paused["requestId"],
        responseCode=200,
        responseHeaders=[{"name": "Content-Type", "value": "text/html"}],
        body=base64.b64encode(b"<!doctype html><title>a page</title>").decode(),
    )
    browser.next_event("Page.loadEventFired")
    browser.ask("Fetch.disable")
    call = f"({ATTACK})({json.dumps(http)}, {json.dumps(ws)})"
    done = browser.ask("Runtime.evaluate", expression=call, awaitPromise=True, returnByValue=True)
    assert "exceptionDetails" not in done, done
    found: dict[str, Any] = json.loads(done["result"]["value"])
    return found


def unchanged(server: ServerProcess) -> bool:
    topic = httpx.get(f"{server.http_url}/v1/topic?name=topic").json()
    cursors = httpx.get(f"{server.http_url}/v1/cursors").json()["cursors"]
    channels = httpx.get(f"{server.http_url}/v1/channels").json()["channels"]
    topics = httpx.get(f"{server.http_url}/v1/topics").json()["topics"]
    names = [one["name"] for one in topics if one["name"] != "$audit"]
    return bool(topic["records"] == 1 and not cursors and not channels and names == ["topic"])


def at(host: str, address: tuple[str, int], scheme: str = "http") -> str:
    return f"{scheme}://{host}:{address[1]}"


def test_a_page_of_another_site_reads_and_changes_nothing(
    server: ServerProcess, browser: Browser
) -> None:
    found = attack(
        browser,
        f"http://{STRANGER}",
        at("127.0.0.1", server.http),
        at("127.0.0.1", server.ws, "ws"),
    )
    # An opaque answer is one that the page cannot look into.
    opaque = dict.fromkeys(("form", "join", "upload"), "opaque")
    assert found == dict.fromkeys(("list", "read", "delete"), "blocked") | opaque | CLOSED
    assert unchanged(server)
    assert f'a page of origin "http://{STRANGER}" may not connect' in server.stderr


@pytest.mark.parametrize("listener", ["http", "ws"])
def test_a_page_whose_name_is_rebound_to_this_machine_reads_and_changes_nothing(
    server: ServerProcess, browser: Browser, listener: str
) -> None:
    """For the browser, page and server are one site: only the server can tell them apart."""
    found = attack(
        browser,
        at(STRANGER, getattr(server, listener)),
        at(STRANGER, server.http),
        at(STRANGER, server.ws, "ws"),
    )
    if listener == "http":
        assert found == dict.fromkeys(found, 421) | CLOSED
    else:
        assert set(found.values()) <= {"blocked", "opaque", "closed"}
    assert unchanged(server)


def test_a_page_of_this_machine_reads_and_connects_and_changes_nothing_over_http(
    server: ServerProcess, browser: Browser
) -> None:
    """The same page with another name: what stops the others is the server, and not the browser."""
    origin = at("localhost", server.http)
    found = attack(browser, origin, origin, at("localhost", server.ws, "ws"))
    expected = {"list": 200, "read": 200} | dict.fromkeys(("delete", "form", "join", "upload"), 403)
    assert found == expected | dict.fromkeys(SOCKETS, "open")
    assert unchanged(server)
