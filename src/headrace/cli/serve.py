"""`headrace serve`, `status` and `clock`: start the server, and see whether and how it runs."""

import os
from collections import Counter
from typing import Annotated, Any

import typer

from headrace.cli.common import options
from headrace.cli.common.options import App, option
from headrace.cli.common.output import (
    discard_unwritable,
    is_quiet,
    moment,
    note,
    print_facts,
    print_json,
)
from headrace.cli.common.server import HttpApi, request
from headrace.cli.topics import all_topics
from headrace.model import LAKE_START_READER
from headrace.printing import counted, printable, size


def serve(settings: options.SettingsFlags) -> None:
    """Start a server.

    Prints one line to standard output when every listener is open; SIGTERM and Ctrl-C stop it
    without losing anything. Settings come from these flags,
    over the environment (HEADRACE_...), over the --config file: see `headrace config`. SIGHUP reads the file
    again.

    \b
    headrace serve --data-dir /var/lib/headrace
    headrace serve --figg 0.0.0.0:8119 --durability written
    headrace serve --config headrace.toml --set retention.age=1d
    """
    if is_quiet() and settings.log_level is None:
        settings = settings._replace(log_level="warning")
    config = settings.load().config
    # Imported here: the other commands do not need the server.
    from headrace.server.server import run

    # SQLite makes its files readable for everyone, also in a directory that everyone may enter.
    os.umask(os.umask(0o077) | 0o027)
    code = run(config, lambda: settings.load().config)
    discard_unwritable()
    raise typer.Exit(code)


def status(
    as_json: options.Json = False,
    health: Annotated[
        bool, option("--health", "Ask only whether it takes publishes: this needs no token.")
    ] = False,
    *,
    server: options.HttpFlags,
) -> None:
    """Show how a running server is.

    Exit code 0 where it takes publishes; 1 where it holds them back, or does not answer.

    \b
    headrace status
    headrace status --json
    headrace status --health
    """
    if health:
        typer.echo(request(server.api, "GET", "/healthz")["status"])
        return
    found = _status(server.api)
    if as_json:
        print_json(found)
    else:
        _print(found)
    raise typer.Exit(0 if found["health"]["status"] == "ok" else 1)


def _status(api: HttpApi) -> dict[str, Any]:
    found: dict[str, Any] = request(api, "GET", "/v1/status")
    totals = {"topics": 0, "records": 0, "bytes": 0, "subscribers": 0}
    readers: Counter[str] = Counter()
    for topic in all_topics(api, ""):
        totals["topics"] += 1
        for name in ("records", "bytes", "subscribers"):
            totals[name] += topic[name]
        for cursor in topic["cursors"]:
            if cursor["reader"] != LAKE_START_READER:  # no reader continues from there
                readers[cursor["reader"]] += cursor["lag_records"]
    return found | totals | {"lag_records": readers}


def _print(found: dict[str, Any]) -> None:
    health, retention = found["health"], found["retention"]
    open_now = [f"{count:,} {name}" for name, count in found["connections"].items() if count]
    kept = _duration(retention["age_s"]) if retention["age_s"] else "for ever"
    limit = f", at most {size(retention['bytes'])} of each topic" if retention["bytes"] else ""
    facts = {"server": f"headrace {found['version']}, up {_duration(found['uptime_s'])}"}
    facts["health"] = printable(health["status"])
    if health.get("clock"):
        facts["clock"] = printable(health["clock"])
    facts |= {f"listen.{name}": address for name, address in found["listeners"].items()}
    facts |= {
        "data": printable(found["data_dir"]),
        "log": f"{counted(found['topics'], 'topic')}, {counted(found['records'], 'record')}, "
        f"{size(found['bytes'])}",
        "connections": ", ".join(open_now) or "none",
        "subscriptions": f"{found['subscribers']:,}",
        "retention": kept + limit,
    }
    for reader, lag in sorted(found["lag_records"].items()):
        facts[f"reader {printable(reader)}"] = f"{counted(lag, 'record')} behind"
    print_facts(facts)


def _duration(seconds: float) -> str:
    """Format a duration with at most two units: `3d 4h`, `5m 6s`."""
    left = int(seconds)
    parts: list[str] = []
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count or (unit == "s" and not parts):
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])


clock_app = App()


@clock_app.callback(invoke_without_command=True)
def clock(
    context: typer.Context,
    as_json: options.Json = False,
    *,
    server: options.HttpFlags,
) -> None:
    """Show the time of a running server.

    The server follows its machine's clock, but not its jumps. After a jump, the server's time continues
    as before until the jump is confirmed, or has lasted for `clock.confirm_s`.

    \b
    headrace clock
    headrace clock confirm
    """
    if options.is_for_subcommand(context, as_json, *server):
        return
    told = request(server.api, "GET", "/v1/clock")
    if as_json:
        print_json(told)
        return
    typer.echo(moment(told["now_ms"]))
    if told["trouble"]:
        typer.echo(told["trouble"])


@clock_app.command("confirm")
def confirm(server: options.HttpFlags) -> None:
    """Have the server follow the wall clock where it has jumped to.

    What is too old by the new time is deleted, and leases that are over end. Make sure that the clock is
    right.

    \b
    headrace clock confirm
    """
    followed_ms = request(server.api, "POST", "/v1/clock/confirm")["followed_ms"]
    if followed_ms:
        note(f"the server has moved its time by {followed_ms / 1000:,.0f} seconds")
    else:
        note("the wall clock has not jumped: there is nothing to confirm")
