"""`headrace channels`: list, explain, keep and destroy the channels of a running server."""

import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from headrace.cli.common import options
from headrace.cli.common.options import App, argument, option
from headrace.cli.common.output import (
    CommandError,
    UsageError,
    moment,
    note,
    print_json,
    print_table,
)
from headrace.cli.common.server import HttpApi, listed, none_listed, request
from headrace.printing import counted, printable, quoted, size

app = App()

Name = Annotated[str, argument("NAME", "The channel's name.")]


@app.callback(invoke_without_command=True)
def channels(
    context: typer.Context,
    prefix: Annotated[str, option("--prefix PREFIX", "Only channels that begin so.")] = "",
    as_json: Annotated[bool, option("--json", "Print one JSON object per line.")] = False,
    *,
    server: options.HttpFlags,
) -> None:
    """List the channels of a running server.

    Each channel is followed by its members: what each has acknowledged, how many messages it has not, and
    how long the log is kept for a member that is away.

    \b
    headrace channels
    headrace channels --prefix doc/ --json
    headrace channels explain doc/1
    """
    if options.is_for_subcommand(context, prefix, as_json, *server):
        return
    found = listed(server.api, "/v1/channels", "channels", prefix=prefix or None)
    if as_json:
        for one in found:
            print_json(one)
        return
    _print(list(found), prefix, server.api)


@app.command("explain")
def explain(
    name: Name,
    as_json: options.Json = False,
    *,
    server: options.HttpFlags,
) -> None:
    """Say what holds the log of a channel, and what happens to it next.

    \b
    headrace channels explain doc/1
    """
    told = request(server.api, "GET", "/v1/channel", name=name)
    if as_json:
        print_json(told)
    else:
        typer.echo("\n".join(_words(told)))


@app.command("keep")
def keep(name: Name, server: options.HttpFlags) -> None:
    """Cancel the destruction of a channel's log.

    It is scheduled again when someone has come and the last one is gone.

    \b
    headrace channels keep doc/1
    """
    api = server.api
    if request(api, "POST", "/v1/channel/keep", name=name)["cancelled"]:
        note(f"cancelled: the log of {printable(name)} is not destroyed")
        return
    told = request(api, "GET", "/v1/channel", name=name)
    there = sum(member["present"] for member in told["members"])
    if not told["exists"]:
        raise CommandError(f"channel {quoted(name)} has no log that could be kept")
    if there:
        note(f"nothing is scheduled: {counted(there, 'subscriber')} there")
    else:
        note(f"nothing was scheduled: the log of {printable(name)} is kept")


@app.command("destroy")
def destroy(
    name: Name,
    yes: Annotated[bool, option("--yes", "Do not ask.")] = False,
    *,
    server: options.HttpFlags,
) -> None:
    """Destroy a channel with its messages and its last known state.

    Members that are there are told, and are members no more. The channel may be joined again at once, and
    begins empty.

    \b
    headrace channels destroy doc/1 --yes
    """
    api = server.api
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(
                "destroy forgets every message of the channel and its state: add --yes"
            )
        told = request(api, "GET", "/v1/channel", name=name)
        what = (
            f"{counted(told['messages'], 'message')} and {counted(len(told['members']), 'member')}"
        )
        state = "its last state" if told["snapshot"] else "no stored state"
        question = f"Destroy channel {quoted(name)} with {what}, and {state}?"
        typer.confirm(question, abort=True, err=True)
    gone = request(api, "DELETE", "/v1/channel", name=name)
    what = f"{counted(gone['messages'], 'message')} and {counted(gone['members'], 'member')}"
    note(f"destroyed {printable(name)}, with {what}")


# Output as a table


def _print(found: list[dict[str, Any]], prefix: str, api: HttpApi) -> None:
    if not found:
        note(none_listed("channels", prefix, api))
        return
    has_trouble = any(one["trouble"] for one in found)
    rows = []
    for one in found:
        cells = {
            "channel": printable(one["name"]),
            "messages": f"{one['messages']:,}",
            "size": size(one["bytes"]),
            "snapshot": str(one["snapshot"]["offset"]) if one["snapshot"] else "-",
            "destroyed": "kept" if one["kept"] else moment(one["destroyed_ms"]),
        }
        trouble = {"trouble": printable(one["trouble"])} if has_trouble else {}
        for member in one["members"] or [None]:
            rows.append(cells | _member_cells(member, one["now_ms"]) | trouble)
            cells, trouble = dict.fromkeys(cells, ""), dict.fromkeys(trouble, "")
    print_table(
        rows,
        right=("messages", "size", "snapshot", "cursor", "lag"),
        optional=("snapshot", "size", "lease", "cursor"),
    )


