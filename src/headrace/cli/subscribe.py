"""`headrace subscribe`: print the records of a topic from a given position on, and wait for new ones."""

import asyncio
import base64
import contextlib
import os
import select
import stat
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.common import options
from headrace.cli.common.options import MOMENT_HELP, option, parse_moment
from headrace.cli.common.output import (
    CommandError,
    UsageError,
    discard_output,
    note,
    payload_line,
)
from headrace.cli.common.server import (
    HttpApi,
    NotFoundError,
    UnreachableError,
    request,
    run_with_client,
)
from headrace.config.values import KeyValues
from headrace.errors import ReaderLostError
from headrace.model import check_topic_name
from headrace.printing import printable, printable_json, quoted

if TYPE_CHECKING:
    from headrace.client import Client, Message, Missed, ReaderChange, Subscription

Describe = Callable[["Message"], tuple[bytes, dict[str, Any]]]
"""Return the printed bytes of a message, and its fields for --json besides topic and offsets."""

_GLANCE_S = 1.0

_STORAGE_OPTIONS = "HEADRACE_PIPELINE_STORAGE_OPTIONS"
_CATALOG_OPTIONS = "HEADRACE_PIPELINE_CATALOG_OPTIONS"

_ASKS_HTTP = "(--last, --since and --until-end ask the server's HTTP address: give it with --http)"

_SILENCE_S = 0.5
"""Seconds without a record after which --until-end asks the server whether any is left."""


class Start(StrEnum):
    OLDEST = "oldest"
    """Start with the oldest record kept."""
    NEWEST = "newest"
    """Start with the next record published."""


def subscribe(
    topic: options.Topic,
    span: options.SpanFlags,
    reader: Annotated[
        str | None,
        option(
            "--reader NAME",
            "Read under this name: begin where the reader stopped, and acknowledge what was"
            " printed.",
        ),
    ] = None,
    start: Annotated[
        Start, option("--start", "Where a reader begins that the server does not know yet.")
    ] = Start.OLDEST,
    lake: Annotated[
        str | None,
        option(
            "--lake DIR",
            "A lake that the topic is exported to: what the log has no more is read there.",
            envvar="HEADRACE_PIPELINE_LAKE",
        ),
    ] = None,
    storage_options: Annotated[
        list[str] | None,
        option(
            "--storage-option KEY=VALUE",
            "Option of the lake's object storage, such as AWS_ENDPOINT_URL=http://host:9000; may be"
            " repeated.  [env HEADRACE_PIPELINE_STORAGE_OPTIONS]",
        ),
    ] = None,
    catalog_options: Annotated[
        list[str] | None,
        option(
            "--catalog-option KEY=VALUE",
            "Property of the lake's Iceberg catalogue, such as uri=https://host; may be repeated. "
            " [env HEADRACE_PIPELINE_CATALOG_OPTIONS]",
        ),
    ] = None,
    as_json: Annotated[
        bool, option("--json", "Print one object per line: topic, offset, next_offset, payload.")
    ] = False,
    *,
    connection: options.ConnectionFlags,
) -> None:
    """Print records of a topic, and wait for more.

    Each record is followed by a newline; Ctrl-C ends the command. It begins with the next record that is
    published, unless an option says otherwise. --last, --since and --until-end ask the server's HTTP address
    for the position.

    With --json each line has the offset of the record, where it begins, and its next_offset, just past it:
    begin there to get the next record. A payload that is not UTF-8 becomes payload_base64. `headrace publish
    --json` reads these lines.

    The command waits for a topic that does not exist; with --until-end it fails with exit code 1.

    With --reader the server remembers the reader's position. If several commands or clients use one reader's
    name, one of them prints and another takes over when it ends. --json then adds ordinal, epoch and time.

    \b
    headrace subscribe greetings --from-start
    headrace subscribe greetings --last 10 --json
    headrace subscribe greetings --since 2h | grep error
    headrace subscribe greetings --until-end > greetings.txt
    headrace subscribe greetings --from-offset 0 --lake /data/lake
    headrace subscribe orders --reader billing --until-end
    """
    print_records(
        topic,
        span,
        connection,
        as_json=as_json,
        reader=reader,
        start=start,
        lake=lake,
        lake_options=_pairs("--storage-option", storage_options, _STORAGE_OPTIONS),
        lake_catalog=_pairs("--catalog-option", catalog_options, _CATALOG_OPTIONS),
    )


