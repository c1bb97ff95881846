"""Lines read from a file descriptor, however they arrive."""

import asyncio
import os

import pytest

from headrace.cli.common.output import CommandError
from headrace.cli.publish import read_lines


async def gather(data: bytes) -> list[bytes]:
    reader, writer = os.pipe()
    os.write(writer, data)
    os.close(writer)
    lines = []
    try:
        async for batch in read_lines(reader, 10, "a record"):
            lines += batch
    finally:
        os.close(reader)
    return lines


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"a", [b"a"]),
        (b"a\n", [b"a"]),
        (b"a\nb", [b"a", b"b"]),
        (b"\n\n", [b"", b""]),
        (b"a\r\n\x00\xff\n", [b"a\r", b"\x00\xff"]),
        (b"0123456789\n", [b"0123456789"]),
    ],
)
async def test_each_line_without_its_newline(data, lines):
    assert await gather(data) == lines


async def test_a_line_comes_before_the_next_is_written():
    reader, writer = os.pipe()
    batches = read_lines(reader, 10, "a record")
    os.write(writer, b"one\ntw")
    assert await anext(batches) == [b"one"]
    os.write(writer, b"o\n")
    assert await anext(batches) == [b"two"]
    os.close(writer)
    assert [batch async for batch in batches] == []
    os.close(reader)


@pytest.mark.parametrize("end", [b"", b"\n", b"\nb\n"])
async def test_a_line_that_is_too_long_is_named_after_those_before_it(end):
    reader, writer = os.pipe()
    os.write(writer, b"a\n" + b"x" * 11 + end)
    os.close(writer)
    batches = read_lines(reader, 10, "a record")
    got = await anext(batches)
    with pytest.raises(CommandError, match="line 2 is longer than 10 bytes, the most a record can"):
        await anext(batches)
    assert got == [b"a"]
    os.close(reader)


async def test_many_chunks_keep_every_line(tmp_path):
    file = tmp_path / "lines"
    lines = [b"%d" % n * (n % 50) for n in range(50_000)]
    file.write_bytes(b"\n".join(lines) + b"\n")
    fd = os.open(file, os.O_RDONLY)
    got = []
    async for batch in read_lines(fd, 1000, "a record"):
        got += batch
        await asyncio.sleep(0)
    os.close(fd)
    assert got == lines


async def test_an_error_of_the_file_is_raised(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(IsADirectoryError):
        await anext(read_lines(fd, 10, "a record"))
    os.close(fd)
