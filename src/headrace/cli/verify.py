"""`headrace verify`: report damage in the log. Elsewhere: the checks (`log/verify/verify.py`)."""

import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from headrace.cli.common import options
from headrace.cli.common.output import with_progress
from headrace.printing import counted, printable, size

if TYPE_CHECKING:
    from headrace.log.verify.verify import Report


def verify(
    topics: Annotated[
        list[str] | None, typer.Argument(metavar="TOPIC", help="Only these topics.")
    ] = None,
    data_dir: options.ReadDataDir = None,
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
    from headrace.log.verify.verify import verify as check

    directory = options.load_settings(config_file=config_file, data_dir=data_dir).config.data_dir
    report = with_progress(lambda progress: check(directory, topics or [], progress))
    if as_json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    else:
        _print(report)
    raise typer.Exit(1 if report.damaged else 0)


def _print(report: "Report") -> None:
    for topic in report.topics:
        state = "damaged" if topic.damages else "ok"
        journal = (
            f", {topic.journal_records:,} still in the journal" if topic.journal_records else ""
        )
        typer.echo(
            f"{printable(topic.name)}: {state}, {counted(topic.records, 'record')}, "
            f"{size(topic.bytes)} in {counted(topic.segments, 'segment')}{journal}"
        )
        for part in topic.ranges:
            typer.echo(f"  checked {part}")
        for damage in topic.damages:
            typer.echo(f"  damaged {damage}")
    for damage in report.damages:
        typer.echo(f"damaged {damage}")
    for note in report.notes:
        typer.echo(f"note: {note}")
    typer.echo("damaged" if report.damaged else "nothing damaged")
