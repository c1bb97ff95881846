"""One rule, tried through every protocol and endpoint: none forgets what another refuses.

A rule that a second protocol forgets is a class of past CVEs in this field. The rule here: a token may do
everything with one name, as one reader, producer, processor and user. Each way to read, write or delete is
tried with that name, with the name of somebody else, and as somebody else. Elsewhere: each message with each
kind of credentials (`test_table.py`).
"""

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from headrace.model import CHANNEL_PREFIX, LOGUX_PREFIX
from headrace.reader.upload import encode_block_header
from headrace.testing import ServerProcess
from headrace.wire import channel, readers, tokens
from headrace.wire.figg import messages as figg
from headrace.wire.logux import messages as logux
from headrace.wire.wombat import messages as wombat
from tests.system.access.server import CONFIG, EVERYTHING, Figg, Socket, Tokens, ask
from tests.system.access.test_table import ENDPOINTS

MINE, THEIRS = "mine", "theirs"
"""Each is the name of a topic, a channel and a Logux log."""
ME, OTHER = "me", "other"
"""Each is the name of a reader, a producer, a processor and a user."""
RESERVED = ("", CHANNEL_PREFIX, LOGUX_PREFIX)
SECRET = b"a-secret-of-theirs"

GRANTS = (
    *(f"publish,subscribe,inspect,create,delete:{prefix}{MINE}" for prefix in RESERVED),
    *(f"{operation}:{ME}" for operation in ("cursors", "batches", "as")),
    f"join:{MINE}/{ME}",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("rule")
    (directory / "config.toml").write_text(CONFIG)
    made = Tokens(directory / "data")
    made.add("all", EVERYTHING)
    made.add("narrow", GRANTS)
    with ServerProcess(directory / "data", f"--config={directory / 'config.toml'}") as server:
        for name in (MINE, THEIRS):
            fill(server, name)
        yield server
        assert "Traceback" not in server.stderr, server.stderr


def fill(server: ServerProcess, name: str) -> None:
    """Make a topic, a channel and a Logux log of this name, with records in each."""
    secret = SECRET if name == THEIRS else b"no-secret"
    with Figg(server, "all") as peer:
        peer.send(*(figg.encode_publish(name, number, secret) for number in range(3)))
        while peer.hear_until(figg.Ack).seq_num < 2:
            pass
    for who in (ME, OTHER):
        told = ask(server, "all", "GET", f"/v1/topic?name={name}").json()
        position = {"topic": name, "epoch": told["epoch"], "offset": 0, "ordinal": 0}
        body = {"reader": who, "positions": [position]}
        assert ask(server, "all", "POST", "/v1/cursors", json=body).status_code == 200
        assert post(server, "all", "channel/join", name, who).status_code == 200
    sent = post(server, "all", "channel/messages", name, OTHER, "&number=1", json=secret.decode())
    assert sent.status_code == 201, sent.text
    with Socket(server, f"{logux.PATH}/{name}", bearer="all") as peer:
        peer.send(["connect", 5, f"{OTHER}:1", 0])
        created = {"id": [1, f"{OTHER}:1", 0], "time": 1}
        peer.send(["sync", 1, {"type": "test", "secret": secret.decode()}, created])
        while peer.hear()[0] != "synced":
            pass


def post(
    server: ServerProcess, token: str, path: str, name: str, who: str, more: str = "", **given: Any
) -> Any:
    return ask(server, token, "POST", f"/v1/{path}?name={name}&processor={who}{more}", **given)


class Outcome(NamedTuple):
    """What the narrow token was told: whether it was let in, and everything that it heard."""

    is_allowed: bool
    heard: str


Way = Callable[[ServerProcess, str, str], Outcome]
"""Tries something with a name, as somebody."""


# HTTP


class Endpoint(NamedTuple):
    query: str
    body: str = ""
    names_somebody: bool = False


SPAN = "topic={name}&from=0&to=9"
MEMBER = "name={name}&processor={who}"
CURSORS = (
    '{{"reader": "{who}", "positions":'
    ' [{{"topic": "{name}", "epoch": 0, "offset": 0, "ordinal": 0}}]}}'
)

OF_SERVER = {
    ("GET", "/metrics"),
    ("GET", "/v1/status"),
    ("GET", "/v1/clock"),
    ("GET", "/v1/trace"),
    ("POST", "/v1/clock/confirm"),
}
"""Endpoints about the whole server: no grant for one name is enough for them."""
STAGING = {("POST", "/v1/staged"), ("POST", "/v1/batches")}
"""Endpoints of uploads, which have a way of their own."""

LISTS = {
    ("GET", "/v1/topics"): "",
    ("GET", "/v1/channels"): "",
    ("GET", "/v1/cursors"): "reader={who}",
}
"""Endpoints that list what the token may inspect."""

NAME = "{name:path}"
STREAM = f"/v1/stream/{NAME}"

OF_NAMES: dict[tuple[str, str], Endpoint] = {
    ("GET", "/v1/topic"): Endpoint("name={name}"),
    ("GET", "/v1/position"): Endpoint("topic={name}&last=1"),
    ("GET", "/v1/index"): Endpoint(SPAN),
    ("GET", "/v1/range"): Endpoint(SPAN),
    ("GET", "/v1/ranges"): Endpoint(f"topic={MINE}&from=0&to=9&{SPAN}"),
    ("GET", "/v1/splits"): Endpoint(f"{SPAN}&bytes=10"),
    ("POST", "/v1/cursors"): Endpoint("", CURSORS, names_somebody=True),
    ("DELETE", "/v1/cursors"): Endpoint("reader={who}&topic={name}", names_somebody=True),
    ("POST", "/v1/channel/join"): Endpoint(MEMBER, names_somebody=True),
    ("GET", "/v1/channel/messages"): Endpoint(MEMBER, names_somebody=True),
    ("POST", "/v1/channel/messages"): Endpoint(f"{MEMBER}&number=7", "1", names_somebody=True),
    ("POST", "/v1/channel/ack"): Endpoint(f"{MEMBER}&offset=0", names_somebody=True),
    ("PUT", "/v1/channel/snapshot"): Endpoint(f"{MEMBER}&offset=0", "1", names_somebody=True),
    ("GET", "/v1/channel/snapshot"): Endpoint("name={name}"),
    ("GET", "/v1/channel"): Endpoint("name={name}"),
    ("POST", "/v1/channel/leave"): Endpoint(MEMBER, names_somebody=True),
    ("POST", "/v1/channel/keep"): Endpoint("name={name}"),
    ("GET", STREAM): Endpoint(""),
    ("HEAD", STREAM): Endpoint(""),
    ("PUT", STREAM): Endpoint(""),
    ("POST", STREAM): Endpoint("", "x"),
    ("DELETE", "/v1/channel"): Endpoint("name={name}"),
    ("DELETE", "/v1/topic"): Endpoint("name={name}"),
    ("DELETE", STREAM): Endpoint(""),
}


def of_endpoint(method: str, path: str) -> Way:
    endpoint = OF_NAMES[method, path]

    def way(server: ServerProcess, name: str, who: str) -> Outcome:
        query = endpoint.query.format(name=name, who=who)
        body = endpoint.body.format(name=name, who=who)
        url = f"{path.replace(NAME, name)}?{query}"
        headers = {"Content-Type": "application/octet-stream"} if path == STREAM else {}
        answer = ask(server, "narrow", method, url, content=body, headers=headers)
        assert answer.status_code not in (400, 401, 405), answer.text
        return Outcome(answer.status_code != 403, answer.text)

    return way


def of_list(path: str, query: str) -> Way:
    def way(server: ServerProcess, name: str, who: str) -> Outcome:
        answer = ask(server, "narrow", "GET", f"{path}?{query.format(who=who)}")
        assert answer.status_code == 200, answer.text
        assert THEIRS not in answer.text
        return Outcome(name in answer.text, answer.text)

    return way


def upload(server: ServerProcess, name: str, who: str) -> Outcome:
    block = encode_block_header(name, b"\0\0\0\1x", 1) + b"\0\0\0\1x"
    staged = ask(server, "narrow", "POST", "/v1/staged", content=block)
    if staged.status_code == 403:
        return Outcome(False, staged.text)
    body = {"producer": who, "number": 0, "staged": [staged.json()["id"]]}
    answer = ask(server, "narrow", "POST", "/v1/batches", json=body)
    assert answer.status_code in (200, 403), answer.text
    return Outcome(answer.status_code == 200, answer.text)


# Figg and Wombat


def say_figg(server: ServerProcess, *frames: bytes) -> Outcome:
    """Send Figg frames. A first answer of any kind but a refusal means that access was given."""
    with Figg(server, "narrow") as peer:
        assert isinstance(peer.hear(), tokens.AuthOk)
        peer.send(*frames)
        first = peer.hear()
        return Outcome(not isinstance(first, tokens.AuthRefused | readers.Lost | None), repr(first))


def say_wombat(server: ServerProcess, message: bytes) -> Outcome:
    with Socket(server, wombat.PATH, bearer="narrow") as peer:
        peer.send(message)
        first = peer.hear()
        refused = first is None or first["type"] in (tokens.AUTH_REFUSED, readers.LOST)
        return Outcome(not refused, repr(first))


def read_as(name: str, who: str) -> readers.Read:
    return readers.Read(name, who, newest=False, instance=1, window=1000)


def fork(server: ServerProcess, name: str, who: str) -> Outcome:
    """Ask for the records of a stream as those of another one, whose name the token may use."""
    source = {"Stream-Forked-From": f"/v1/stream/{name}"}
    answer = ask(server, "narrow", "PUT", f"/v1/stream/{MINE}", headers=source)
    return Outcome(answer.status_code != 403, answer.text)


TOPIC_WAYS: dict[str, Way] = {
    "streams: fork": fork,
    "figg: publish": lambda server, name, who: say_figg(server, figg.encode_publish(name, 0, b"x")),
    "figg: attach": lambda server, name, who: say_figg(server, figg.encode_attach(name, None)),
    "figg: replay": lambda server, name, who: say_figg(server, figg.encode_attach(name, 0)),
    "figg: named reader": lambda server, name, who: say_figg(
        server, figg.encode_of_reader(read_as(name, who))
    ),
    "wombat: publish": lambda server, name, who: say_wombat(
        server, wombat.encode_publish(name, 1, b"x")
    ),
    "wombat: attach": lambda server, name, who: say_wombat(
        server, wombat.encode_attach(name, None)
    ),
    "wombat: replay": lambda server, name, who: say_wombat(
        server, wombat.encode_attach(name, "0:0")
    ),
    "wombat: named reader": lambda server, name, who: say_wombat(
        server, wombat.encode_of_reader(read_as(name, who))
    ),
}


# Channels and Logux


def of_channel(**request: Any) -> Way:
    """Return a way that says hello as somebody and sends a request for a channel."""

    def way(server: ServerProcess, name: str, who: str) -> Outcome:
        with Socket(server, channel.PATH) as peer:
            peer.send({"type": "hello", "processor": who, "token": "narrow"})
            heard = peer.hear()
            if heard["type"] == "error":
                return Outcome(False, repr(heard))
            peer.send({"channel": name} | request)
            heard = peer.hear()
            return Outcome(heard.get("code") not in ("forbidden", "wrong-credentials"), repr(heard))

    return way


CHANNEL_WAYS: dict[str, Way] = {
    "channel: join": of_channel(type="join", origin=0),
    "channel: join for the state": of_channel(type="join", origin="state"),
    "channel: send": of_channel(type="send", number=9, payload=1),
    "channel: fetch": of_channel(type="fetch"),
    "channel: ack": of_channel(type="ack", offset=0),
    "channel: upload": of_channel(type="upload", offset=0, payload=1),
    "channel: snapshot": of_channel(type="snapshot"),
    "channel: leave": of_channel(type="leave"),
}


def of_logux(version: Any, *, writes: bool) -> Way:
    def way(server: ServerProcess, name: str, who: str) -> Outcome:
        shown = {"token": "narrow"} if version == 5 else {"credentials": "narrow"}
        with Socket(server, f"{logux.PATH}/{name}") as peer:
            peer.send(["connect", version, f"{who}:1", 0, shown])
            heard = [peer.hear()]
            if heard[0][0] == "headers":
                heard.append(peer.hear())
            if heard[-1][0] == "error":
                return Outcome(False, repr(heard))
            if writes:
                id_of = [9, f"{who}:1", 0]
                created = {"id": id_of, "time": 1} if version == 5 else id_of
                peer.send(["sync", 1, {"type": "test"}, created])
                while heard[-1] is not None and heard[-1][0] not in ("synced", "error"):
                    heard.append(peer.hear())
            return Outcome(heard[-1] is not None and heard[-1][0] != "error", repr(heard))

    return way


LOGUX_WAYS: dict[str, Way] = {
    f"logux {version}: {'write' if writes else 'subscribe'}": of_logux(version, writes=writes)
    for version in (5, [0, 1])
    for writes in (False, True)
}

NAMING_NOBODY = {way for way in TOPIC_WAYS if "named reader" not in way}

# Deletions come last, so that every other way finds something.
WAYS: dict[str, Way] = (
    TOPIC_WAYS
    | CHANNEL_WAYS
    | LOGUX_WAYS
    | {f"{method} {path}": of_list(path, query) for (method, path), query in LISTS.items()}
    | {"upload": upload}
    | {f"{method} {path}": of_endpoint(method, path) for method, path in OF_NAMES}
)


def names_somebody(way: str) -> bool:
    if " /v1" in way:
        method, path = way.split()
        return (method, path) in OF_NAMES and OF_NAMES[method, path].names_somebody
    return way not in NAMING_NOBODY


def test_every_endpoint_that_asks_for_access_is_a_way():
    asking = {endpoint for endpoint, row in ENDPOINTS.items() if row.needs}
    assert asking == OF_SERVER | STAGING | LISTS.keys() | OF_NAMES.keys()


def facts(server: ServerProcess) -> str:
    """Return everything about their names that a change of them would change."""
    topics = [
        ask(server, "all", "GET", f"/v1/topic?name={prefix}{THEIRS}").json() for prefix in RESERVED
    ]
    told = ask(server, "all", "GET", f"/v1/channel?name={THEIRS}").json()
    members = [(one["processor"], one["cursor"], one["number"]) for one in told["members"]]
    cursors = [ask(server, "all", "GET", f"/v1/cursors?reader={who}").json() for who in (ME, OTHER)]
    kept = ("name", "start", "end", "records")
    return json.dumps(
        [
            [{key: topic.get(key) for key in kept} for topic in topics],
            [members, told["snapshot"], told["destroyed_ms"], told["kept"]],
            [one for found in cursors for one in found["cursors"] if one["topic"] == THEIRS],
        ]
    )


def test_no_protocol_forgets_a_rule_that_another_has(server: ServerProcess) -> None:
    before = facts(server)
    wrong = []
    for what, way in WAYS.items():
        theirs = way(server, THEIRS, ME)
        if theirs.is_allowed:
            wrong.append(f"{what}: allowed with a name without a grant")
        if SECRET.decode() in theirs.heard:
            wrong.append(f"{what}: {theirs.heard}")
        if names_somebody(what) and way(server, MINE, OTHER).is_allowed:
            wrong.append(f"{what}: allowed as somebody else")
    for method, path in sorted(OF_SERVER):
        if ask(server, "narrow", method, path).status_code != 403:
            wrong.append(f"{method} {path}: allowed with grants for one name")
    # The names of topics that belong to channels and to Logux logs open no back door.
    for prefix in RESERVED[1:]:
        of_topics = (*TOPIC_WAYS, *(f"{m} {p}" for m, p in OF_NAMES if "channel" not in p))
        wrong += [
            f"{what}: allowed with {prefix}{THEIRS}"
            for what in of_topics
            if WAYS[what](server, prefix + THEIRS, ME).is_allowed
        ]
    assert not wrong, "\n".join(wrong)
    assert facts(server) == before
    # The same token, by the same ways: all of this is refused for no other reason than the name.
    for what, way in WAYS.items():
        mine = way(server, MINE, ME)
        assert mine.is_allowed, (what, mine.heard)
