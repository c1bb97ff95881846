"""`headrace publish`: append records from the command line, a file or standard input, also as JSON lines."""

import asyncio
import base64
import binascii
import contextlib
import errno
import json
import os
import stat
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.common import options
from headrace.cli.common.options import argument, option
from headrace.cli.common.output import CommandError, ProgressBar, UsageError, note
from headrace.cli.common.server import run_with_client
from headrace.errors import WindowFullError
from headrace.model import PAYLOAD_BYTES_MAX, check_publish_topic
from headrace.printing import counted, size

if TYPE_CHECKING:
    from headrace.client import Client


JSON_LINE_BYTES_MAX = 6 * PAYLOAD_BYTES_MAX + 4096
"""JSON may encode a byte as six characters; the rest is for the name and the other members."""

Record = tuple[str, bytes]
"""A topic and a payload."""


async def read_records(
    lines: AsyncIterator[list[bytes]], topic: str | None
) -> AsyncIterator[list[Record]]:
    """Yield the records of the lines, for `topic` if it is given; raise CommandError at a wrong line.

    The records before the wrong line are yielded first.
    """
    number = 0
    async for batch in lines:
        records: list[Record] = []
        wrong = None
        for line in batch:
            number += 1
            try:
                if line.strip():
                    records.append(parse_record(line, topic))
            except ValueError as error:
                wrong = f"line {number}: {error}; the lines before it are published"
                break
        yield records
        if wrong is not None:
            raise CommandError(wrong)


def parse_record(line: bytes, topic: str | None) -> Record:
    """Return the record of a line; raise ValueError if it is wrong. Unknown members are ignored."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("this is not JSON") from None
    if not isinstance(found, dict):
        raise ValueError("this is not a JSON object")
    name = found.get("topic") if topic is None else topic
    if not isinstance(name, str):
        raise ValueError("topic must be a string, unless TOPIC is given")
    check_publish_topic(name)
    payload = _payload(found)
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise ValueError(f"the payload is longer than {PAYLOAD_BYTES_MAX:,} bytes")
    return name, payload


def _payload(found: dict[str, object]) -> bytes:
    text, encoded = found.get("payload"), found.get("payload_base64")
    if (text is None) == (encoded is None):
        raise ValueError("give one of payload and payload_base64")
    try:
        if isinstance(text, str):
            return text.encode()
        if isinstance(encoded, str):
            return base64.b64decode(encoded, validate=True)
    except (UnicodeEncodeError, binascii.Error):
        pass
    raise ValueError("payload must be a string of valid Unicode, and payload_base64 one of base64")


_CHUNK_BYTES = 64 * 1024
_CHUNKS_AHEAD_MAX = 4


class Input:
    """Input of a command that sends: one argument, or the lines of a file or of standard input."""

    def __init__(self, given: str | None, file: Path | None, what: str, name: str = "DATA") -> None:
        """`what` is the thing in one line, such as `a record`, and `name` the argument's in the usage."""
        if given is not None and file is not None:
            raise UsageError(f"{name} and --file exclude each other")
        self._what = what
        self._single = None if given is None or given == "-" else os.fsencode(given)
        self._fd = -1
        if self._single is None:
            if file is None and sys.stdin.isatty():
                note(f"each line is {what}; Ctrl-D ends")
            self._fd = sys.stdin.fileno() if file is None else _open(file)

    @property
    def total_bytes(self) -> int | None:
        """Size of a regular file; None if the input is of another kind."""
        status = None if self._single is not None else os.fstat(self._fd)
        return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None

    def __iter__(self) -> Iterator[bytes]:
        """Yield one line after the other. The caller blocks until the next line arrives."""
        if self._single is not None:
            yield self._single
            return
        with open(self._fd, "rb", closefd=False) as lines:
            for line in lines:
                yield line.removesuffix(b"\n")

    async def lines(self, bytes_max: int) -> AsyncIterator[list[bytes]]:
        """Yield batches of lines as they arrive; raise CommandError at a line that is too long."""
        if self._single is not None:
            yield [self._single]
            return
        async for lines in read_lines(self._fd, bytes_max, self._what):
            yield lines


def _open(file: Path) -> int:
    try:
        if file.is_dir():  # opening a directory succeeds, only reading it fails
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CommandError(f"cannot read {file}: {error.strerror}") from None


def parse_json(line: bytes, called: str) -> Any:
    """Return the value of a line of JSON; raise CommandError about the line, which is `called` so."""
    try:
        return json.loads(line)
    except ValueError as error:
        raise CommandError(f"{called} is not JSON: {error}") from None
    except RecursionError:
        raise CommandError(f"{called} is nested too deeply") from None


