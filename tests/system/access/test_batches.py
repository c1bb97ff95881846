"""Batches of uploads of other tokens: whoever decides a batch needs all rights to its topics."""

from pathlib import Path

import httpx
import pytest

from headrace.log.batch import staging
from headrace.testing import ServerProcess
from tests.fakes.store import block
from tests.system.access.server import EVERYTHING, Tokens

SECRET = "secret/topic"


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    tokens = Tokens(tmp_path / "data")
    tokens.add("admin", EVERYTHING)
    return tokens


def post(server: ServerProcess, token: str, path: str, **more: object) -> httpx.Response:
    bearer = {"Authorization": f"Bearer {token}"}
    return httpx.post(f"{server.http_url}/v1/{path}", headers=bearer, timeout=30, **more)  # type: ignore[arg-type]


def stage(server: ServerProcess, token: str, *topics: str) -> str:
    body = b"".join(block(topic, [b"x"]) for topic in topics)
    answer = post(server, token, "staged", content=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def decide(server: ServerProcess, token: str, *staged: str, number: int = 0) -> httpx.Response:
    asked = {"producer": f"of {token}", "number": number, "staged": staged}
    return post(server, token, "batches", json=asked)


MANY = [f"open/{number}" for number in range(staging.UPLOAD_TOPICS_MAX)]
"""Topics of an upload that has more of them than the server remembers."""


@pytest.mark.parametrize("beside", [[], MANY], ids=["few topics", "many topics"])
def test_a_batch_needs_the_rights_to_all_its_topics(
    tmp_path: Path, tokens: Tokens, beside: list[str]
) -> None:
    for name, grants in {
        "knows nothing": ["publish,create:open/*"],
        "may inspect": ["publish,create:open/*", "inspect:secret/*"],
        "may not create": ["publish,create:open/*", "publish:secret/*"],
        "may": ["publish,create:open/*", "publish,create:secret/*"],
    }.items():
        tokens.add(name, [*grants, f"batches:of {name}"])
    with ServerProcess(tmp_path / "data") as server:
        staged = stage(server, "admin", "open/topic", *beside, SECRET)
        for _ in range(2):
            for name, missing in {
                "knows nothing": "publish of a topic of the batch",
                "may inspect": f'publish of "{SECRET}"',
                "may not create": f'create of "{SECRET}"',
            }.items():
                answer = decide(server, name, staged)
                assert (answer.status_code, answer.json()["error"]) == (
                    403,
                    f"the credentials have no grant for {missing}; the uploads are kept",
                )
            server.restart()  # it does not know the topics of the upload any more
        answer = decide(server, "may", staged)
        assert (answer.status_code, answer.json().get("records")) == (200, 2 + len(beside))
        assert "Traceback" not in server.stderr, server.stderr


def test_a_batch_that_would_make_too_many_topics_is_refused_and_its_uploads_are_kept(
    tmp_path: Path, tokens: Tokens
) -> None:
    # The audit trail is a topic too.
    with ServerProcess(tmp_path / "data", "--set=limits.topics_max=3") as server:
        first = stage(server, "admin", "a", "b")
        assert decide(server, "admin", first).status_code == 200
        bearer = {"Authorization": "Bearer admin"}
        url = f"{server.http_url}/v1/topic"
        httpx.delete(url, params={"name": "b"}, headers=bearer).raise_for_status()
        assert decide(server, "admin", stage(server, "admin", "b"), number=1).status_code == 200
        second = stage(server, "admin", "a", "c")
        refused = decide(server, "admin", second, number=2)
        assert (refused.status_code, refused.json()["error"]) == (
            507,
            "topics_max is reached: the batch would make further topics; its uploads are kept",
        )
        existing = stage(server, "admin", "a", "b")
        assert decide(server, "admin", existing, number=2).status_code == 200
        httpx.delete(url, params={"name": "b"}, headers=bearer).raise_for_status()
        assert decide(server, "admin", second, number=3).json()["records"] == 2


def test_the_topics_of_a_batch_count_for_the_rate_of_new_topics(
    tmp_path: Path, tokens: Tokens
) -> None:
    with ServerProcess(tmp_path / "data", "--set=limits.topics_per_s=1") as server:
        many = stage(server, "admin", *(f"many/{number}" for number in range(1000)))
        assert decide(server, "admin", many).status_code == 200
        staged = stage(server, "admin", "one/more")
        answer = decide(server, "admin", staged, number=1)
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) > 1
        existing = stage(server, "admin", "many/1")
        assert decide(server, "admin", existing, number=1).status_code == 200
