"""`headrace topics`: the topics of a running server."""

import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.cells import cell_len
from rich.table import Table

from headrace.cli import options
from headrace.cli.http_api import HttpApi, request
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
    token: options.Token = None,
) -> None:
    """List the topics of a running server.

    Beside each are the readers that keep a cursor in it, and how many records they are behind.

    \b
    headrace topics
    headrace topics sensors/ --json
    """
    found = _all_topics(options.http_api(http, token), prefix)
    if as_json:
        for topic in found:
            typer.echo(json.dumps(topic, ensure_ascii=False))
        return
    rows = []
    longest = 0
    for topic in found:
        name = printable(topic["name"])
        longest = max(longest, cell_len(name))
        rows.append(
            (
                name,
                topic["durability"],
                f"{topic['records']:,}",
                size(topic["bytes"]),
                str(topic["end"]["offset"]),
                str(topic["subscribers"]),
                moment(topic["last_ms"]),
                ", ".join(map(_reader, topic.get("cursors", ()))),
            )
        )
    table = Table(box=None, pad_edge=False)
    table.add_column("topic", overflow="fold")
    table.add_column("durability", no_wrap=True)
    for heading in ("records", "size", "end", "subs"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("last record", no_wrap=True)
    if any(row[-1] for row in rows):
        table.add_column("readers", no_wrap=True)
    for row in rows:
        table.add_row(*row[: len(table.columns)])
    if table.row_count:
        print_table(table, spare=max(0, longest - _NAME_MIN))
    else:
        typer.echo("no topics" + (f" begin with {prefix!r}" if prefix else " yet"), err=True)


def printable(name: str) -> str:
    """A name as it may be shown: control characters must not reach the terminal."""
    return name if name.isprintable() else repr(name)


def _reader(cursor: dict[str, Any]) -> str:
    """A reader and how far it is behind, such as `group:orders -1,234`."""
    lag, gone = cursor["lag_records"], cursor["gone_records"]
    text = f"{printable(cursor['reader'])} {-lag:,}"
    return f"{text} ({gone:,} gone)" if gone else text


def _all_topics(api: HttpApi, prefix: str) -> Iterator[dict[str, Any]]:
    """Every topic with its `cursors`: both lists are in the order of the names' bytes."""
    cursors = _all_cursors(api, prefix)
    cursor = next(cursors, None)
    for topic in _listed(api, prefix):
        mine: list[dict[str, Any]] = []
        while cursor is not None and cursor["topic"] <= topic["name"]:
            if cursor["topic"] == topic["name"]:
                del cursor["topic"]
                mine.append(cursor)
            cursor = next(cursors, None)
        yield topic | {"cursors": mine}


def _all_cursors(api: HttpApi, prefix: str) -> Iterator[dict[str, Any]]:
    after, after_reader = prefix, ""
    while True:
        page = request(
            api, "GET", "/v1/cursors", after=after, after_reader=after_reader, limit=_PAGE
        )
        for cursor in page["cursors"]:
            if not cursor["topic"].startswith(prefix):
                return
            after, after_reader = cursor["topic"], cursor["reader"]
            yield cursor
        if not page["more"]:
            return


def _listed(api: HttpApi, prefix: str) -> Iterator[dict[str, Any]]:
    after = None
    while True:
        page = request(api, "GET", "/v1/topics", prefix=prefix or None, after=after, limit=_PAGE)
        yield from page["topics"]
        if not page["more"]:
            return
        after = page["topics"][-1]["name"]
