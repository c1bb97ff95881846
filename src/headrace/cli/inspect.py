"""`headrace inspect` and `headrace verify`: show one topic in full, and check the log for damage."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from headrace.cli.common import options
from headrace.cli.common.options import argument
from headrace.cli.common.output import ProgressBar, moment, print_facts, print_table
from headrace.cli.common.server import UnreachableError, request
from headrace.cli.token import damage_of
from headrace.log.layout import TOKENS_NAME
from headrace.printing import counted, printable, printable_json, size

if TYPE_CHECKING:
    from headrace.log.verify.verify import Report


def inspect(
    topic: options.Topic,
    data: options.DataFlags,
    server: options.HttpFlags,
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
    options.only_one(data_dir=data.data_dir is not None, http=server.http is not None)
    found = _find(topic, data, server)
    if as_json:
        typer.echo(printable_json(found, indent=2))
    else:
        _print(found)


def _find(topic: str, data: options.DataFlags, server: options.HttpFlags) -> dict[str, Any]:
    if data.data_dir is None:
        try:
            answer: dict[str, Any] = request(server.api, "GET", "/v1/topic", name=topic)
        except UnreachableError:
            if server.http is not None:
                raise
        else:
            return answer
    from headrace.log.verify.verify import inspect_topic

    return inspect_topic(data.config.data_dir, topic)


def _print(topic: dict[str, Any]) -> None:
    start, end = topic["start"], topic["end"]
    print_facts(
        {
            "topic": printable(topic["name"]),
            "epoch": str(topic["epoch"]),
            "durability": str(topic["durability"]),
            "offsets": f"{start['offset']} to {end['offset']} ({size(topic['bytes'])})",
            "ordinals": f"{start['ordinal']} to {end['ordinal']} ({counted(topic['records'], 'record')})",
            "last record": moment(topic["last_ms"]),
        }
    )
    for name, row in (
        ("segments", _segment),
        ("subscriptions", _subscription),
        ("cursors", _reader),
    ):
        if topic.get(name):
            typer.echo()
            print_table([row(one) for one in topic[name]], right=_NUMBERS)


_NUMBERS = (
    "segment",
    "end",
    "first ordinal",
    "records",
    "size",
    "offset",
    "ordinal",
    "behind",
    "gone",
)


def _segment(segment: dict[str, Any]) -> dict[str, str]:
    return {
        "segment": str(segment["base"]),
        "end": str(segment["end"]),
        "first ordinal": str(segment["first_ordinal"]),
        "records": f"{segment['records']:,}",
        "size": size(segment["bytes"]),
        "first record": moment(segment["first_ms"]),
        "last record": moment(segment["last_ms"]),
    }


def _subscription(subscription: dict[str, Any]) -> dict[str, str]:
    return {
        "subscriber": subscription["peer"],
        "protocol": subscription["protocol"],
        "offset": str(subscription["offset"]),
        "behind": "live" if subscription["live"] else size(subscription["lag_bytes"]),
    }


def _reader(cursor: dict[str, Any]) -> dict[str, str]:
    return {
        "reader": printable(cursor["reader"]),
        "offset": str(cursor["offset"]),
        "ordinal": str(cursor["ordinal"]),
        "behind": f"{cursor['lag_records']:,}",
        "size": size(cursor["lag_bytes"]),
        "gone": f"{cursor['gone_records']:,}",
        "noted": moment(cursor["ms"]),
    }


def verify(
    topics: Annotated[list[str] | None, argument("TOPIC", "Only these topics.")] = None,
    *,
    data: options.DataFlags,
    as_json: options.Json = False,
) -> None:
    """Check the log for damage.

    Reads every byte in the data directory and checks every checksum, ordinal and boundary; exit
    code 1 if anything is damaged. Changes nothing.

    \b
    headrace verify
    headrace verify greetings --data-dir /var/lib/headrace
    """
    from headrace.log.verify.checks import Damage
    from headrace.log.verify.verify import verify as check

    with ProgressBar() as bar:
        report = check(data.config.data_dir, topics or [], bar.advance_to)
    if not topics and (reason := damage_of(data.config.data_dir)):
        report.damages.append(Damage(TOKENS_NAME, reason))
        report.damaged = True
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
