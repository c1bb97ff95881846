"""The HTTP endpoints of channels match their description in `/openapi.json`, for any request.

schemathesis makes requests from the description: valid ones, invalid ones, and ones of channel members, which
get further. A model counts what the server accepted; in the end the server has nothing else.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from headrace.model import AUDIT_TOPIC
from headrace.server.http.channels import ChannelsApi
from headrace.server.http.openapi import description
from headrace.testing import ServerProcess
from tests.tools import TORTURE

EXAMPLES = 21 if TORTURE else 9
"""Number of requests to each endpoint in each of the three ways."""

TIMEOUT_S = 30

MEMBERS = {"doc/1": "a", "map/1": "b", "uploaded/1": "c"}
"""Channels with different reducers, and the member that sends requests to each."""

OPERATIONS = [
    (path, method) for path, methods in description()["paths"].items() for method in methods
]


class Model:
    """Everything that the server has accepted and so must have stored."""

    def __init__(self) -> None:
        self.members: set[tuple[str, str]] = set()
        self.numbers: dict[tuple[str, str], int] = {}
        self.answered: dict[int, int] = {}

    def answer(self, method: str, url: str, status: int) -> None:
        self.answered[status] = self.answered.get(status, 0) + 1
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        if status >= 300:
            return
        who = query.get("name", ""), query.get("processor", "")
        match method, parts.path:
            case "POST", "/v1/channel/join":
                self.members.add(who)
            case "POST", "/v1/channel/leave":
                self.members.discard(who)
            case "DELETE", "/v1/channel":
                self.members = {one for one in self.members if one[0] != who[0]}
            case "POST", "/v1/channel/messages" if status == 201:
                self.numbers[who] = int(query["number"])


@pytest.fixture(scope="module")
def model(abused: ServerProcess) -> Iterator[Model]:
    model = Model()
    with httpx.Client(base_url=abused.http_url) as client:

        def accepted(path: str, **options: Any) -> None:
            answer = client.post(path, **options)
            assert answer.is_success, answer.text
            model.answer("POST", str(answer.request.url), answer.status_code)

        # Members have text and bytes to receive.
        for name in MEMBERS:
            query = {"name": name, "processor": "other"}
            accepted("/v1/channel/join", params=query)
            message = {"key": "k", "value": [1, None, "é"]}
            accepted("/v1/channel/messages", params=query | {"number": "1"}, json=message)
            if name != "map/1":
                accepted("/v1/channel/messages", params=query | {"number": "2"}, content=b"\0\xff")
    yield model
    with httpx.Client(base_url=abused.http_url) as client:
        found = set()
        for channel in listed(client):
            for member in channel["members"]:
                who = channel["name"], member["processor"]
                found.add(who)
                assert member["number"] == model.numbers.get(who, 0), who
            assert channel["members"] or channel["exists"] or channel["snapshot"]
        assert found == model.members
        topics = client.get("/v1/topics").json()["topics"]
        assert {topic["name"] for topic in topics} <= {
            AUDIT_TOPIC,
            *(f"$channel/{one}" for one, _ in model.numbers),
        }
        assert client.get("/healthz").json() == {"status": "ok"}


def listed(client: httpx.Client) -> Iterator[dict[str, Any]]:
    after = ""
    while True:
        page = client.get("/v1/channels", params={"after": after, "limit": 7}).json()
        yield from page["channels"]
        if not page["more"]:
            return
        after = page["channels"][-1]["name"]


@pytest.fixture(scope="module")
def schema(abused: ServerProcess) -> Any:
    # The import is here because it takes a second.
    import schemathesis

    return schemathesis.openapi.from_url(f"{abused.http_url}/openapi.json")


@pytest.fixture
def ask(abused: ServerProcess, model: Model) -> Callable[..., None]:
    from schemathesis import checks
    from schemathesis.specs.openapi import checks as openapi_checks

    def ask_and_check(case: Any, member: tuple[str, str] | None) -> None:
        if isinstance(case.query, dict) and str(case.query.get("wait_s", "")).isdigit():
            case.query["wait_s"] = 0  # no request waits for something that never comes
        if isinstance(case.query, dict) and isinstance(case.query.get("lease_s"), int | float):
            # Otherwise memberships would end meanwhile.
            case.query["lease_s"] = max(case.query["lease_s"], 3600)
        if member is not None and "number" in case.query:
            # Otherwise nearly all numbers would leave gaps.
            case.query["number"] = model.numbers.get(member, 0) + 1
        answer = case.call(timeout=TIMEOUT_S)
        model.answer(case.method, answer.request.url, answer.status_code)
        case.validate_response(
            answer,
            checks=[
                checks.not_a_server_error,
                openapi_checks.status_code_conformance,
                openapi_checks.content_type_conformance,
                openapi_checks.response_schema_conformance,
            ],
        )

    return ask_and_check


def test_every_endpoint_is_described_and_nothing_else(abused: ServerProcess) -> None:
    api = ChannelsApi(None, None)  # type: ignore[arg-type]
    routes = {
        (route.path, method.lower())
        for route in api.routes()
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert routes == set(OPERATIONS)
    assert httpx.get(f"{abused.http_url}/openapi.json").json() == description()


@pytest.mark.parametrize("way", ["fitting", "unfitting", "by a member"])
@pytest.mark.parametrize(("path", "method"), OPERATIONS, ids=lambda text: text)
def test_an_endpoint_answers_as_it_is_described(
    abused: ServerProcess, schema: Any, ask: Any, model: Model, path: str, method: str, way: str
) -> None:
    from schemathesis import GenerationMode

    mode = GenerationMode.NEGATIVE if way == "unfitting" else GenerationMode.POSITIVE
    operation = schema[path][method]
    if way != "by a member":
        for_each(
            operation.as_strategy(generation_mode=mode), EXAMPLES, lambda case: ask(case, None)
        )
    else:
        named = {one["name"] for one in description()["paths"][path][method]["parameters"]}
        for member in MEMBERS.items():
            query = dict(zip(("name", "processor"), member, strict=True))
            answer = httpx.post(f"{abused.http_url}/v1/channel/join", params=query)
            model.answer("POST", str(answer.request.url), answer.status_code)
            fixed = {key: value for key, value in query.items() if key in named}
            cases = operation.as_strategy(generation_mode=mode, query=fixed or None)
            for_each(cases, EXAMPLES // len(MEMBERS), partial(ask, member=member))
    assert httpx.get(f"{abused.http_url}/healthz").status_code == 200


def for_each(cases: Any, count: int, do: Callable[[Any], None]) -> None:
    """Run `do` for the same cases in every run."""

    @given(cases)
    @settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def run(case: Any) -> None:
        do(case)

    run()
