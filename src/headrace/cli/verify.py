"""`headrace verify`: says what is damaged in the log. The checks are in `log/verify.py`."""

import sys
from typing import Annotated

import msgspec
import typer

from headrace.cli import options
from headrace.cli.output import size
from headrace.cli.topics import printable


def verify(
    topics: Annotated[
        list[str] | None, typer.Argument(metavar="TOPIC", help="Only these topics.")
    ] = None,
    data_dir: options.DataDir = None,
    config_file: options.ConfigFile = None,
    as_json: options.Json = False,
) -> None:
    """Check the log for damage.

    Reads every byte in the data directory and checks every checksum, ordinal and boundary; exit
    code 1 if anything is damaged. Changes nothing.

    \b
    headrace verify
    headrace verify greetings --data-dir /var/lib/headrace
    """
    from headrace.log.verify import verify as check

    directory = options.load_settings(config_file=config_file, data_dir=data_dir).config.data_dir
    report = check(directory, topics or [])
    if as_json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    else:
        for topic in report.topics:
            state = "damaged" if topic.problems else "ok"
            typer.echo(
                f"{printable(topic.name)}: {state}, {topic.records:,} records, "
                f"{size(topic.bytes)} in {topic.segments} segments"
            )
            for problem in topic.problems:
                typer.echo(f"  {problem}")
        for problem in report.problems:
            typer.echo(problem)
        typer.echo("damaged" if report.damaged else "nothing damaged")
    raise typer.Exit(1 if report.damaged else 0)
