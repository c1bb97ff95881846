"""`headrace topics`: the topics of a running server."""

import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.table import Table

from headrace.cli import options
from headrace.cli.http_api import request
from headrace.cli.output import moment, print_table, size

_PAGE = 1000
_NAME_MIN = 16


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
    table.add_column("topic", overflow="fold")
    table.add_column("durability", no_wrap=True)
    for heading in ("records", "size", "end", "subs"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("last record", no_wrap=True)
    longest = 0
    for topic in found:
        name = printable(topic["name"])
        longest = max(longest, cell_len(name))
        table.add_row(
            name,
            topic["durability"],
            f"{topic['records']:,}",
            size(topic["bytes"]),
            str(topic["end"]["offset"]),
            str(topic["subscribers"]),
            moment(topic["last_ms"]),
        )
    if table.row_count:
        print_table(table, spare=max(0, longest - _NAME_MIN))
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
