"""The foreign client's codec against bytes that were written by hand from the seed."""

import pytest

from tests.system.figg import foreign as figg


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
def test_what_it_sends_is_what_the_seed_says(made: bytes, wanted: str) -> None:
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
def test_what_servers_send_is_read_in_pieces_of_any_size(step: int) -> None:
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
def test_a_server_that_breaks_the_protocol_is_noticed(sent: str) -> None:
    with pytest.raises(ValueError, match="the server sent"):
        figg.Decoder().feed(bytes.fromhex(sent))