def _pairs(flag: str, given: list[str] | None, variable: str) -> dict[str, str]:
    try:
        return KeyValues.parse(given or os.environ.get(variable, "")).mapping
    except ValueError:
        raise UsageError(f"{flag} takes KEY=VALUE") from None


def print_records(
    topic: str,
    span: options.SpanFlags,
    connection: options.ConnectionFlags,
    *,
    as_json: bool,
    reader: str | None = None,
    start: Start = Start.OLDEST,
    lake: str | None = None,
    lake_options: Mapping[str, str] | None = None,
    lake_catalog: Mapping[str, str] | None = None,
    describe: Describe | None = None,
) -> None:
    """Run `subscribe` with these options; `describe` is for topics whose records have an envelope."""
    from_offset, from_start, last, since, limit, until_end = span
    options.only_one(
        from_offset=from_offset is not None,
        from_start=from_start,
        last=last is not None,
        since=since is not None,
        reader=reader is not None,
    )
    check_topic_name(topic)
    if (until_end or last is not None or since is not None) and connection.is_elsewhere:
        raise UsageError(
            "--last, --since and --until-end ask the HTTP API: name it as well as --url, with --http"
        )
    api = options.http_api(connection.http, connection.token, connection.tls.files)
    end = None
    if until_end:
        found = _find(api, topic)
        if found is None:
            raise CommandError(f"there is no topic {quoted(topic)}")
        if not found["records"] and lake is None:
            return
        end = int(found["end"]["offset"])
        is_placed = from_offset is not None or last is not None or since is not None
        from_start = from_start or not (is_placed or reader is not None)
    elif connection.is_same_server:
        found = _glance(api, topic)
    else:
        found = {}
    if from_start:
        # If the offset of the oldest record is known, every gap is reported.
        is_known = bool(found) and lake is None
        from_offset = int(found["start"]["offset"]) if found and is_known else 0
        from_start = not is_known
    elif last is not None:
        from_offset = _look_up(api, topic, last=last)
    elif since is not None:
        from_offset = _look_up(api, topic, time=_moment(since))
    if found is None:
        note(f"headrace: topic {quoted(topic)} does not exist yet: waiting")
    printer = _Printer(
        topic=topic,
        offset=from_offset,
        left=limit,
        end=end,
        api=api,
        describe=describe or _describe,
        reader=reader,
        start=start,
        as_json=as_json,
        quiet=from_start,
        has_lake=lake is not None,
    )
    url = options.url_or_default(connection.url)
    try:
        run_with_client(
            url,
            connection.timeout_s,
            printer.print_all,
            tls=connection.tls.files,
            token=connection.token,
            patient=True,
            lake=lake,
            lake_options=lake_options,
            lake_catalog=lake_catalog,
        )
    except KeyboardInterrupt:
        pass  # the user ends the command
    except BrokenPipeError:
        discard_output()  # the program that reads our output ends it


