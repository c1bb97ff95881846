"""`headrace topics` and `headrace delete`: list and destroy the topics of a running server."""

import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from headrace.cli.common import options
from headrace.cli.common.options import argument, option
from headrace.cli.common.output import UsageError, moment, note, print_json, print_table
from headrace.cli.common.server import HttpApi, listed, none_listed, request
from headrace.model import LAKE_READER, LAKE_START_READER, Durability
from headrace.printing import counted, printable, quoted, size

_PAGE = 1000
_OF_LAKE = ("log", "lake", "lag")


def topics(
    prefix: Annotated[str, argument("PREFIX", "The same as --prefix.")] = "",
    prefix_option: Annotated[
        str | None, option("--prefix PREFIX", "Only topics whose name begins so.")
    ] = None,
    as_json: Annotated[bool, option("--json", "Print one JSON object per line.")] = False,
    *,
    server: options.HttpFlags,
) -> None:
    """List the topics of a running server.

    Beside each are the readers that keep a cursor in it, and how many records they are behind. With a
    lake, `log` and `lake` are the offsets that each of them holds.

    \b
    headrace topics
    headrace topics --prefix sensors/ --json
    """
    if prefix and prefix_option is not None:
        raise UsageError("PREFIX and --prefix are the same: give one of them")
    prefix = prefix_option or prefix
    found = all_topics(server.api, prefix)
    if as_json:
        for topic in found:
            print_json(topic)
        return
    rows = [_row(topic) for topic in found]
    if not rows:
        note(none_listed("topics", prefix, server.api))
        return
    unused = () if any(row["lake"] for row in rows) else _OF_LAKE
    if not any(row["readers"] for row in rows):
        unused = (*unused, "readers")
    print_table(
        [{name: cell for name, cell in row.items() if name not in unused} for row in rows],
        right=("records", "size", "end", *_OF_LAKE, "subs"),
        optional=("durability", "end", "log", "lake", "last record"),
    )


def delete(
    topic: options.Topic,
    yes: Annotated[bool, option("--yes", "Do not ask.")] = False,
    *,
    server: options.HttpFlags,
) -> None:
    """Destroy a topic and all its records.

    A later topic of the same name continues at the offset where this one ended.

    \b
    headrace delete greetings --yes
    """
    api = server.api
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("delete destroys every record of the topic: add --yes")
        records = counted(request(api, "GET", "/v1/topic", name=topic)["records"], "record")
        typer.confirm(f"Destroy {quoted(topic)} and its {records}?", abort=True, err=True)
    answer = request(api, "DELETE", "/v1/topic", name=topic)
    note(f"deleted {printable(topic)}, which ended at offset {answer['end']['offset']}")


def _row(topic: dict[str, Any]) -> dict[str, str]:
    cursors = {cursor["reader"]: cursor for cursor in topic.get("cursors", ())}
    lake, lake_start = cursors.pop(LAKE_READER, None), cursors.pop(LAKE_START_READER, None)
    in_lake, lag = "", f"{topic['records']:,}"  # all records, unless the lake has a cursor
    if lake is not None:
        begin = lake_start["offset"] if lake_start is not None else "…"
        in_lake, lag = f"{begin}–{lake['offset']}", f"{lake['lag_records']:,}{_gone(lake)}"
    elif topic["durability"] == Durability.MEMORY:
        lag = ""
    return {
        "topic": printable(topic["name"]),
        "durability": topic["durability"],
        "records": f"{topic['records']:,}",
        "size": size(topic["bytes"]),
        "end": str(topic["end"]["offset"]),
        "log": f"{topic['start']['offset']}–{topic['end']['offset']}",
        "lake": in_lake,
        "lag": lag,
        "subs": str(topic["subscribers"]),
        "last record": moment(topic["last_ms"]),
        "readers": ", ".join(map(_reader, cursors.values())),
    }


def _reader(cursor: dict[str, Any]) -> str:
    """Format a reader and the number of records it is behind, such as `group:orders -1,234`."""
    return f"{printable(cursor['reader'])} {-cursor['lag_records']:,}{_gone(cursor)}"


def _gone(cursor: dict[str, Any]) -> str:
    return f" ({cursor['gone_records']:,} gone)" if cursor["gone_records"] else ""


def all_topics(api: HttpApi, prefix: str) -> Iterator[dict[str, Any]]:
    """Yield every topic with its `cursors`. The server sorts both lists by the bytes of the names."""
    cursors = _all_cursors(api, prefix)
    cursor = next(cursors, None)
    for topic in listed(api, "/v1/topics", "topics", prefix=prefix or None, limit=_PAGE):
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
