"""Blocks of an upload: which are accepted, which are refused with which message, and reading them back."""

import struct
from pathlib import Path

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import BadBlockError
from headrace.log.batch.blocks import BlockDecoder, Damaged, encode_block, read_staged, staged_seed
from headrace.log.read.index import RUN_BYTES_MAX, RUN_RECORDS_MAX
from headrace.log.records import pack_record
from headrace.log.store import Block
from headrace.model import PAYLOAD_BYTES_MAX
from headrace.payload import UPLOAD_CHECKS

ID = "0f" * 16

payloads = st.lists(st.binary(max_size=60), min_size=1, max_size=12)
topics = st.sampled_from(["a", "b/c", "ö" * 100])
uploads = st.lists(st.tuples(topics, payloads), max_size=6)


def body(*blocks: tuple[str, list[bytes]]) -> bytes:
    return b"".join(
        encode_block(topic, b"".join(map(pack_record, payloads)), len(payloads))
        for topic, payloads in blocks
    )


def staged(data: bytes, *cuts: int) -> bytes:
    """Return the staged bytes of an upload that arrives in pieces."""
    decoder = BlockDecoder(UPLOAD_CHECKS, staged_seed(ID))
    made = b""
    for first, last in zip((0, *cuts), (*cuts, len(data)), strict=True):
        made += b"".join(decoder.feed(data[first:last]))
    decoder.finish()
    return made


def read_all(path: Path, size: int, bytes_max: int) -> list[Block | Damaged]:
    found: list[Block | Damaged] = []
    position = 0
    while position < size:
        some = read_staged(path, position, size, bytes_max)
        assert some and some[-1].next > position
        found += [one.what for one in some]
        position = some[-1].next
    assert position == size
    return found


def blocks_of(upload) -> list[Block]:
    return [
        Block(topic, len(payloads), b"".join(map(pack_record, payloads)))
        for topic, payloads in upload
    ]


@given(uploads, st.data(), st.sampled_from([1, 100, 1 << 20]))
def test_an_upload_is_read_back_as_it_came_however_it_was_cut(tmp_path_factory, upload, data, many):
    sent = body(*upload)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=5)))
    made = staged(sent, *cuts)
    assert len(made) == len(sent)
    path = tmp_path_factory.mktemp("blocks") / ID
    path.write_bytes(made)
    assert read_all(path, len(made), many) == blocks_of(upload)


THREE = (("a", [b"one"]), ("b", [b"two", b"three"]), ("c", [b"four"]))


@pytest.mark.parametrize("many", [1, 1 << 20])
def test_a_damaged_header_costs_its_own_block(tmp_path, many):
    made = staged(body(*THREE))
    first, _, third = blocks_of(THREE)
    begin = len(body(THREE[0]))
    for at in range(begin, begin + 19):
        damaged = bytearray(made)
        damaged[at] ^= 1
        (tmp_path / ID).write_bytes(damaged)
        found = read_all(tmp_path / ID, len(made), many)
        assert [one for one in found if isinstance(one, Block)] == [first, third]
        assert any(isinstance(one, Damaged) for one in found)


def test_neither_a_payload_nor_a_copy_is_taken_for_a_block(tmp_path):
    """This holds even after a damaged header, where the reader searches for the next block."""
    forged = staged(body(("victim", [b"never uploaded"])))
    blocks = (("a", [b"." + forged]), ("b", [b"two"]))
    made = bytearray(staged(body(*blocks)))
    made[0] ^= 1
    (tmp_path / ID).write_bytes(made)
    found = read_all(tmp_path / ID, len(made), 1 << 20)
    assert [one for one in found if isinstance(one, Block)] == blocks_of(blocks)[1:]


