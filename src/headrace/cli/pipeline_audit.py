"""`headrace pipeline audit`: whether anything was lost. The job is in `pipeline/audit.py`."""

import sys
from contextlib import ExitStack
from typing import Annotated

import msgspec
import typer

from headrace.cli import jobs, options
from headrace.cli.failure import UsageError
from headrace.cli.output import ProgressBar


def audit(
    topics: Annotated[
        list[str] | None, typer.Argument(metavar="TOPIC", help="Only these topics.")
    ] = None,
    lake: jobs.Lake = None,
    data_dir: options.ReadDataDir = None,
    http: Annotated[
        str | None,
        typer.Option(
            "--http",
            metavar="HOST:PORT",
            help="Read the log through a server, not in its data directory.",
        ),
    ] = None,
    token: options.Token = None,
    master: jobs.Master = None,
    config_file: options.ConfigFile = None,
    as_json: options.Json = False,
) -> None:
    """Say that nothing was lost, or exactly what.

    Reads every byte of the log and of the lake: checksums, ordinals without a gap, and both against each
    other, byte for byte. Exit code 1 if anything is missing or damaged. Changes nothing, and may run beside a
    server.

    \b
    headrace pipeline audit
    headrace pipeline audit --lake /lake --data-dir /var/lib/headrace
    headrace pipeline audit orders --lake /lake --http 127.0.0.1:8121 --json
    """
    if http and data_dir:
        raise UsageError("--http and --data-dir exclude each other: the log is read in one place")
    found = jobs.settings(config_file, lake=lake, master=master)
    directory = options.load_settings(config_file=config_file, data_dir=data_dir).config.data_dir
    job = jobs.job("audit")
    from headrace.spark.options import OptionError

    api = options.http_api(http, token) if http else None
    with ExitStack() as stack:
        bars: list[ProgressBar] = []

        def progress(done: int, total: int) -> None:
            if not bars:
                bars.append(stack.enter_context(ProgressBar(total)))
            bars[0].advance_to(done)

        try:
            report = job.audit(
                found.lake,
                topics or (),
                data_dir="" if api is not None else directory,
                url=api.base if api is not None else "",
                token=(api.token or "") if api is not None else "",
                master=found.master,
                progress=progress,
            )
        except OptionError as error:
            raise UsageError(str(error)) from None
    if as_json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    else:
        for line in report.lines():
            typer.echo(line)
    raise typer.Exit(1 if report.lost else 0)
