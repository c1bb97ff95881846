"""`headrace trace`: show live what clients send and receive. Elsewhere: decoding, which the server does."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from headrace.cli.common import options
from headrace.cli.common.options import complete_topic, option
from headrace.cli.common.output import UsageError, note, print_json
from headrace.cli.common.server import stream
from headrace.printing import counted, one_line, printable

_IN_THE_HEAD = frozenset({"ms", "peer", "protocol", "direction", "kind", "topic", "payloads"})


def trace(
    topic: Annotated[
        str | None,
        option("--topic NAME", "Messages of this topic.", autocompletion=complete_topic),
    ] = None,
    peer: Annotated[
        str | None,
        option(
            "--peer NAME",
            "One client: HOST or HOST:PORT as the server sees it, the name of its token or "
            "certificate, its processor or its node.",
        ),
    ] = None,
    payloads: Annotated[bool, option("--payloads", "Show the beginning of payloads too.")] = False,
    as_json: Annotated[bool, option("--json", "Print one JSON object per line.")] = False,
    *,
    server: options.HttpFlags,
) -> None:
    """Show live what clients send and receive, until Ctrl-C.

    Of payloads only the sizes are shown, unless --payloads is given, and credentials never. A trace that
    cannot keep up loses lines, and says how many.

    \b
    headrace trace --topic orders
    headrace trace --peer 10.0.0.7 --payloads
    """
    if topic is None and peer is None:
        raise UsageError("say whom to follow: --topic NAME, --peer NAME, or both")
    query = {"topic": topic, "peer": peer, "payloads": "true" if payloads else None}
    for line in stream(server.api, "/v1/trace", **query):
        found = json.loads(line)
        if found["kind"] == "trace":
            note("following: Ctrl-C ends it")
        elif as_json:
            print_json(found)
        elif found["kind"] == "lost":
            note(f"{counted(found['lines'], 'line')} lost: more happens than can be shown")
        else:
            typer.echo(_text(found))
            for payload in found.get("payloads", ()):
                typer.echo(f"    {one_line(payload)}")


def _text(line: Mapping[str, Any]) -> str:
    when = datetime.fromtimestamp(line["ms"] / 1000, UTC).strftime("%H:%M:%S.%f")[:-3] + "Z"
    arrow = "→" if line["direction"] == "in" else "←"
    words = [when, line["peer"], arrow, line["protocol"], line["kind"]]
    if "topic" in line:
        words.append(printable(line["topic"]))
    words += (f"{name}={_value(line[name])}" for name in line if name not in _IN_THE_HEAD)
    return " ".join(map(one_line, words))


def _value(value: object) -> str:
    return printable(value) if isinstance(value, str) else json.dumps(value)
