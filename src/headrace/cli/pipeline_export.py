"""`headrace pipeline export`: topics into a lake, once or on and on. The job is in `pipeline/export.py`."""

import json
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from headrace.cli import jobs, options
from headrace.cli.failure import UsageError
from headrace.cli.output import ProgressBar, counted, size
from headrace.config_pipeline import LakePartition


def export(
    topics: Annotated[
        list[str] | None, typer.Argument(metavar="TOPIC", help="Only these topics.")
    ] = None,
    lake: jobs.Lake = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--pattern",
            metavar="RE",
            help="Only topics whose whole name matches.  [pipeline.pattern]",
        ),
    ] = None,
    lake_format: Annotated[
        str | None,
        typer.Option("--format", metavar="NAME", help="delta.  [pipeline.format]"),
    ] = None,
    by_topic: Annotated[
        bool,
        typer.Option("--by-topic", help="Keep the files of topics apart, not only those of dates."),
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="End when what the log has now is in the lake.")
    ] = False,
    every: Annotated[
        str | None,
        typer.Option(
            "--every", metavar="SECONDS", help="A batch so often.  [pipeline.every_s, else 5]"
        ),
    ] = None,
    batch_bytes: Annotated[
        str | None,
        typer.Option(
            "--batch-bytes", metavar="N", help="How much of the log a batch takes.  [else 1 GiB]"
        ),
    ] = None,
    skip_lost: Annotated[
        bool,
        typer.Option("--skip-lost", help="Go on without records that are gone or damaged."),
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

    Goes on until Ctrl-C or SIGTERM, and ends then after the batch that runs; --once ends by itself. Killed at
    any moment, it goes on where the table ends. Without topics and a pattern, all of them.

    \b
    headrace pipeline export --lake /lake --once
    headrace pipeline export orders returns --lake /lake --every 60
    headrace pipeline export --config headrace.toml --master spark://host:7077
    """
    found = jobs.settings(
        config_file,
        lake=lake,
        pattern=pattern,
        format=lake_format,
        partition=LakePartition.TOPIC.value if by_topic else None,
        every_s=every,
        batch_bytes=batch_bytes,
        master=master,
    )
    directory = jobs.lake_of(found)
    job = jobs.job("export")
    from headrace.spark.options import OptionError

    url, secret = "", ""
    if http or not data_dir:
        api = options.http_api(http, token)
        url, secret = api.base, api.token or ""
    with ExitStack() as stack:
        ending = None if once else stack.enter_context(jobs.Ending())
        bars: list[ProgressBar] = []

        def progress(done: int, total: int) -> None:
            if not bars and total:
                bars.append(stack.enter_context(ProgressBar(total)))
            for bar in bars:
                bar.advance_to(done)

        try:
            summary = job.export(
                directory,
                topics or (),
                # Topics on the command line go over a pattern in the file.
                pattern=(pattern or "") if topics else found.pattern,
                url=url,
                token=secret,
                data_dir=data_dir or "",
                by_topic=found.partition is LakePartition.TOPIC,
                format=found.format.value,
                once=once,
                every_s=found.every_s,
                batch_bytes=found.batch_bytes,
                part_bytes=found.part_bytes,
                skip_lost=skip_lost,
                master=found.master,
                progress=progress if once else None,
                stop=ending.asked if ending is not None else lambda: False,
            )
        except OptionError as error:
            raise UsageError(str(error)) from None
    typer.echo(json.dumps(summary._asdict()) if as_json else _words(summary))


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
        said += f"; {counted(summary.lost, 'record')} lost"
    return said if summary.told else f"{said}; retention does not know of it"
