"""`headrace logux`: add events to a Logux log, and print its events."""

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from headrace.cli.common import options
from headrace.cli.common.options import App, argument, option
from headrace.cli.common.output import CommandError, UsageError, note, with_hint
from headrace.cli.common.server import tls_options
from headrace.cli.publish import Input, parse_json
from headrace.cli.subscribe import print_records
from headrace.config.settings import Listen
from headrace.errors import BadEventError, ConnectTimeoutError, PayloadTooLargeError, RefusedError
from headrace.model import LOGUX_PREFIX, PAYLOAD_BYTES_MAX, check_topic_name
from headrace.printing import counted, quoted

if TYPE_CHECKING:
    from headrace.client import LoguxClient, Message

app = App()

Log = Annotated[str, argument("LOG", "The name of the log, such as main.")]
Ws = Annotated[
    str | None,
    option(
        "--ws HOST:PORT",
        "The server's WebSocket address; wss://HOST with TLS.  [env HEADRACE_WS, else "
        "127.0.0.1:8120]",
    ),
]


@app.callback(invoke_without_command=True)
def logux(context: typer.Context) -> None:
    """Add events to logs of Logux, and follow them."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("add")
def add(
    log: Log,
    event: Annotated[
        str | None,
        argument(
            "EVENT",
            "One event, a JSON object with a `type`; `-` or nothing reads standard input, each "
            "line an event.",
        ),
    ] = None,
    file: Annotated[
        Path | None, option("--file FILE", "Read this file, each line an event.")
    ] = None,
    host: Annotated[
        str | None,
        option(
            "--host NAME",
            "The name of this client in the times of its events.  [default: a new one]",
        ),
    ] = None,
    ws: Ws = None,
    timeout_s: options.Timeout = 5.0,
    *,
    token: options.TokenFlags,
    tls: options.TlsFlags,
) -> None:
    """Add events to a log of Logux.

    Ends when the server has every one of them; exit code 1 if it has not.

    \b
    headrace logux add main '{"type": "user/rename", "name": "Anna"}'
    headrace logux add main --file events.jsonl
    """
    given = Input(event, file, "an event", "EVENT")
    check_topic_name(LOGUX_PREFIX + log)
    import uvloop

    from headrace.client import connect

    try:
        url = _url(ws, log)
        client = connect(
            url,
            store=None,
            host=host,
            connect_timeout_s=timeout_s,
            **token.for_client(),
            **tls_options(url, tls.files),
        )
        uvloop.run(_add(client, log, given, timeout_s))
    except ConnectTimeoutError as error:
        raise CommandError(with_hint(str(error))) from None


@app.command("follow")
def follow(
    log: Log,
    span: options.SpanFlags,
    as_json: Annotated[
        bool, option("--json", "Print one object per line: topic, offset, next_offset, id, event.")
    ] = False,
    *,
    connection: options.ConnectionFlags,
) -> None:
    """Print the events of a log of Logux, and wait for more.

    A log of Logux is a topic, and is read like one: all options are those of `subscribe`. Each line is an
    event; --json prints it with its id and its place.

    \b
    headrace logux follow main --from-start
    headrace logux follow main --last 10 --json
    """
    print_records(LOGUX_PREFIX + log, span, connection, as_json=as_json, describe=_describe)


def _describe(message: "Message") -> tuple[bytes, dict[str, Any]]:
    from headrace.payload.logux import BadEnvelopeError, decode_envelope, id_of

    try:
        envelope = decode_envelope(message.payload)
    except BadEnvelopeError as error:
        raise CommandError(f"offset {message.offset}: {error}") from None
    event = bytes(envelope.event)
    return event, {"id": id_of(envelope), "event": json.loads(event)}


def _url(ws: str | None, log: str) -> str:
    address = ws or os.environ.get("HEADRACE_WS") or str(Listen().ws)
    scheme, _, rest = address.rpartition("://")
    if scheme not in ("", "ws", "wss", "logux", "loguxs"):
        raise UsageError(
            f"--ws takes HOST:PORT, ws://HOST:PORT or wss://HOST, not {quoted(address)}"
        )
    tls = "s" if scheme in ("wss", "loguxs") else ""
    return f"logux{tls}://{rest.rstrip('/')}/{quote(log, safe='')}"


async def _add(client: "LoguxClient", log: str, given: Input, timeout_s: float) -> None:
    added = 0
    try:
        async with client:
            try:
                async for lines in given.lines(PAYLOAD_BYTES_MAX):
                    for line in lines:
                        await _add_line(client, line, added + 1)
                        added += 1
            except CommandError:
                await _wait_until_synced(client, timeout_s)  # the events before the wrong line
                raise
            await _wait_until_synced(client, timeout_s)
    except RefusedError as error:
        raise CommandError(f"log {quoted(log)}: {error}") from None
    note(f"added {counted(added, 'event')}" if added else "added nothing: there was no input")


_SYNC_S = 30.0
"""Seconds that the server may take to acknowledge the last events, unless --timeout is longer."""


async def _wait_until_synced(client: "LoguxClient", timeout_s: float) -> None:
    try:
        async with asyncio.timeout(max(timeout_s, _SYNC_S)):
            await client.synced()
    except TimeoutError:
        # Count the events here: the client forgets them when it closes.
        raise CommandError(
            f"{counted(client.unacknowledged, 'event')} not acknowledged: "
            + (client.last_error or "no answer")
        ) from None


async def _add_line(client: "LoguxClient", line: bytes, number: int) -> None:
    event = parse_json(line, f"event {number}")
    try:
        await client.add(event)
    except (BadEventError, PayloadTooLargeError) as error:
        raise CommandError(f"event {number}: {error}") from None