async def read_lines(fd: int, bytes_max: int, what: str) -> AsyncIterator[list[bytes]]:
    """Yield batches of lines as they arrive, without newlines.

    Raises CommandError at a line that is too long, after yielding the lines before it.
    """
    number = 0
    rest = b""
    async for chunk in _read_chunks(fd):
        *lines, rest = (rest + chunk).split(b"\n")
        too_long = next((i for i, line in enumerate(lines) if len(line) > bytes_max), None)
        if too_long is None and len(rest) > bytes_max:
            too_long = len(lines)
        yield lines[:too_long]
        if too_long is not None:
            wrong = f"line {number + too_long + 1} is longer than {bytes_max:,} bytes"
            raise CommandError(f"{wrong}, the most {what} can hold")
        number += len(lines)
    if rest:
        yield [rest]


async def _read_chunks(fd: int) -> AsyncIterator[bytes]:
    # A daemon thread with `os.read`, so that Ctrl-C ends the command even if a pipe or terminal is silent.
    # The thread has its own descriptor, because it may still read after the caller has closed the other one.
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
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits for more
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)
        os.close(fd)

    threading.Thread(target=read, daemon=True).start()
    while chunk := await chunks.get():
        if isinstance(chunk, OSError):
            raise chunk
        yield chunk
        room.release()


def publish(
    topic: Annotated[
        str | None,
        argument(
            "TOPIC",
            "The topic's name; not needed with --json.",
            autocompletion=options.complete_topic,
        ),
    ] = None,
    data: Annotated[
        str | None,
        argument("DATA", "One record; `-` or nothing reads standard input, each line a record."),
    ] = None,
    file: Annotated[
        Path | None, option("--file FILE", "Read this file, each line a record.")
    ] = None,
    as_json: Annotated[
        bool,
        option(
            "--json",
            "Read what `subscribe --json` prints: one object per line, with payload or payload_base64, "
            "and topic unless TOPIC is given.",
        ),
    ] = False,
    url: options.Url = None,
    timeout_s: options.Timeout = 5.0,
    *,
    token: options.TokenFlags,
    tls: options.TlsFlags,
) -> None:
    """Append records to a topic.

    Ends when the server has acknowledged every one of them; exit code 1 if it has not. Names
    that begin with $ are reserved: those topics are published to by their own protocols only.

    \b
    headrace publish greetings "hello, log"
    headrace publish events --file events.jsonl
    tail -f app.log | headrace publish app-log
    headrace subscribe orders --until-end --json | headrace publish orders-copy --json
    """
    if topic is None and not as_json:
        raise UsageError("name the TOPIC; only the lines of --json can do that themselves")
    if topic is not None:
        check_publish_topic(topic)
    given = Input(data, file, "a record")
    lines = given.lines(JSON_LINE_BYTES_MAX if as_json else PAYLOAD_BYTES_MAX)
    records = read_records(lines, topic) if as_json else _plain(lines, topic or "")
    publisher = _Publisher(None if as_json else given.total_bytes)
    try:
        run_with_client(
            options.url_or_default(url),
            timeout_s,
            lambda client: publisher.publish_all(client, records),
            tls=tls.files,
            token=token,
        )
    finally:
        publisher.summarise()
    if not publisher.published:
        note("published nothing: there was no input")


class _Publisher:
    def __init__(self, total_bytes: int | None) -> None:
        self._bar = ProgressBar()
        self._total_bytes = total_bytes
        self._started = time.monotonic()
        self.published = 0
        self._acknowledged = 0
        self._bytes = 0

    async def publish_all(self, client: "Client", batches: AsyncIterator[list[Record]]) -> None:
        with self._bar:
            try:
                async for batch in batches:
                    await self._publish_batch(client, batch)
            except CommandError:
                await client.flush()
                raise
            await client.flush()

    async def _publish_batch(self, client: "Client", batch: list[Record]) -> None:
        for topic, payload in batch:
            while True:
                try:
                    acknowledgement = client.publish_nowait(topic, payload)
                    break
                except WindowFullError:
                    await client.window()
            acknowledgement.add_done_callback(self._count)
            self.published += 1
            self._bytes += len(payload)
        # Plus one newline per record.
        self._bar.advance_to(self._bytes + self.published, self._total_bytes)

    def _count(self, acknowledgement: asyncio.Future[None]) -> None:
        if not acknowledgement.cancelled() and acknowledgement.exception() is None:
            self._acknowledged += 1

    def summarise(self) -> None:
        if not self.published:
            return
        records = counted(self.published, "record")
        if self._acknowledged < self.published:
            typer.echo(f"only {self._acknowledged:,} of {records} acknowledged", err=True)
            return
        elapsed_s = time.monotonic() - self._started
        note(f"published {records} ({size(self._bytes)}) in {elapsed_s:.2f} s")


async def _plain(lines: AsyncIterator[list[bytes]], topic: str) -> AsyncIterator[list[Record]]:
    async for batch in lines:
        yield [(topic, payload) for payload in batch]
