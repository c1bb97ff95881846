"""`headrace pipeline report`: write a page with plots. Elsewhere: the job (`pipeline/report/`)."""

from typing import Annotated, Any

import typer

from headrace.cli.common import options
from headrace.cli.common.output import counted, moment, size
from headrace.cli.pipeline import jobs


def report(
    topics: jobs.Topics = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", metavar="FILE", help="The page.  [pipeline.report_out, else report.html]"
        ),
    ] = None,
    as_json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="The same as JSON.")
    ] = None,
    pattern: jobs.Pattern = None,
    lake: jobs.Lake = None,
    http: options.Http = None,
    token: options.Token = None,
    data_dir: Annotated[
        str | None,
        typer.Option(
            "--data-dir",
            metavar="DIR",
            help="Read the files of a data directory; only with --http a server is asked about readers.",
        ),
    ] = None,
    master: jobs.Master = None,
    config_file: options.ConfigFile = None,
) -> None:
    """Draw what the log has seen: one HTML page with plots, that needs nothing else.

    Messages and bytes over time, busiest topics, sizes, silences, and how far readers are behind. Reads no
    payload. With a lake, also what the log has forgotten since.

    \b
    headrace pipeline report
    headrace pipeline report --lake /lake --out week.html --json week.json
    headrace pipeline report orders returns --data-dir /var/lib/headrace
    """
    found = jobs.settings(config_file, lake=lake, pattern=pattern, report_out=out, master=master)
    server = jobs.server_of(http, token, data_dir, config_file=config_file)
    with jobs.running("report") as job:
        summary = job.run(
            found.report_out,
            topics or (),
            json=as_json or "",
            pattern=jobs.pattern_of(found, topics, pattern),
            url=server.url,
            token=server.token,
            data_dir=data_dir or "",
            lake=found.lake,
            master=found.master,
            progress=job.progress,
        )
    typer.echo(_words(summary))


def _words(summary: Any) -> str:
    where = f"{summary.page} and {summary.json}" if summary.json else summary.page
    said = (
        f"{where}: {counted(summary.messages, 'message')} ({size(summary.bytes)}) of "
        f"{counted(summary.topics, 'topic')}"
    )
    if summary.messages:
        said += f", {moment(summary.first_ms)} to {moment(summary.last_ms)}"
    if summary.damaged:
        said += f"; {counted(summary.damaged, 'part')} of the log could not be counted"
    return said