@dataclass(kw_only=True)
class _Printer:
    topic: str
    offset: int | None
    left: int | None
    """Records that are still to be printed; None without a limit."""
    end: int | None
    api: HttpApi
    describe: Describe
    reader: str | None
    start: Start
    as_json: bool
    quiet: bool
    """True if nothing is reported that is missing before the first record."""
    has_lake: bool

    def __post_init__(self) -> None:
        self._passed_end = asyncio.Event()
        self._out = sys.stdout.buffer

    async def print_all(self, client: "Client") -> None:
        client.on("missed", self._report_missed)
        client.on("reader", self._report_reader)
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        _watch_output(gone)
        printing = asyncio.ensure_future(self._print_messages(client))
        passed = asyncio.ensure_future(self._passed_end.wait())
        waited_for: list[asyncio.Future[Any]] = [printing, passed, gone]
        try:
            await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
            if passed.done():
                return
            if not printing.done():
                raise BrokenPipeError
            await printing
        finally:
            printing.cancel()
            passed.cancel()
            await asyncio.gather(printing, passed, return_exceptions=True)

    async def _print_messages(self, client: "Client") -> None:
        if self.reader is not None:
            await self._print_read(client, self.reader)
            return
        subscription = client.subscribe(self.topic, offset=self.offset)
        end = self.end
        if end is not None:
            begin = await subscription.attached()
            # Earlier records may be in the lake.
            begin = min(begin or 0, self.offset or 0) if self.has_lake else begin
            if begin is not None and begin >= end:
                return
        await self._print_batches(client, subscription)

    async def _print_read(self, client: "Client", reader: str) -> None:
        """Print records that a reader has not acknowledged, and acknowledge them once printed."""
        subscription = client.subscribe(
            self.topic, reader=reader, start=self.start.value, ack="manual"
        )
        if self.end is not None and (await subscription.attached() or 0) >= self.end:
            return
        await self._print_batches(client, subscription, subscription.ack)
        await subscription.flush()

    async def _print_batches(
        self,
        client: "Client",
        subscription: "Subscription",
        printed: "Callable[[Message], None]" = lambda message: None,
    ) -> None:
        end = self.end
        while batch := await self._next(subscription):
            wanted = batch[: self.left]
            if end is not None:
                wanted = [message for message in wanted if _passed(message) <= end]
            self._out.write(b"".join(map(self._line, wanted)))
            self._out.flush()
            with contextlib.suppress(ReaderLostError):  # `_report_reader` reports it
                for message in wanted:
                    printed(message)
            if self.left is not None:
                self.left -= len(wanted)
                if self.left == 0:
                    return
            if end is not None and _passed(batch[-1]) >= end:
                return
        if self._passed_end.is_set():
            return
        raise CommandError("the subscription ended: " + (client.last_error or "the client closed"))

    async def _next(self, subscription: "Subscription") -> list["Message"]:
        """Return the next messages; empty if the subscription or the records before the end have ended."""
        while self.end is not None and not self.has_lake:
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(subscription.batch(), _SILENCE_S)
            if await self._is_over(subscription.next_offset or 0):
                self._passed_end.set()
                return []
        return await subscription.batch()

    async def _is_over(self, offset: int) -> bool:
        """Ask the server; return True if it has no record between `offset` and the end.

        Then the offsets between them are reported as missed, unless the offsets jumped.
        """
        assert self.end is not None
        try:
            left = await asyncio.to_thread(_look_up, self.api, self.topic, offset=offset)
        except CommandError:
            return False  # the server may come back, and then the subscription continues
        if left < self.end:
            return False
        from headrace.client import Missed

        missed = Missed(self.topic, offset, self.end)
        if not missed.is_jump:
            self._report_missed(missed)
        return True

    def _line(self, message: "Message") -> bytes:
        payload, fields = self.describe(message)
        if not self.as_json:
            return payload_line(payload)
        line: dict[str, Any] = {
            "topic": message.topic,
            "offset": message.offset,
            "next_offset": message.next_offset,
        }
        if message.time is not None:
            line |= {"ordinal": message.ordinal, "epoch": message.epoch, "time": message.time}
        line |= fields
        return printable_json(line).encode() + b"\n"

    def _report_reader(self, change: "ReaderChange") -> None:
        if change.state == "waiting":
            typer.echo(f"headrace: another process reads as {change.reader}: waiting", err=True)
        elif change.state == "lost":
            typer.echo(
                f"headrace: another process reads as {change.reader} now: records that were just"
                " printed may be printed there again",
                err=True,
            )

    def _report_missed(self, missed: "Missed") -> None:
        asked, got = missed.asked, missed.got
        if self.has_lake and self.end is not None and got is not None and got >= self.end:
            self._passed_end.set()  # neither log nor lake has more records before the end
        if self.quiet and asked == 0:
            return
        if asked is None or got is None:
            text = f"asked for {missed.asked_serial}, going on at {missed.got_serial}"
        elif missed.is_jump:
            text = (
                f"offsets go on at {got} after {asked}, because the log was restored or repaired; no record "
                "is known to be missing, but the last ones before that may be lost"
            )
        elif got > asked:
            text = f"asked for offset {asked}, going on at {got}: expired, lost, or not the start of a record"
        elif got == asked:
            text = f"the topic was made anew; going on at {got}"
        else:
            text = f"offset {asked} is past the end; going on at {got}"
        typer.echo(f"headrace: missed on {printable(missed.topic)}: {text}", err=True)


