"""`headrace delete`: destroy a topic on a running server."""

import sys
from typing import Annotated

import typer

from headrace.cli.common import options
from headrace.cli.common.http_api import request
from headrace.cli.common.output import UsageError, note
from headrace.printing import counted, printable, quoted


def delete(
    topic: options.Topic,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    http: options.Http = None,
    token: options.Token = None,
) -> None:
    """Destroy a topic and all its records.

    A later topic of the same name continues at the offset where this one ended.

    \b
    headrace delete greetings --yes
    """
    api = options.http_api(http, token)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("delete destroys every record of the topic: add --yes")
        records = counted(request(api, "GET", "/v1/topic", name=topic)["records"], "record")
        typer.confirm(f"Destroy {quoted(topic)} and its {records}?", abort=True, err=True)
    answer = request(api, "DELETE", "/v1/topic", name=topic)
    note(f"deleted {printable(topic)}, which ended at offset {answer['end']['offset']}")
