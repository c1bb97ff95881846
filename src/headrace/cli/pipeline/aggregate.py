"""`headrace pipeline aggregate`: compute a state per topic. Elsewhere: the job (`pipeline/aggregate/`)."""

from functools import partial
from typing import Annotated, Any

import typer

from headrace.cli.common import options
from headrace.cli.common.output import UsageError, counted
from headrace.cli.pipeline import jobs


def aggregate(
    topics: jobs.Topics = None,
    reducer: Annotated[
        str | None,
        typer.Option(
            "--reducer",
            metavar="NAME",
            help="last, count, merge, map, or module:function.  [pipeline.reducer]",
        ),
    ] = None,
    into: Annotated[
        str | None,
        typer.Option(
            "--into",
            metavar="DIR",
            help="The table of states; made when missing.  [pipeline.aggregate_into]",
        ),
    ] = None,
    lake: jobs.Lake = None,
    pattern: jobs.Pattern = None,
    publish: Annotated[
        bool,
        typer.Option(
            "--publish", help="Give states to the server, for channels with the reducer uploaded."
        ),
    ] = False,
    stream: Annotated[
        bool,
        typer.Option("--stream", help="Go on: keep the states up to date until Ctrl-C or SIGTERM."),
    ] = False,
    every: Annotated[
        str | None,
        typer.Option(
            "--every",
            metavar="DURATION",
            help="With --stream, the time between commits, such as 30s.  [pipeline.every_s, else 5s]",
        ),
    ] = None,
    http: options.Http = None,
    token: options.Token = None,
    data_dir: Annotated[
        str | None,
        typer.Option(
            "--data-dir",
            metavar="DIR",
            help="Read what is behind the lake from the files of a data directory.",
        ),
    ] = None,
    master: jobs.Master = None,
    config_file: options.ConfigFile = None,
    as_json: options.Json = False,
) -> None:
    """Fold all records of each topic in lake and log into one state, as the server folds channels.

    The states become a Delta table, which is replaced as a whole, in one step. With --stream the job keeps
    running and replaces the states that have changed; it needs no lake. Without topics or a pattern, the job
    takes all topics.

    \b
    headrace pipeline aggregate --lake /lake --reducer last --into /states
    headrace pipeline aggregate --lake /lake --reducer count --into /counts --pattern '\\$channel/.*'
    headrace pipeline aggregate --lake /lake --reducer app:apply --into /documents --publish
    headrace pipeline aggregate --stream --reducer last --into /states
    """
    found = jobs.settings(
        config_file,
        lake=lake,
        pattern=pattern,
        reducer=reducer,
        aggregate_into=into,
        every_s=every,
        master=master,
    )
    if not found.reducer:
        raise UsageError("say how records are folded: --reducer NAME")
    if not found.aggregate_into:
        raise UsageError("say where the states go: --into DIR")
    if every is not None and not stream:
        raise UsageError("--every goes with --stream: else it is done once")
    server = jobs.server_of(http, token, None if publish else data_dir, config_file=config_file)
    given = {
        "topics": topics or (),
        "reducer": found.reducer,
        "pattern": jobs.pattern_of(found, topics, pattern),
        "url": server.url,
        "token": server.token,
        "data_dir": data_dir or "",
        "publish": publish,
        "master": found.master,
        "task_bytes": found.part_bytes,
    }
    if stream:
        going_on = {"every_s": found.every_s, "batch_bytes": found.batch_bytes}
        with jobs.Ending(goes_on=True) as ending, jobs.running("aggregate_stream") as job:
            summary = job.run(
                found.aggregate_into, lake=found.lake, stop=ending.asked, **going_on, **given
            )
    else:
        directory = jobs.lake_of(found)
        with jobs.running("aggregate") as job:
            summary = job.run(directory, found.aggregate_into, progress=job.progress, **given)
    jobs.print_summary(summary, partial(_words, publish=publish), as_json=as_json)


def _words(summary: Any, *, publish: bool) -> str:
    said = (
        f"{summary.reducer} of {counted(summary.messages, 'message')} of "
        f"{counted(summary.topics, 'topic')} in {summary.into}"
    )
    if summary.incomplete:
        said += f"; {summary.incomplete:,} without their first records, or others that are gone"
    if summary.failed:
        said += f"; {summary.failed:,} failed, the first: {summary.first_failure}"
    if publish:
        said += f"; published {counted(summary.published, 'snapshot')}"
    if summary.refused:
        said += f"; {summary.refused:,} not published, the first: {summary.first_refusal}"
    return said
