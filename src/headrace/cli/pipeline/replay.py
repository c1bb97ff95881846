"""`headrace pipeline replay`: publish records of a lake to a topic.

Elsewhere: the job (`pipeline/replay/`).
"""

from datetime import datetime
from typing import Annotated, Any

import typer

from headrace.cli.common import options
from headrace.cli.common.options import parse_moment
from headrace.cli.common.output import UsageError, counted, size
from headrace.cli.pipeline import jobs
from headrace.config.values import Quantity
from headrace.printing import quoted

_TIME_HELP = "an ISO 8601 time, or milliseconds since 1970"


def replay(
    topic: options.Topic,
    to: Annotated[
        str, typer.Option("--to", metavar="TOPIC", help="The topic that records are published to.")
    ],
    lake: jobs.Lake = None,
    from_offset: Annotated[
        int | None,
        typer.Option("--from-offset", metavar="N", help="From this offset on.", min=0),
    ] = None,
    to_offset: Annotated[
        int | None,
        typer.Option("--to-offset", metavar="N", help="Records that begin before it.", min=1),
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help=f"From then on: {_TIME_HELP}.")
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="TIME", help="Records from before that.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate", metavar="N", help="Records per second; else as fast as it goes.", min=0.001
        ),
    ] = None,
    name: Annotated[
        str,
        typer.Option(
            "--name", metavar="NAME", help="Under another name the same is replayed once more."
        ),
    ] = "",
    http: options.Http = None,
    token: options.Token = None,
    master: jobs.Master = None,
    config_file: options.ConfigFile = None,
    as_json: options.Json = False,
) -> None:
    """Publish the records that a lake has of a topic to another topic, in their order.

    Publishes all records, or those between two offsets or times. Repeat the same command until it succeeds:
    it continues where it was killed, and does nothing once it is done.

    \b
    headrace pipeline replay orders --to orders-again --lake /lake
    headrace pipeline replay orders --to test --lake /lake --since 2026-01-31T08:00Z --until 2026-01-31T09:00Z
    headrace pipeline replay orders --to test --lake /lake --from-offset 0 --rate 500 --name second
    """
    found = jobs.settings(config_file, lake=lake, master=master)
    directory = jobs.lake_of(found)
    server = jobs.server_of(http, token, config_file=config_file)
    now = datetime.now().astimezone()
    with jobs.running("replay") as job:
        summary = job.run(
            directory,
            topic,
            to,
            url=server.url,
            token=server.token,
            from_offset=from_offset,
            to_offset=to_offset,
            since=_moment("--since", since, now),
            until=_moment("--until", until, now),
            rate=rate,
            name=name,
            master=found.master,
            progress=job.progress,
        )
    jobs.print_summary(summary, _words, as_json=as_json)


def _moment(option: str, text: str | None, now: datetime) -> int | None:
    if text is None:
        return None
    if Quantity.parse(text) is not None:
        raise UsageError(
            f"{option} takes {_TIME_HELP}, not {quoted(text)}: a repeat has to mean the same moment"
        )
    try:
        return parse_moment(text, now)
    except ValueError:
        raise UsageError(f"{option} takes {_TIME_HELP}, not {quoted(text)}") from None


def _words(summary: Any) -> str:
    where = f"{summary.topic} (offsets {summary.start} to {summary.end})"
    if summary.batches:
        said = (
            f"replayed {counted(summary.records, 'record')} ({size(summary.bytes)}) of {where} to "
            f"{summary.to} in {'1 batch' if summary.batches == 1 else f'{summary.batches:,} batches'}"
        )
    else:
        said = f"nothing to replay of {where} to {summary.to}"
    if summary.resumed > summary.start:
        said += f"; offsets {summary.start} to {summary.resumed} were replayed before"
    return said
