"""Repeatedly refused publishes, over both protocols: held, closed, counted, logged once."""

from collections.abc import Iterator

import pytest

from headrace.model import CHANNEL_PREFIX, LOGUX_PREFIX
from headrace.testing import ServerProcess
from tests.system.figg import foreign as figg
from tests.system.support import metrics
from tests.system.wombat import foreign as wombat

TOO_LARGE = bytes(262_145)
RAW_TOPIC = b"\x82\xa4type\x03\xa7publish\x83\xa7message\xc4\x01x\xafsequence_number\x08\xa5topic\xa2\xff\xfe"
REASONS = ("reserved_topic", "empty_topic", "long_topic", "topic_not_utf8", "large_payload")

FIGG = [
    ("reserved_topic", figg.publish(CHANNEL_PREFIX.encode() + b"x", 8, b"x")),
    ("reserved_topic", figg.publish(LOGUX_PREFIX.encode() + b"x", 8, b"x")),
    ("reserved_topic", figg.publish(b"$", 8, b"x")),
    ("empty_topic", figg.publish(b"", 8, b"x")),
    ("long_topic", figg.publish(b"x" * 256, 8, b"x")),
    ("topic_not_utf8", figg.publish(b"\xff", 8, b"x")),
    ("large_payload", figg.publish(b"t", 8, TOO_LARGE)),
]
WOMBAT = [
    ("reserved_topic", 1008, wombat.publish(f"{CHANNEL_PREFIX}x", 8, b"x")),
    ("reserved_topic", 1008, wombat.publish(f"{LOGUX_PREFIX}x", 8, b"x")),
    ("reserved_topic", 1008, wombat.publish("$", 8, b"x")),
    ("empty_topic", 1008, wombat.publish("", 8, b"x")),
    ("long_topic", 1008, wombat.publish("x" * 256, 8, b"x")),
    ("topic_not_utf8", 1002, RAW_TOPIC),
    ("large_payload", 1009, wombat.publish("t", 8, TOO_LARGE)),
    ("large_payload", 1009, wombat.publish("t", 8, bytes(600_000))),  # refused by its header
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("refused")
    config = directory / "headrace.toml"
    config.write_text("[limits]\nrefusal_delay_s = 0.01\nrefusal_delay_max_s = 0.01\n")
    with ServerProcess(directory / "data", "--config", str(config)) as process:
        yield process


def counted(server: ServerProcess, protocol: str) -> dict[str, float]:
    found = metrics(server)
    names = {
        why: f'headrace_refusals_total{{protocol="{protocol}",reason="{why}"}}' for why in REASONS
    }
    return {why: found[name] for why, name in names.items()}


def test_over_figg(server: ServerProcess) -> None:
    for why, bad in FIGG:
        before = counted(server, "figg")
        with figg.Wire(server.figg) as wire:
            wire.send(figg.publish(b"t", 7, b"before"), bad, figg.publish(b"t", 9, b"after"))
            assert wire.until_closed() == [figg.Message(figg.ACK, number=7)]
        assert counted(server, "figg") == before | {why: before[why] + 1}
    assert server.stderr.count("closing: ") == 1, "one line for an address"


def test_over_wombat(server: ServerProcess) -> None:
    for why, code, bad in WOMBAT:
        before = counted(server, "wombat")
        with wombat.Wire(server.ws) as wire:
            wire.send(wombat.publish("t", 7, b"before"), bad, wombat.publish("t", 9, b"after"))
            messages, closed = wire.until_closed()
            assert messages == [wombat.Message(wombat.ACK, "t", number=7)]
            assert closed.code == code and closed.reason
        assert counted(server, "wombat") == before | {why: before[why] + 1}
