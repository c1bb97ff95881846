"""`headrace inspect` and `headrace verify`: show one topic in full, and check the log for damage."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table

from headrace.cli.common import options
from headrace.cli.common.output import console, moment, print_table, with_progress
from headrace.cli.common.server import HttpApi, UnreachableError, request
from headrace.printing import counted, printable, size

if TYPE_CHECKING:
    from headrace.log.verify.verify import Report


def inspect(
    topic: options.Topic,
    data_dir: options.ReadDataDir = None,
    http: options.Http = None,
    token: options.Token = None,
    config_file: options.ConfigFile = None,
    as_json: options.Json = False,
) -> None:
    """Show one topic in full.

    Its epoch, range, segments with offsets, ordinals and times, subscribers and readers. Asks the server at
    --http. With --data-dir, or where no server answers at the default address, reads the data
    directory without changing it; the newest seconds and the subscribers are then missing.

    \b
    headrace inspect greetings
    headrace inspect greetings --data-dir /var/lib/headrace --json
    """
    options.only_one(data_dir=data_dir is not None, http=http is not None)
    found = _find(topic, data_dir, options.http_api(http, token), http, config_file)
    if as_json:
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        _print(found)


def _find(
    topic: str, data_dir: str | None, api: HttpApi, http: str | None, config_file: Path | None
) -> dict[str, Any]:
    if data_dir is None:
        try:
            answer: dict[str, Any] = request(api, "GET", "/v1/topic", name=topic)
        except UnreachableError:
            if http is not None:
                raise
        else:
            return answer
    from headrace.log.verify.verify import inspect_topic

    directory = options.load_settings(config_file=config_file, data_dir=data_dir).config.data_dir
    return inspect_topic(directory, topic)


def _print(topic: dict[str, Any]) -> None:
    out = console()
    facts = Table(box=None, pad_edge=False, show_header=False)
    start, end = topic["start"], topic["end"]
    facts.add_row("topic", printable(topic["name"]))
    facts.add_row("epoch", str(topic["epoch"]))
    facts.add_row("durability", str(topic["durability"]))
    facts.add_row("offsets", f"{start['offset']} to {end['offset']} ({size(topic['bytes'])})")
    facts.add_row(
        "ordinals",
        f"{start['ordinal']} to {end['ordinal']} ({counted(topic['records'], 'record')})",
    )
    facts.add_row("last record", moment(topic["last_ms"]))
    out.print(facts)
    if topic["segments"]:
        out.print()
        print_table(_segments(topic["segments"]))
    if topic.get("subscriptions"):
        out.print()
        print_table(_subscriptions(topic["subscriptions"]))
    if topic.get("cursors"):
        out.print()
        print_table(_readers(topic["cursors"]))


def _segments(segments: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("segment", "end", "first ordinal", "records", "size"):
        table.add_column(heading, justify="right")
    for heading in ("first record", "last record"):
        table.add_column(heading)
    for segment in segments:
        table.add_row(
            str(segment["base"]),
            str(segment["end"]),
            str(segment["first_ordinal"]),
            f"{segment['records']:,}",
            size(segment["bytes"]),
            moment(segment["first_ms"]),
            moment(segment["last_ms"]),
        )
    return table


def _subscriptions(subscriptions: list[dict[str, Any]]) -> Table:
    table = Table("subscriber", "protocol", box=None, pad_edge=False)
    table.add_column("offset", justify="right")
    table.add_column("behind", justify="right")
    for subscription in subscriptions:
        table.add_row(
            subscription["peer"],
            subscription["protocol"],
            str(subscription["offset"]),
            "live" if subscription["live"] else size(subscription["lag_bytes"]),
        )
    return table


def _readers(cursors: list[dict[str, Any]]) -> Table:
    table = Table("reader", box=None, pad_edge=False)
    for heading in ("offset", "ordinal", "behind", "size", "gone"):
        table.add_column(heading, justify="right")
    table.add_column("noted")
    for cursor in cursors:
        table.add_row(
            printable(cursor["reader"]),
            str(cursor["offset"]),
            str(cursor["ordinal"]),
            f"{cursor['lag_records']:,}",
            size(cursor["lag_bytes"]),
            f"{cursor['gone_records']:,}",
            moment(cursor["ms"]),
        )
    return table


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
        _print_report(report)
    raise typer.Exit(1 if report.damaged else 0)


def _print_report(report: "Report") -> None:
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
