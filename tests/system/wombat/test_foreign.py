"""The foreign clients use no code of headrace, and the Wombat client sends what the seed says."""

import ast
from pathlib import Path

import pytest

from tests.system.figg import foreign as foreign_figg
from tests.system.wombat import foreign as foreign_wombat
from tests.system.wombat import foreign as wombat


@pytest.mark.parametrize("client", [foreign_figg, foreign_wombat], ids=["figg", "wombat"])
def test_a_foreign_client_imports_nothing_of_ours(client: object) -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(Path(str(client.__file__)).read_text())):  # type: ignore[attr-defined]
        if isinstance(node, ast.Import):
            imported.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level
            imported.add(str(node.module).partition(".")[0])
        elif isinstance(node, ast.Name):
            assert node.id not in ("__import__", "import_module")
    assert imported
    assert not imported & {"headrace", "tests"}


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (wombat.attach("foo"), b"\x82\xa4type\x01\xa6attach\x81\xa5topic\xa3foo"),
        (
            wombat.attach("foo", "5@7"),
            b"\x82\xa4type\x01\xa6attach\x82\xa5topic\xa3foo\xa6serial\xa35@7",
        ),
        (
            wombat.publish("t", 5, b"x"),
            b"\x82\xa4type\x03\xa7publish\x83\xa5topic\xa1t\xa7message\xc4\x01x\xafsequence_number\x05",
        ),
        (wombat.ping(9), b"\x82\xa4type\x06\xa4ping\x81\xa9timestamp\x09"),
        (wombat.detach("foo"), b"\x82\xa4type\x08\xa6detach\x81\xa5topic\xa3foo"),
    ],
)
def test_what_it_sends_is_what_the_seed_says(made: bytes, wanted: bytes) -> None:
    assert made == wanted


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (
            b"\x82\xa4type\x02\xa8attached\x82\xa5topic\xa3foo\xa6serial\xa35@7",
            wombat.Message(wombat.ATTACHED, "foo", "5@7"),
        ),
        (
            b"\x82\xa4type\x04\xa3ack\x82\xa5topic\xa3foo\xafsequence_number\xce\xff\xff\xff\xff",
            wombat.Message(wombat.ACK, "foo", number=2**32 - 1),
        ),
        (
            b"\x82\xa4type\x05\xa7payload\x83\xa5topic\xa1t\xa6serial\xa35@7\xa7message\xc6\0\0\0\x01x",
            wombat.Message(wombat.PAYLOAD, "t", "5@7", data=b"x"),
        ),
        (
            b"\x82\xa4type\x07\xa4pong\x81\xa9timestamp\x09",
            wombat.Message(wombat.PONG, number=9),
        ),
        (
            b"\x82\xa4type\x09\xa8detached\x81\xa5topic\xa3foo",
            wombat.Message(wombat.DETACHED, "foo"),
        ),
    ],
)
def test_what_servers_send_is_read(sent: bytes, read: wombat.Message) -> None:
    assert wombat.decode(sent) == read


@pytest.mark.parametrize(
    "sent",
    [
        wombat.pack([]),
        wombat.attach("foo"),
        wombat.message(wombat.ACK, "ack", topic="foo"),
        wombat.message(wombat.ACK, "ack", topic="foo", sequence_number=1, more=2),
        wombat.message(wombat.ACK, "attached", topic="foo", serial=""),
        wombat.message(wombat.ATTACHED, "attached", topic="foo", serial=None),
        wombat.message(wombat.PAYLOAD, "payload", topic="foo", serial="5@7", message="text"),
        wombat.message(99, "ack", topic="foo", sequence_number=1),
    ],
)
def test_a_server_that_breaks_the_protocol_is_noticed(sent: bytes) -> None:
    with pytest.raises(ValueError, match="the server sent"):
        wombat.decode(sent)
