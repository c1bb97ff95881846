"""`headrace pipeline export`: export topics to a lake, once or continuously.

Elsewhere: the job (`pipeline/export/`).
"""

from typing import Annotated, Any

import typer

from headrace.cli.common import options
from headrace.cli.common.output import counted, size
from headrace.cli.pipeline import jobs
from headrace.config.pipeline import LakePartition

_BY_TOPIC = {LakePartition.AUTO: None, LakePartition.DATE: False, LakePartition.TOPIC: True}


def export(
    topics: jobs.Topics = None,
    lake: jobs.Lake = None,
    pattern: jobs.Pattern = None,
    lake_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="What kind of table: delta, parquet or iceberg.  [pipeline.format, else delta]",
        ),
    ] = None,
    by_topic: Annotated[
        bool,
        typer.Option("--by-topic", help="Keep the files of topics apart, not only those of dates."),
    ] = False,
    decode: Annotated[
        str | None,
        typer.Option(
            "--decode",
            metavar="NAME",
            help="What payloads are, for further columns: json, logux or channel.  [pipeline.decode]",
        ),
    ] = None,
    schema: Annotated[
        str | None,
        typer.Option(
            "--schema",
            metavar="COLUMNS",
            help="These columns, such as 'id bigint, name string'.  [pipeline.schema]",
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="End when what the log has now is in the lake.")
    ] = False,
    every: Annotated[
        str | None,
        typer.Option(
            "--every",
            metavar="DURATION",
            help="Time between batches, such as 30s or 5m.  [pipeline.every_s, else 5s]",
        ),
    ] = None,
    batch_bytes: Annotated[
        str | None,
        typer.Option(
            "--batch-bytes",
            metavar="SIZE",
            help="How much of the log a batch takes, such as 256MiB.  [else 1GiB]",
        ),
    ] = None,
    skip_lost: Annotated[
        bool,
        typer.Option("--skip-lost", help="Go on without records that are gone or damaged."),
    ] = False,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over", help="Be the lake that retention waits for, in place of another one."
        ),
    ] = False,
    http: options.Http = None,
    token: options.Token = None,
    data_dir: Annotated[
        str | None,
        typer.Option(
            "--data-dir",
            metavar="DIR",
            help="Read the files of a data directory; only with --http a server is told how far the lake is.",
        ),
    ] = None,
    master: jobs.Master = None,
    config_file: options.ConfigFile = None,
    as_json: options.Json = False,
) -> None:
    """Write topics to a lake table, every record exactly once.

    The job runs until Ctrl-C or SIGTERM and finishes its batch first; with --once it ends by itself. It may
    be killed at any moment: the next run continues where the table ends. Without topics or a pattern, it
    exports all topics.

    \b
    headrace pipeline export --lake /lake --once
    headrace pipeline export orders returns --lake /lake --every 60s
    headrace pipeline export events --lake /lake --decode json --schema 'id bigint, name string'
    headrace pipeline export --config headrace.toml --master spark://host:7077
    """
    found = jobs.settings(
        config_file,
        lake=lake,
        pattern=pattern,
        format=lake_format,
        partition=LakePartition.TOPIC.value if by_topic else None,
        decode=decode,
        schema=schema,
        every_s=every,
        batch_bytes=batch_bytes,
        master=master,
    )
    directory = jobs.lake_of(found)
    server = jobs.server_of(http, token, data_dir, config_file=config_file)
    with jobs.Ending(goes_on=not once) as ending, jobs.running("export") as job:
        summary = job.run(
            directory,
            topics or (),
            pattern=jobs.pattern_of(found, topics, pattern),
            url=server.url,
            token=server.token,
            data_dir=data_dir or "",
            by_topic=_BY_TOPIC[found.partition],
            format=found.format.value,
            decode=found.decode,
            schema=found.schema,
            once=once,
            every_s=found.every_s,
            batch_bytes=found.batch_bytes,
            part_bytes=found.part_bytes,
            skip_lost=skip_lost,
            take_over=take_over,
            master=found.master,
            progress=job.progress,
            stop=ending.asked,
        )
    jobs.print_summary(summary, _words, as_json=as_json)


def _words(summary: Any) -> str:
    if summary.batches:
        said = (
            f"exported {counted(summary.records, 'record')} ({size(summary.bytes)}) of "
            f"{counted(summary.topics, 'topic')} to {summary.lake} in "
            f"{'1 batch' if summary.batches == 1 else f'{summary.batches:,} batches'} and "
            f"{counted(summary.files, 'file')}"
        )
    else:
        said = f"nothing new for {summary.lake}"
    if summary.lost:
        said += f"; {counted(summary.lost, 'record')} lost: see retention.wait_for"
    return said if summary.told else f"{said}; retention does not know of it"