def test_a_payload_is_not_taken_for_a_block_where_a_search_goes_on(tmp_path):
    """A block without an intact header is longer than one read, so the next read begins inside it."""
    rest = struct.pack(">HIII", 6, 1, 10, crc32c(pack_record(b"forged"))) + b"victim"
    forged = crc32c(rest).to_bytes(4) + rest + pack_record(b"forged")
    records = [pack_record(b"")] + [pack_record(forged * (PAYLOAD_BYTES_MAX // len(forged)))] * 3
    name = "n" * 255
    # The forged header is at the position where the next read begins.
    begin = len(encode_block(name, b"", 0)) + len(b"".join(records)) + 4
    filler = (1 << 20) - begin
    records.append(pack_record(bytes(filler) + forged))
    data = b"".join(records)
    sent = encode_block(name, data, len(records)) + body(("other", [b"sound"]))
    made = bytearray(staged(sent))
    made[8] ^= 1
    (tmp_path / ID).write_bytes(made)
    found = read_all(tmp_path / ID, len(made), 4096)
    assert [one.topic for one in found if isinstance(one, Block)] == ["other"]


def test_a_staged_file_of_an_earlier_version_is_read(tmp_path):
    decoder = BlockDecoder(UPLOAD_CHECKS)
    made = b"".join(decoder.feed(body(*THREE)))
    # Headers of the earlier version have no seed.
    places = [0, len(body(THREE[0])), len(body(*THREE[:2]))]
    old = bytearray(made)
    for at in places:
        old[at : at + 4] = crc32c(bytes(old[at + 4 : at + 19])).to_bytes(4)
    (tmp_path / ID).write_bytes(old)
    assert read_all(tmp_path / ID, len(old), 1 << 20) == blocks_of(THREE)


def test_an_upload_is_taken_byte_by_byte():
    sent = body(("a", [b"one", b"two"]), ("b", [b""]))
    assert staged(sent, *range(1, len(sent))) == staged(sent)


@given(st.binary(min_size=1, max_size=200))
def test_random_bytes_are_refused(data):
    with pytest.raises(BadBlockError):
        staged(data)


@given(uploads.filter(bool), st.data())
def test_a_cut_upload_is_refused(upload, data):
    sent = body(*upload)
    lengths = [len(body(*upload[:count])) for count in range(len(upload) + 1)]
    cut = data.draw(st.integers(1, len(sent) - 1).filter(lambda at: at not in lengths))
    with pytest.raises(BadBlockError, match=r"^block \d+ at byte \d+: the body ends inside it$"):
        staged(sent[:cut])


@given(uploads.filter(bool), st.data())
def test_a_flipped_bit_is_refused_or_is_the_topics_name(upload, data):
    sent = bytearray(body(*upload))
    at = data.draw(st.integers(0, len(sent) * 8 - 1))
    sent[at // 8] ^= 1 << at % 8
    if _in_a_name(upload, at // 8):
        return  # the checksum covers only the records
    with pytest.raises(BadBlockError, match=r"^block \d+ at byte \d+: "):
        staged(bytes(sent))


def _in_a_name(upload, at: int) -> bool:
    position = 0
    for topic, payloads in upload:
        name = position + 18
        if name <= at < name + len(topic.encode()):
            return True
        position += len(body((topic, payloads)))
    return False


def header(
    magic: bytes = b"HRB1",
    name: bytes = b"a",
    count: int = 1,
    data: bytes = b"\0\0\0\1x",
    length: int | None = None,
    crc: int | None = None,
) -> bytes:
    length = len(data) if length is None else length
    crc = crc32c(data) if crc is None else crc
    return struct.pack(">4sHIII", magic, len(name), count, length, crc) + name + data


LONG = pack_record(bytes(PAYLOAD_BYTES_MAX + 1))


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (header(magic=b"HRB2"), "it begins with b'HRB2' instead of b'HRB1'"),
        (header(name=b""), "a topic name must not be empty"),
        (header(name=b"\xff"), "its topic name is not UTF-8"),
        (header(name=b"x" * 256), "a topic name may have 255 bytes of UTF-8, this one has 256"),
        (
            header(name=b"$logux/"),
            "topic '$logux/' is only a prefix: a name is missing behind it",
        ),
        (header(name=b"$logux/" + b"x" * 250), "its topic name has 257 bytes, 256 are allowed"),
        (
            header(name=b"$channel/"),
            "topic '$channel/' is only a prefix: a name is missing behind it",
        ),
        (
            header(name=b"$channel/x"),
            "record 1: this is not a channel message: Expected `array`, got `int`",
        ),
        (header(count=0), "it has 0 records, 1 to 500 are allowed"),
        (header(count=501), "it has 501 records, 1 to 500 are allowed"),
        (header(length=3), "3 bytes cannot hold 1 records, or exceed 1048576"),
        (
            header(length=RUN_BYTES_MAX + 1),
            "1048577 bytes cannot hold 1 records, or exceed 1048576",
        ),
        (header(crc=7), "the checksum of its records is wrong"),
        (header(data=b"\0\0\0\2x"), "its 5 bytes are not 1 records of an allowed size"),
        (header(data=LONG), "its 262149 bytes are not 1 records of an allowed size"),
        (header() + b"H", "the body ends inside it"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(sent, reason):
    good = body(("a", [b"good"]))
    with pytest.raises(BadBlockError) as caught:
        staged(good + sent)
    number = 3 if "ends inside" in reason else 2
    at = len(good) + (len(sent) - 1 if number == 3 else 0)
    assert str(caught.value) == f"block {number} at byte {at}: {reason}"


EVENT = b'{"event":{"type":"t"},"created":[1,"a",0]}'


def test_events_for_logs_of_logux_are_taken():
    events = [
        EVENT,
        b'{"event":{"type":"t","x":[{}]},"id":"1.5 a:b:c 0","time":2.5,"meta":{"subprotocol":1},"origin":5}',
        b' {"created" : ["any", 5], "event" : {"type":"t"}, "origin": null, "more": 1} ',
        b'{"event":{"type":"t","deep":' + b"[" * 98 + b"]" * 98 + b'},"created":[1]}',
    ]
    assert staged(body(("$logux/x", events), ("other", [b"anything"])))


NO_EVENT = "this is not a Logux event"


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", NO_EVENT),
        (b"text", NO_EVENT),
        (b'{"created":[1]}', NO_EVENT),
        (b'{"event":{"type":"t"}}', "it has neither `created` nor `id`"),
        (b'{"event":{"type":"t"},"created":5}', NO_EVENT),
        (
            b'{"event":{"type":"t"},"created":[]}',
            "its `created` is not an array of numbers and strings",
        ),
        (b'{"event":{"type":"t"},"created":[null]}', "its `created` is not an array"),
        (b'{"event":{"type":"t"},"created":[true,"a",0]}', "its `created` is not an array"),
        (b'{"event":{"type":"t"},"created":[1e300,"a",0]}', "its `created` is not an array"),
        (
            b'{"event":{"type":"t"},"created":[9223372036854775808]}',
            "its `created` is not an array",
        ),
        (b'{"event":{"type":"t"},"id":"1 a"}', "'1 a' is not an id"),
        (
            b'{"event":{"type":"t"},"id":"99999999999999999999 a 0"}',
            "its `created` is not an array",
        ),
        (b'{"event":{"type":"t"},"id":"1 a 0","created":[1,"a",0]}', "both `created` and `id`"),
        (b'{"event":{"type":"t"},"created":[1],"time":"now"}', NO_EVENT),
        (b'{"event":{"type":"t"},"created":[1],"time":1e19}', "its `time` is 1e+19"),
        (b'{"event":{"type":"t"},"created":[1],"origin":{}}', NO_EVENT),
        (b'{"event":{},"created":[1]}', "its event is not an object with a string `type`"),
        (b'{"event":{"type":5},"created":[1]}', "its event is not an object with a string `type`"),
        (b'{"event":["type"],"created":[1]}', "its event is not an object with a string `type`"),
        (b'{"event":{"type":"\xff"},"created":[1]}', "its event is not JSON"),
        (b'{"event":{"type":"t","x":1e999},"created":[1]}', "its event is not JSON"),
        (
            b'{"event":{"type":"t","deep":' + b"[" * 100 + b"]" * 100 + b'},"created":[1]}',
            "lie more than 100 deep in each other",
        ),
    ],
)
def test_what_no_client_of_logux_could_have_brought_is_refused(payload, reason):
    with pytest.raises(BadBlockError, match=r"^block 2 at byte \d+: record 3: ") as caught:
        staged(body(("$logux/x", [EVENT]), ("$logux/x", [EVENT, EVENT, payload, EVENT])))
    assert reason in str(caught.value)


def test_limits_are_applied_before_the_records_arrive():
    with pytest.raises(BadBlockError):
        BlockDecoder(UPLOAD_CHECKS).feed(header(length=RUN_BYTES_MAX + 1)[:18])


def test_the_largest_block_is_taken():
    largest = [bytes(PAYLOAD_BYTES_MAX)] * 3 + [bytes(PAYLOAD_BYTES_MAX - 16)]
    many = [b""] * RUN_RECORDS_MAX
    assert staged(body(("a", largest), ("b", many)))


@given(uploads.filter(bool), st.data())
def test_damage_of_a_staged_file_is_noticed_and_takes_what_is_behind_it_at_most(
    tmp_path_factory, upload, data
):
    made = bytearray(staged(body(*upload)))
    at = data.draw(st.integers(0, len(made) * 8 - 1))
    made[at // 8] ^= 1 << at % 8
    path = tmp_path_factory.mktemp("blocks") / ID
    path.write_bytes(made)
    found = read_all(path, len(made), 1 << 20)
    sound = blocks_of(upload)
    damages = [one for one in found if isinstance(one, Damaged)]
    assert len(damages) == 1
    where = found.index(damages[0])
    assert found[:where] == sound[:where]
    assert found[where + 1 :] in ([], sound[where + 1 :])


@given(uploads.filter(bool), st.data())
def test_a_staged_file_that_was_cut_is_noticed(tmp_path_factory, upload, data):
    made = staged(body(*upload))
    path = tmp_path_factory.mktemp("blocks") / ID
    path.write_bytes(made[: data.draw(st.integers(0, len(made) - 1))])
    found = read_all(path, len(made), 1 << 20)
    assert found[:-1] == blocks_of(upload)[: len(found) - 1]
    assert isinstance(found[-1], Damaged)
    path.unlink()
    assert isinstance(read_all(path, len(made), 1 << 20)[0], Damaged)
