"""Lines of a file descriptor as batches of an async iterator. Knows no topics."""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator

_CHUNK_BYTES = 64 * 1024
_CHUNKS_AHEAD_MAX = 4


class LineTooLongError(Exception):
    """A line is longer than the caller can take."""

    def __init__(self, number: int, bytes_max: int) -> None:
        super().__init__(f"line {number} is longer than {bytes_max:,} bytes")


async def read_lines(fd: int, bytes_max: int) -> AsyncIterator[list[bytes]]:
    """Batches of lines as they arrive, without newlines; then LineTooLongError if one is."""
    number = 0
    rest = b""
    async for chunk in _read_chunks(fd):
        *lines, rest = (rest + chunk).split(b"\n")
        too_long = next((i for i, line in enumerate(lines) if len(line) > bytes_max), None)
        if too_long is None and len(rest) > bytes_max:
            too_long = len(lines)
        yield lines[:too_long]
        if too_long is not None:
            raise LineTooLongError(number + too_long + 1, bytes_max)
        number += len(lines)
    if rest:
        yield [rest]


async def _read_chunks(fd: int) -> AsyncIterator[bytes]:
    # A daemon thread and `os.read`: a silent pipe or terminal must not keep Ctrl-C from ending us. It has a
    # descriptor of its own, because it may still read when the caller has closed the other.
    fd = os.dup(fd)
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(_CHUNKS_AHEAD_MAX)

    def read() -> None:
        chunk: bytes | OSError = b"."
        while chunk and not isinstance(chunk, OSError):
            room.acquire()
            try:
                chunk = os.read(fd, _CHUNK_BYTES)
            except OSError as error:
                chunk = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for more
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)
        os.close(fd)

    threading.Thread(target=read, daemon=True).start()
    while chunk := await chunks.get():
        if isinstance(chunk, OSError):
            raise chunk
        yield chunk
        room.release()
