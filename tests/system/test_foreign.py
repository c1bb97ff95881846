"""The foreign clients use no code of headrace, and their codecs follow the seeds, byte by byte."""

import ast
from pathlib import Path
from types import ModuleType

import pytest

from tests.system import foreign
from tests.system.figg import foreign as figg
from tests.system.wombat import foreign as wombat


@pytest.mark.parametrize("module", [foreign, figg, wombat], ids=["shared", "figg", "wombat"])
def test_a_foreign_client_imports_nothing_of_ours(module: ModuleType) -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            imported.update(names if node.module == "tests.system" else [str(node.module)])
        elif isinstance(node, ast.Name):
            assert node.id not in ("__import__", "import_module")
    ours = {name for name in imported if name.partition(".")[0] in ("headrace", "tests")}
    assert imported
    assert ours <= {"tests.system.foreign"}


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
def test_wombat_is_sent_as_the_seed_says(made: bytes, wanted: bytes) -> None:
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
def test_wombat_is_read_as_the_seed_says(sent: bytes, read: wombat.Message) -> None:
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
def test_a_server_that_breaks_wombat_is_noticed(sent: bytes) -> None:
    with pytest.raises(ValueError, match="the server sent"):
        wombat.decode(sent)


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (figg.attach(b"foo"), "0001 0001 00000011 0000 00000003 666f6f 0000000000000000"),
        (figg.attach(b"foo", 7), "0001 0001 00000011 8000 00000003 666f6f 0000000000000007"),
        (figg.detach(b"foo"), "0003 0001 00000007 00000003 666f6f"),
        (
            figg.publish(b"foo", 5, b"bar"),
            "0005 0001 00000016 00000003 666f6f 0000000000000005 00000003 626172",
        ),
        (figg.ping(9), "0008 0001 00000008 0000000000000009"),
    ],
)
def test_figg_is_sent_as_the_seed_says(made: bytes, wanted: str) -> None:
    assert made == bytes.fromhex(wanted)


SENT_BY_SERVERS = bytes.fromhex(
    "0002 0001 0000000f 00000003 666f6f 0000000000000007"
    "0004 0001 00000007 00000003 666f6f"
    "0006 0001 00000008 0000000000000005"
    "0007 0001 00000016 00000003 666f6f 000000000000000e 00000003 626172"
    "0009 0001 00000008 0000000000000009"
)
RECEIVED = [
    figg.Message(figg.ATTACHED, b"foo", 7),
    figg.Message(figg.DETACHED, b"foo"),
    figg.Message(figg.ACK, number=5),
    figg.Message(figg.DATA, b"foo", 14, b"bar"),
    figg.Message(figg.PONG, number=9),
]


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_figg_is_read_in_pieces_of_any_size(step: int) -> None:
    decoder = figg.Decoder()
    messages = []
    for at in range(0, len(SENT_BY_SERVERS), step):
        messages += decoder.feed(SENT_BY_SERVERS[at : at + step])
    assert messages == RECEIVED


@pytest.mark.parametrize(
    "sent",
    [
        "0007 0001 00000015 00000003 666f6f 000000000000000e 00000003 6261",
        "0004 0001 00000008 00000003 666f6f 00",
        "0006 0001 00000007 00000000000000",
        "0006 0002 00000008 0000000000000005",
        "0001 0001 00000004 00000000",
    ],
)
def test_a_server_that_breaks_figg_is_noticed(sent: str) -> None:
    with pytest.raises(ValueError, match="the server sent"):
        figg.Decoder().feed(bytes.fromhex(sent))
