"""The decision point without a server: identities, their ends, guesses, and files that come and go."""

from pathlib import Path

import pytest

from headrace.access import tokens as stored
from headrace.access.guesses import FREE
from headrace.access.operations import Operation
from headrace.access.principals import OPEN, Principal
from headrace.config.protocols import Access as AccessSettings
from headrace.config.settings import Config, Listen
from headrace.config.values import Address, Grants
from headrace.errors import ListenError
from headrace.server.access import CHANGED, EXPIRED, Access, Refused
from headrace.server.metrics.metrics import Metrics

NOW_MS = 1_800_000_000_000


class World:
    """A decision point whose clock and background thread a test controls."""

    def __init__(self, directory: Path, config: Config | None = None) -> None:
        self.file = directory / "tokens.json"
        self.now_ms = NOW_MS
        self.now_s = 0.0
        self.config = config or Config()
        self.access = self.start()

    def start(self) -> Access:
        return Access(self.config, self.file, lambda: self.now_ms, Metrics())

    def write(self, *names: str, expires_ms: int | None = None, grants: str = "inspect:*") -> None:
        made: stored.Tokens = ()
        for name in names:
            made = stored.added(made, name, name, [grants], now_ms=0, expires_ms=expires_ms)
        self.file.unlink(missing_ok=True)
        self.file.write_bytes(stored.encode(made))
        self.look()

    def look(self) -> None:
        self.now_s += 1
        self.access.tick(self.now_s, self)  # type: ignore[arg-type]

    def background(self, work, done) -> None:
        done(work())

    def identify(self, token: str, address: str = "a") -> Principal | Refused:
        return self.access.identify(token, address, self.now_s, "http")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_without_access_control_everyone_may_do_everything(world):
    assert world.identify("anything") is OPEN
    assert world.access.anonymous is OPEN
    assert world.access.decide(OPEN, Operation.DELETE, "topic")


def test_guesses_wait_longer_and_a_right_token_never_waits(world):
    world.write("right")
    world.look()
    delays = [world.identify("wrong").delay_s for _ in range(3 * FREE)]
    assert delays[0] == 0 < delays[-1]
    assert world.identify("wrong", "b").delay_s == 0
    for _ in range(3):
        assert isinstance(world.identify("right"), Principal)
        assert world.identify("wrong").delay_s > 0


def test_a_network_of_ipv6_addresses_guesses_as_one(world):
    world.write("right")
    world.start()
    delays = [world.identify("wrong", f"2001:db8::{n:x}").delay_s for n in range(2 * FREE)]
    assert delays[-1] > 0
    assert world.identify("wrong", "2001:db8:0:1::1").delay_s == 0


def test_an_expired_or_revoked_token_is_no_guess(world):
    world.write("old", expires_ms=1)
    for _ in range(3 * FREE):
        assert world.identify("old") == Refused(EXPIRED)


def test_who_holds_a_principal_is_told_once_when_it_ends(world):
    world.write("a", "b")
    ended: list[str] = []
    for name in ("a", "b"):
        world.access.hold(
            world.identify(name), lambda why, name=name: ended.append(f"{name} {why}")
        )
    world.write("b")
    assert ended == [f"a {CHANGED}"]
    world.write("b", grants="inspect:x")
    world.look()
    assert ended == [f"a {CHANGED}", f"b {CHANGED}"]


def test_who_has_let_go_is_told_nothing(world):
    world.write("a")
    ended: list[str] = []
    principal = world.identify("a")
    world.access.hold(principal, ended.append)
    world.access.release(principal, ended.append)
    world.write("b")
    assert not ended
    world.access.hold(principal, ended.append)  # its token has gone meanwhile
    assert ended == [CHANGED]


def test_no_right_outlives_its_token(world):
    world.write("a", expires_ms=NOW_MS + 10)
    principal = world.identify("a")
    ended: list[str] = []
    world.access.hold(principal, ended.append)
    assert world.access.decide(principal, Operation.INSPECT, "topic")
    assert world.access.valid_ms(principal) == 10
    world.now_ms += 10
    assert not world.access.decide(principal, Operation.INSPECT, "topic")
    assert not world.access.has(principal, Operation.INSPECT)
    world.look()
    assert ended == [EXPIRED]
    world.now_ms = NOW_MS
    world.write("b")
    assert not world.access.decide(principal, Operation.INSPECT, "topic")


def test_control_that_is_on_stays_on(world):
    world.write("a")
    world.file.write_bytes(b"")
    world.look()
    assert "damaged" in world.access.trouble
    assert isinstance(world.identify("a"), Principal)  # known before
    assert not world.access.decide(world.access.anonymous, Operation.INSPECT, "topic")
    world.file.unlink()
    world.look()
    world.access.reload(Config())
    assert not world.access.trouble
    assert isinstance(world.identify("a"), Refused)
    assert not world.access.decide(world.access.anonymous, Operation.INSPECT, "topic")


@pytest.mark.parametrize("content", [b"", b"{}", b"null", b"\xff"])
def test_a_start_with_a_damaged_file_lets_nobody_in(tmp_path, content):
    (tmp_path / "tokens.json").write_bytes(content)
    world = World(tmp_path)
    assert isinstance(world.identify("a"), Refused)
    assert not world.access.decide(world.access.anonymous, Operation.INSPECT, "")
    assert "damaged" in world.access.trouble


def test_a_file_that_may_not_be_read_lets_nobody_in(tmp_path):
    (tmp_path / "tokens.json").mkdir()  # cannot be read, not even by root
    world = World(tmp_path)
    assert world.access.is_on
    assert isinstance(world.identify("a"), Refused)


def test_peers_without_credentials_have_the_grants_of_the_configuration(tmp_path):
    grants = Grants.parse(["subscribe:news/*"])
    world = World(tmp_path, Config(access=AccessSettings(anonymous=grants)))
    anonymous = world.access.anonymous
    assert world.access.decide(anonymous, Operation.SUBSCRIBE, "news/1")
    assert not world.access.decide(anonymous, Operation.PUBLISH, "news/1")
    ended: list[str] = []
    world.access.hold(anonymous, ended.append)
    world.access.reload(world.config)
    assert not ended
    world.access.reload(Config())
    assert ended == [CHANGED]
    assert not world.access.decide(world.access.anonymous, Operation.SUBSCRIBE, "news/1")


@pytest.mark.parametrize(
    ("host", "is_reached"),
    [
        *(("127.0.0.1", False), ("127.9.9.9", False), ("::1", False), ("localhost", False)),
        *(("0.0.0.0", True), ("::", True), ("10.0.0.1", True), ("::ffff:10.0.0.1", True)),
    ],
)
def test_an_address_is_reached_by_others_or_not(world, host, is_reached):
    listeners = {"figg": Address("127.0.0.1", 1), "http": Address(host, 8121)}
    if is_reached:
        with pytest.raises(ListenError, match=r"listen\.http"):
            world.access.check_listeners(listeners)
    else:
        world.access.check_listeners(listeners)
    world.write("a")
    world.access.check_listeners(listeners)


def test_an_insecure_server_says_so_until_it_has_tokens(tmp_path):
    world = World(tmp_path, Config(listen=Listen(insecure_open=True)))
    world.access.check_listeners({"http": Address("0.0.0.0", 8121)})
    assert world.access.trouble == "insecure-open"
    world.write("a")
    assert not world.access.trouble