def _passed(message: "Message") -> int:
    """Return the offset just past a message; raise CommandError if the server's messages have no offsets.

    Only a Headrace server reports the end of a topic, and its messages have offsets.
    """
    if message.next_offset is None:
        raise CommandError("this server's messages have no offsets, so their end cannot be told")
    return message.next_offset


def _describe(message: "Message") -> tuple[bytes, dict[str, Any]]:
    payload = bytes(message.payload)
    return payload, text_or_base64("payload", payload)


def text_or_base64(name: str, data: bytes) -> dict[str, Any]:
    """Return a field of a JSON line for bytes: as text if they are UTF-8, else as base64."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


def _watch_output(gone: asyncio.Future[None]) -> None:
    """Resolve `gone` when the reader of our output has closed the pipe, which is visible without a write."""
    loop = asyncio.get_running_loop()
    fd = sys.stdout.fileno()

    def finish() -> None:
        if not gone.done():
            gone.set_result(None)

    def watch() -> None:
        poll = select.poll()
        poll.register(fd, 0)  # errors only: `poll` always reports them
        poll.poll()
        with contextlib.suppress(RuntimeError):  # the loop is closed: the command has ended
            loop.call_soon_threadsafe(finish)

    # Not with the event loop: it would make the pipe non-blocking, and writes could be partial.
    if stat.S_ISFIFO(os.fstat(fd).st_mode):
        threading.Thread(target=watch, daemon=True).start()


def _look_up(api: HttpApi, topic: str, **query: Any) -> int:
    try:
        answer = request(api, "GET", "/v1/position", topic=topic, **query)
    except UnreachableError as error:
        raise UnreachableError(f"{error} {_ASKS_HTTP}") from None
    except NotFoundError:
        return 0  # the topic does not exist yet: print all its future records
    offset: int = answer["offset"]
    return offset


def _find(api: HttpApi, topic: str, timeout_s: float = 30.0) -> dict[str, Any] | None:
    """Return the server's description of a topic; None if the topic does not exist."""
    try:
        found: dict[str, Any] = request(api, "GET", "/v1/topic", timeout_s=timeout_s, name=topic)
    except UnreachableError as error:
        raise UnreachableError(f"{error} {_ASKS_HTTP}") from None
    except NotFoundError:
        return None
    return found


def _glance(api: HttpApi, topic: str) -> dict[str, Any] | None:
    """Return the same, or an empty dict if the server cannot be asked.

    The command asks so that it can report a topic that does not exist: with a misspelt name it would wait
    for ever.
    """
    try:
        return _find(api, topic, _GLANCE_S)
    except CommandError:
        return {}  # optional: the HTTP address may be closed to us


def _moment(text: str) -> int:
    try:
        return parse_moment(text, datetime.now().astimezone())
    except (ValueError, OverflowError):
        raise UsageError(f"--since takes {MOMENT_HELP}, not {quoted(text)}") from None
