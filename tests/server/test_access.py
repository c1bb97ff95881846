"""Tokens of the HTTP API: who gets access, and that no token is ever shown."""

import hashlib
from collections.abc import Iterator

import httpx
import pytest

from headrace import connect_blocking
from headrace.testing import ServerProcess

TOKEN = "a token of some length é"
OTHER = "another-token"


def entry(name: str, token: str) -> str:
    digest = hashlib.sha256(token.encode()).hexdigest()
    return f'[[access.token]]\nname = "{name}"\nsha256 = "{digest}"\n'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("access")
    file = directory / "headrace.toml"
    upper = hashlib.sha256(OTHER.encode()).hexdigest().upper()
    file.write_text(f'{entry("one", TOKEN)}[[access.token]]\nname = "two"\nsha256 = "{upper}"\n')
    with ServerProcess(directory / "data") as server, connect_blocking(server.figg_url) as client:
        client.publish("topic", b"foo")
    with ServerProcess(directory / "data", "--config", str(file)) as server:
        yield server
        assert TOKEN not in server.stderr
        assert OTHER not in server.stderr


PATHS = [
    *(("GET", "/v1/topics"), ("GET", "/v1/topic?name=topic"), ("DELETE", "/v1/topic?name=topic")),
    *(("GET", "/v1/cursors"), ("POST", "/v1/cursors"), ("GET", "/v1/position?topic=topic&last=1")),
    *(("GET", "/metrics"), ("GET", "/nowhere"), ("PUT", "/v1/topics"), ("GET", "/healthz/")),
]


@pytest.mark.parametrize(("method", "path"), PATHS)
@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer wrong",
        b"Basic " + OTHER.encode(),
        OTHER.encode(),
        b"Bearer " + OTHER.encode() + b"x",
        b"Bearer " + hashlib.sha256(OTHER.encode()).hexdigest().encode(),
        b"Bearer \xff\xfe\x80",
        b"Bearer " + b"x" * 8000,
    ],
)
def test_nobody_gets_in_without_a_token(server, method, path, header):
    headers = {} if header is None else {"Authorization": header}
    answer = httpx.request(method, server.http_url + path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert set(answer.json()) == {"error"}


@pytest.mark.parametrize("path", ["/v1/channels", "/v1/channel?name=c", "/v1/channel/snapshot"])
def test_refusals_of_channels_have_a_code(server, path):
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        answer = httpx.get(server.http_url + path, headers=headers)
        assert answer.status_code == 401
        assert answer.json().items() >= {"code": "wrong-credentials", "retry": False}.items()


@pytest.mark.parametrize("token", [TOKEN, OTHER])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER "])
def test_every_token_of_the_configuration_opens(server, token, scheme):
    headers = {"Authorization": f"{scheme} {token}".encode()}
    for path in ("/v1/topics", "/v1/topic?name=topic", "/metrics", "/v1/cursors"):
        assert httpx.get(server.http_url + path, headers=headers).status_code == 200
    assert httpx.get(server.http_url + "/nowhere", headers=headers).status_code == 404


def test_two_tokens_are_none(server):
    headers = [("Authorization", f"Bearer {OTHER}"), ("Authorization", f"Bearer {OTHER}")]
    assert httpx.get(server.http_url + "/v1/topics", headers=headers).status_code == 401


def test_health_is_open_to_all(server):
    assert httpx.get(server.http_url + "/healthz").json() == {"status": "ok"}
    assert httpx.get(server.wombat_url.replace("wombat:", "http:") + "/healthz").is_success


def test_commands_take_the_token_and_never_show_it(server, headrace):
    at = {"HEADRACE_URL": server.figg_url, "HEADRACE_HTTP": server.http_url}
    denied = headrace("topics", environ=at)
    assert denied.returncode == 1
    assert "HEADRACE_TOKEN" in denied.stderr
    commands = (
        ["topics"],
        ["inspect", "topic"],
        ["subscribe", "topic", "--last", "1", "--count", "1"],
        ["subscribe", "topic", "--until-end"],
    )
    for command in commands:
        by_variable = headrace(*command, environ=at | {"HEADRACE_TOKEN": OTHER})
        assert by_variable.returncode == 0, by_variable.stderr
        by_flag = headrace(*command, "--token", OTHER, environ=at)
        assert by_flag.returncode == 0, by_flag.stderr
        wrong = headrace(*command, "--token", "wrong-token", environ=at)
        assert wrong.returncode == 1
        assert "wrong-token" not in wrong.stdout + wrong.stderr
    for odd in ("with\nnewline", "é"):
        bad = headrace("topics", "--token", odd, environ=at)
        assert bad.returncode == 2
        assert odd not in bad.stderr
    assert headrace("delete", "nope", "--yes", "--token", OTHER, environ=at).returncode == 1


def test_a_page_in_a_browser_changes_nothing(tmp_path):
    with ServerProcess(tmp_path / "data") as server:
        with connect_blocking(server.figg_url) as client:
            client.publish("topic", b"foo")
        page = {"Origin": "https://evil.example.com", "Content-Type": "text/plain"}
        body = '{"reader": "r", "positions": []}'
        for method in ("POST", "DELETE"):
            answer = httpx.request(
                method, server.http_url + "/v1/cursors?reader=r", headers=page, content=body
            )
            assert answer.status_code == 403
        gone = httpx.delete(server.http_url + "/v1/topic?name=topic", headers=page)
        assert gone.status_code == 403
        assert httpx.get(server.http_url + "/v1/topic?name=topic", headers=page).is_success


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_page_in_a_browser_acknowledges_nothing(tmp_path, method):
    with ServerProcess(tmp_path / "data") as server:
        at, query = f"{server.http_url}/v1/channel", {"name": "c", "processor": "p"}
        httpx.post(f"{at}/join", params=query)
        httpx.post(f"{at}/join", params=query | {"processor": "q"})
        message = query | {"processor": "q", "number": 1}
        end = httpx.post(f"{at}/messages", params=message, content=b"x").json()["offset"]

        def poll(**headers: str) -> int:
            url, given = f"{at}/messages", query | {"ack": end}
            return httpx.request(method, url, params=given, headers=headers).status_code

        def cursor() -> int:
            members = httpx.get(at, params={"name": "c"}).json()["members"]
            return next(one["cursor"] for one in members if one["processor"] == "p")

        assert poll(Origin="https://evil.example.com") == 403
        assert poll(Origin=server.http_url) == 403  # like any other change
        # Requests for embedded content of a page carry no `Origin`.
        for site in ("cross-site", "same-site"):
            assert poll(**{"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"}) == 403
        refused = httpx.get(f"{at}/messages", headers={"Sec-Fetch-Site": "cross-site"})
        assert refused.json() == {
            "error": "pages in a browser may not change anything here",
            "code": "forbidden",
            "retry": False,
        }
        assert cursor() == 0
        for site in ("none", "same-origin"):
            assert poll(**{"Sec-Fetch-Site": site}) == 200
        assert cursor() == end
