"""`headrace pipeline aggregate`: a state for each topic. The job is in `pipeline/aggregate.py`."""

import json
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from headrace.cli import jobs, options
from headrace.cli.failure import UsageError
from headrace.cli.output import ProgressBar, counted


def aggregate(
    topics: Annotated[
        list[str] | None, typer.Argument(metavar="TOPIC", help="Only these topics.")
    ] = None,
    reducer: Annotated[
        str | None,
        typer.Option(
            "--reducer", metavar="NAME", help="last, count, merge, map, or module:function."
        ),
    ] = None,
    into: Annotated[
        str | None,
        typer.Option("--into", metavar="DIR", help="The table of states; made when missing."),
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
    publish: Annotated[
        bool,
        typer.Option(
            "--publish", help="Give states to the server, for channels with the reducer uploaded."
        ),
    ] = False,
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

    The states become a Delta table, which is replaced as a whole, in one step. Without topics and a pattern,
    all topics.

    \b
    headrace pipeline aggregate --lake /lake --reducer last --into /states
    headrace pipeline aggregate --lake /lake --reducer count --into /counts --pattern 'channel/.*'
    headrace pipeline aggregate --lake /lake --reducer app:apply --into /documents --publish
    """
    found = jobs.settings(config_file, lake=lake, pattern=pattern, master=master)
    if not reducer:
        raise UsageError("say how records are folded: --reducer NAME")
    if not into:
        raise UsageError("say where the states go: --into DIR")
    directory = jobs.lake_of(found)
    job = jobs.job("aggregate")
    from headrace.spark.options import OptionError

    url, secret = "", ""
    if http or publish or not data_dir:
        api = options.http_api(http, token)
        url, secret = api.base, api.token or ""
    with ExitStack() as stack:
        bars: list[ProgressBar] = []

        def progress(done: int, total: int) -> None:
            if not bars and total:
                bars.append(stack.enter_context(ProgressBar(total)))
            for bar in bars:
                bar.advance_to(done)

        try:
            summary = job.aggregate(
                directory,
                into,
                topics or (),
                reducer=reducer,
                # Topics on the command line go over a pattern in the file.
                pattern=(pattern or "") if topics else found.pattern,
                url=url,
                token=secret,
                data_dir=data_dir or "",
                publish=publish,
                master=found.master,
                task_bytes=found.part_bytes,
                progress=progress,
            )
        except OptionError as error:
            raise UsageError(str(error)) from None
    typer.echo(json.dumps(summary._asdict()) if as_json else _words(summary, publish=publish))


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
