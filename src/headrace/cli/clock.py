"""`headrace clock`: the time of a running server, and the confirmation of a jump of its wall clock."""

import json

import typer

from headrace.cli.common import options
from headrace.cli.common.help import App
from headrace.cli.common.http_api import request
from headrace.cli.common.output import UsageError, moment, note

app = App()


@app.callback(invoke_without_command=True)
def clock(
    context: typer.Context,
    as_json: options.Json = False,
    http: options.Http = None,
    token: options.Token = None,
) -> None:
    """Show the time of a running server.

    The server follows its machine's clock, but not its jumps. After a jump, the server's time continues
    as before until the jump is confirmed, or has lasted for `clock.confirm_s`.

    \b
    headrace clock
    headrace clock confirm
    """
    if context.invoked_subcommand is not None:
        if as_json or http or token:
            raise UsageError(f"options go behind `{context.invoked_subcommand}`")
        return
    told = request(options.http_api(http, token), "GET", "/v1/clock")
    if as_json:
        typer.echo(json.dumps(told))
        return
    typer.echo(moment(told["now_ms"]))
    if told["trouble"]:
        typer.echo(told["trouble"])


@app.command("confirm")
def confirm(http: options.Http = None, token: options.Token = None) -> None:
    """Have the server follow the wall clock where it has jumped to.

    What is too old by the new time is deleted, and leases that are over end. Make sure that the clock is
    right.

    \b
    headrace clock confirm
    """
    followed_ms = request(options.http_api(http, token), "POST", "/v1/clock/confirm")["followed_ms"]
    if followed_ms:
        note(f"the server has moved its time by {followed_ms / 1000:,.0f} seconds")
    else:
        note("the wall clock has not jumped: there is nothing to confirm")
