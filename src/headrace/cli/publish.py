"""`headrace publish`: append records from the command line, a file or standard input."""

import asyncio
import errno
import os
import stat
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.common import options
from headrace.cli.common.connection import run_with_client
from headrace.cli.common.json_records import (
    JSON_LINE_BYTES_MAX,
    LineTooLongError,
    Record,
    WrongRecordError,
    read_lines,
    read_records,
)
from headrace.cli.common.output import CommandError, ProgressBar, UsageError, note
from headrace.errors import WindowFullError
from headrace.model import PAYLOAD_BYTES_MAX, check_publish_topic
from headrace.printing import counted, size

if TYPE_CHECKING:
    from headrace.client import Client


def publish(
    topic: Annotated[
        str | None,
        typer.Argument(
            metavar="TOPIC",
            help="The topic's name; not needed with --json.",
            autocompletion=options.complete_topic,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA",
            help="One record; `-` or nothing reads standard input, each line a record.",
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="Read this file, each line a record."),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Read what `subscribe --json` prints: one object per line, with payload or payload_base64, "
            "and topic unless TOPIC is given.",
        ),
    ] = False,
    url: options.Url = None,
    timeout_s: options.Timeout = 5.0,
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
    if data is not None and file is not None:
        raise UsageError("DATA and --file exclude each other")
    if topic is None and not as_json:
        raise UsageError("name the TOPIC; only the lines of --json can do that themselves")
    if topic is not None:
        check_publish_topic(topic)
    fd = _open(file) if data is None or data == "-" else None
    if fd is None:
        lines = _single(os.fsencode(data or ""))
    else:
        lines = read_lines(fd, JSON_LINE_BYTES_MAX if as_json else PAYLOAD_BYTES_MAX)
    records = read_records(lines, topic) if as_json else _plain(lines, topic or "")
    publisher = _Publisher(ProgressBar(None if as_json else _bytes_of(fd)))
    try:
        run_with_client(url, timeout_s, lambda client: publisher.publish_all(client, records))
    finally:
        publisher.summarise()
    if not publisher.published:
        note("published nothing: there was no input")


class _Publisher:
    def __init__(self, bar: ProgressBar) -> None:
        self._bar = bar
        self._started = time.monotonic()
        self.published = 0
        self._acknowledged = 0
        self._bytes = 0

    async def publish_all(self, client: "Client", batches: AsyncIterator[list[Record]]) -> None:
        with self._bar:
            try:
                async for batch in batches:
                    await self._publish_batch(client, batch)
            except LineTooLongError as error:
                await client.flush()
                raise CommandError(f"{error}, the most a record can hold") from None
            except WrongRecordError as error:
                await client.flush()
                raise CommandError(str(error)) from None
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
        self._bar.advance_to(self._bytes + self.published)  # plus one newline per record

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


async def _single(payload: bytes) -> AsyncIterator[list[bytes]]:
    yield [payload]


def _open(file: Path | None) -> int:
    if file is not None:
        try:
            if file.is_dir():  # opening a directory succeeds, only reading it fails
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CommandError(f"cannot read {file}: {error.strerror}") from None
    if sys.stdin.isatty():
        note("each line is a record; Ctrl-D ends")
    return sys.stdin.fileno()


def _bytes_of(fd: int | None) -> int | None:
    """Return the size of a regular file in bytes; None if the input is of another kind."""
    if fd is None:
        return None
    status = os.fstat(fd)
    return status.st_size if stat.S_ISREG(status.st_mode) else None