def _member_cells(member: dict[str, Any] | None, now_ms: int) -> dict[str, str]:
    if member is None:
        return {"member": "-", "cursor": "", "lag": "", "lease": ""}
    until_ms = member["leased_until_ms"]
    lease = "ended" if until_ms <= now_ms else moment(until_ms)
    return {
        "member": printable(member["processor"]),
        "cursor": str(member["cursor"]),
        "lag": f"{member['lag_messages']:,}",
        "lease": "here" if member["present"] else lease,
    }


# Output as sentences


def _words(told: dict[str, Any]) -> Iterator[str]:
    name = printable(told["name"])
    if told["exists"]:
        yield (
            f"{name} has {counted(told['messages'], 'message')} ({size(told['bytes'])}), from offset "
            f"{told['start']} to {told['end']}."
        )
    else:
        yield f"{name} has no log now; the next message begins at offset {told['end']}."
    if not told["members"]:
        yield "Nobody is a member."
    for member in told["members"]:
        yield _member_words(member, told["now_ms"])
    for reader in told["readers"]:
        place = (
            f"Reader {printable(reader['reader'])}, of retention.wait_for, is at {reader['cursor']}"
        )
        yield place + (" and holds the log." if reader["holds"] else ".")
    yield _snapshot_words(told)
    if told["exists"]:
        yield from _next_words(told)
    if told["trouble"]:
        yield f"Trouble: {printable(told['trouble'])}. Nothing is forgotten until that is over."


def _member_words(member: dict[str, Any], now_ms: int) -> str:
    name, lag = printable(member["processor"]), member["lag_messages"]
    behind = f"{counted(lag, 'message')} behind" if lag else "with nothing behind it"
    place = f"its cursor is at {member['cursor']}, {behind}"
    until_ms = member["leased_until_ms"]
    if member["present"]:
        where = f"is there ({member['receive'] or 'over HTTP'}); {place}"
        holds = ", and holds the log while it is there" if member["holds"] else ""
    elif now_ms < until_ms:
        where = f"is away; {place}"
        lease = f"until its lease ends at {_when(until_ms, now_ms)}"
        holds = f", and holds the log {lease}" if member["holds"] else f"; it counts {lease}"
    else:
        where = (
            f"is away, and its lease ended at {_when(until_ms, now_ms)}: it holds nothing; {place}"
        )
        holds = ""
    gone = member["missed_messages"]
    missed = f"; it will be told of {counted(gone, 'message')} that it missed" if gone else ""
    return f"{name} {where}{holds}{missed}."


def _snapshot_words(told: dict[str, Any]) -> str:
    snapshot = told["snapshot"]
    if snapshot is None:
        return f"There is no snapshot yet; the reducer is {told['reducer']}."
    return (
        f"The snapshot ({size(snapshot['bytes'])}, by the reducer {told['reducer']}) reaches offset "
        f"{snapshot['offset']}; {counted(snapshot['messages_behind'], 'message')} behind it."
    )


def _next_words(told: dict[str, Any]) -> Iterator[str]:
    needed, now_ms = told["needed_from"], told["now_ms"]
    if needed < told["end"]:
        yield f"The log is needed from offset {needed} on, and trimmed up to there."
    elif told["messages"]:
        yield "Nobody needs the log any more: it is trimmed to its end."
    uploaded = told["reducer"] == "uploaded"
    covered = told["snapshot"]["offset"] if told["snapshot"] else told["start"]
    if uploaded and covered < told["end"]:
        yield (
            f"The state is uploaded by members: until an upload covers more than offset {covered}, nothing "
            f"behind that is forgotten. One for offset {told['end']} would cover everything."
        )
    grace = _span(told["grace_ms"])
    if there := sum(member["present"] for member in told["members"]):
        yield (
            f"{counted(there, 'subscriber')} there: when the last is gone for {grace}, what is left is "
            "folded into the snapshot and the log destroyed."
        )
    elif told["kept"]:
        yield "Nobody is there, and an operator keeps the log: it is not destroyed before someone has come."
    elif told["destroyed_ms"]:
        waits = [one["reader"] for one in told["readers"] if one["cursor"] < told["end"]]
        yield (
            f"Nobody is there: at {_when(told['destroyed_ms'], now_ms)} the log is "
            + ("destroyed if an upload covers it then, else trimmed" if uploaded else "destroyed")
            + ". Whoever joins before cancels that, and so does `headrace channels keep`."
        )
        if waits:
            yield f"It waits for {', '.join(map(printable, waits))} to read to the end."
    else:
        yield f"Nobody is there: the destruction is about to be scheduled, {grace} ahead."


def _when(ms: int, now_ms: int) -> str:
    away = _span(abs(ms - now_ms))
    return f"{moment(ms)} ({f'in {away}' if ms >= now_ms else f'{away} ago'})"


def _span(ms: int) -> str:
    """Format a duration in the largest unit of which it has at least two; else in seconds."""
    for unit, unit_ms in (("days", 86_400_000), ("hours", 3_600_000), ("min", 60_000)):
        if ms >= 2 * unit_ms:
            return f"{ms // unit_ms} {unit}"
    return f"{ms // 1000} s"
