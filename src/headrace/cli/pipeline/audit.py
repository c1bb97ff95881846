"""`headrace pipeline audit`: report whether anything was lost. Elsewhere: the job (`pipeline/audit/`)."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from headrace.cli.common import options
from headrace.cli.pipeline import jobs


def audit(
    topics: jobs.Topics = None,
    lake: jobs.Lake = None,
    data_dir: Annotated[
        str | None,
        typer.Option(
            "--data-dir",
            metavar="DIR",
            help="Read the log in its data directory.  [data_dir, if it is there]",
        ),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            "--http",
            metavar="HOST:PORT",
            help="Ask a server for the log, as is done where no data directory is there.",
        ),
    ] = None,
    no_log: Annotated[
        bool, typer.Option("--no-log", help="Read the lake alone, wherever the log is.")
    ] = False,
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
    headrace pipeline audit --lake /lake --no-log
    headrace pipeline audit orders --lake /lake --http 127.0.0.1:8121 --json
    """
    options.only_one(http=bool(http), data_dir=bool(data_dir), no_log=no_log)
    found = jobs.settings(config_file, lake=lake, master=master)
    if no_log:
        jobs.lake_of(found)
    directory = options.load_settings(config_file=config_file, data_dir=data_dir).config.data_dir
    server = jobs.ServerAddress()
    # A data directory is preferred: it shows more than a server, which does not expose its journal. A
    # directory that the user names must exist.
    if http or not (no_log or data_dir or Path(directory).exists()):
        server = jobs.server_of(http, token, config_file=config_file)
        if not http:
            typer.echo(
                f"headrace: there is no directory {directory} here: asking the server at {server.url}",
                err=True,
            )
    with jobs.running("audit") as job:
        report = job.run(
            found.lake,
            topics or (),
            data_dir="" if server.url or no_log else directory,
            url=server.url,
            token=server.token,
            master=found.master,
            progress=job.progress,
        )
    if as_json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    else:
        for line in report.lines():
            typer.echo(line)
    raise typer.Exit(1 if report.lost else 0)
