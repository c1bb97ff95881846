"""`headrace pipeline report`: a page to look at. The job is in `pipeline/report.py`."""

from contextlib import ExitStack
from typing import Annotated, Any

import typer

from headrace.cli import jobs, options
from headrace.cli.failure import UsageError
from headrace.cli.output import ProgressBar, counted, moment, size


def report(
    topics: Annotated[
        list[str] | None, typer.Argument(metavar="TOPIC", help="Only these topics.")
    ] = None,
    out: Annotated[
        str, typer.Option("--out", metavar="FILE", help="The page.  [default report.html]")
    ] = "report.html",
    as_json: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="The same as JSON.")
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            "--pattern",
            metavar="RE",
            help="Only topics whose whole name matches.  [pipeline.pattern]",
        ),
    ] = None,
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
    found = jobs.settings(config_file, lake=lake, pattern=pattern, master=master)
    job = jobs.job("report")
    from headrace.spark.options import OptionError

    url, secret = "", ""
    if http or not data_dir:
        api = options.http_api(http, token)
        url, secret = api.base, api.token or ""
    with ExitStack() as stack:
        bars: list[ProgressBar] = []

        def progress(done: int, total: int) -> None:
            if not bars:
                bars.append(stack.enter_context(ProgressBar(total)))
            bars[0].advance_to(done)

        try:
            summary = job.report(
                out,
                topics or (),
                json=as_json or "",
                # Topics on the command line go over a pattern in the file.
                pattern=(pattern or "") if topics else found.pattern,
                url=url,
                token=secret,
                data_dir=data_dir or "",
                lake=found.lake,
                master=found.master,
                progress=progress,
            )
        except OptionError as error:
            raise UsageError(str(error)) from None
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
