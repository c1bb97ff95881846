"""`headrace topics`: the topics of a running server."""

import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.table import Table

from headrace.cli import options
from headrace.cli.http_api import request
from headrace.cli.output import console, moment, size

_PAGE = 1000


def topics(
    prefix: Annotated[
        str, typer.Argument(metavar="PREFIX", help="Only topics whose name begins so.")
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line.")
    ] = False,
    http: options.Http = None,
) -> None:
    """List the topics of a running server.

    \b
    headrace topics
    headrace topics sensors/ --json
    """
    found = _all_topics(options.http_or_default(http), prefix)
    if as_json:
        for topic in found:
            typer.echo(json.dumps(topic, ensure_ascii=False))
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("topic", "durability"):
        table.add_column(heading, overflow="fold")
    for heading in ("records", "size", "start", "end", "subscribers"):
        table.add_column(heading, justify="right")
    table.add_column("last record")
    for topic in found:
        table.add_row(
            printable(topic["name"]),
            topic["durability"],
            f"{topic['records']:,}",
            size(topic["bytes"]),
            str(topic["start"]["offset"]),
            str(topic["end"]["offset"]),
            str(topic["subscribers"]),
            moment(topic["last_ms"]),
        )
    if table.row_count:
        console().print(table)
    else:
        typer.echo("no topics" + (f" begin with {prefix!r}" if prefix else " yet"), err=True)


def printable(name: str) -> str:
    """A name as it may be shown: control characters must not reach the terminal."""
    return name if name.isprintable() else repr(name)


def _all_topics(base: str, prefix: str) -> Iterator[dict[str, Any]]:
    after = None
    while True:
        page = request(base, "GET", "/v1/topics", prefix=prefix or None, after=after, limit=_PAGE)
        yield from page["topics"]
        if not page["more"]:
            return
        after = page["topics"][-1]["name"]
