"""The command `headrace`: collects all commands, and turns every error into one line and an exit code."""

import sys
import traceback
from typing import Annotated, Any

import typer
from typer.exceptions import Abort, TyperException

from headrace import __version__
from headrace.cli import (
    backup,
    channel_messages,
    channels,
    config,
    doctor,
    inspect,
    logux,
    manual,
    publish,
    serve,
    subscribe,
    token,
    topics,
    trace,
)
from headrace.cli.common.options import App, argument, option
from headrace.cli.common.output import be_quiet, discard_output, open_closed_streams, with_hint
from headrace.cli.pipeline import jobs
from headrace.errors import (
    BadGrantError,
    BadTopicNameError,
    ConfigError,
    HeadraceError,
    RefusedError,
)
from headrace.printing import described, masked

app = App(
    name="headrace",
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("serve")(serve.serve)
app.command("publish")(publish.publish)
app.command("subscribe")(subscribe.subscribe)
app.command("topics")(topics.topics)
app.command("status")(serve.status)
app.add_typer(channels.app, name="channels")
channels.app.command("send")(channel_messages.send)
channels.app.command("follow")(channel_messages.follow)
channels.app.command("fetch")(channel_messages.fetch)
app.add_typer(logux.app, name="logux")
app.add_typer(serve.clock_app, name="clock")
app.add_typer(token.app, name="token")
app.command("inspect")(inspect.inspect)
app.command("delete")(topics.delete)
app.command("trace")(trace.trace)
app.command("verify")(inspect.verify)
app.command("backup")(backup.backup)
app.command("restore")(backup.restore)
app.add_typer(jobs.app, name="pipeline")
app.command("config")(config.config)
app.command("doctor")(doctor.doctor)
app.command("man")(manual.man)


@app.command("help")
def help_(
    command: Annotated[list[str] | None, argument("COMMAND", "Such as `pipeline export`.")] = None,
) -> None:
    """Show the help of a command.

    \b
    headrace help publish
    headrace help pipeline export
    """
    app([*(command or []), "--help"], prog_name="headrace", standalone_mode=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, option("--debug", "Show tracebacks.")] = False,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", help="Print results, warnings and errors only: no notes."),
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_print_version, is_eager=True, help="Show the version."
        ),
    ] = False,
) -> None:
    """A durable, ordered, resumable message log.

    \b
    headrace serve                                   start a server on loopback
    headrace publish greetings "hello, log"          append a record
    headrace subscribe greetings --from-start        read it, and wait for more
    """


def main(args: list[str] | None = None) -> None:
    """Run one command and exit: 0 success, 1 failure, 2 usage error, 130 interrupted."""
    open_closed_streams()
    args = sys.argv[1:] if args is None else args
    if not args:
        args = ["--help"]
    args, debug = _take(args, "--debug")
    args, quiet = _take(args, "--quiet", "-q")
    be_quiet(quiet)
    try:
        code: Any = app(args, prog_name="headrace", standalone_mode=False)
    except BaseException as error:
        if debug:
            traceback.print_exc()
        code = _explain(error)
    sys.exit(code if isinstance(code, int) else 0)


def _take(args: list[str], *names: str) -> tuple[list[str], bool]:
    """Remove an option from the arguments; return the rest, and True if the option was there.

    The option may be anywhere, because people add it to the end of a command that failed. Arguments after
    `--` are data.
    """
    options = args[: args.index("--")] if "--" in args else args
    kept = [arg for arg in options if arg not in names]
    return kept + args[len(options) :], len(kept) < len(options)


def _explain(error: BaseException) -> int:
    if isinstance(error, TyperException):
        context = getattr(error, "ctx", None)
        hint = f" (see `{context.command_path} --help`)" if context else ""
        if message := error.format_message().strip():
            _say(message.rstrip(".") + hint)
        return error.exit_code
    if isinstance(error, KeyboardInterrupt | Abort):
        return 130
    if isinstance(error, BrokenPipeError):
        discard_output()
        return 1
    if isinstance(error, ConfigError | BadGrantError | BadTopicNameError):
        _say(str(error))
        return 2
    if isinstance(error, OSError) and error.strerror:
        _say(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
        return 1
    if isinstance(error, RefusedError):
        _say(with_hint(str(error)))
        return 1
    if isinstance(error, HeadraceError | OSError):
        _say(str(error))
        return 1
    if isinstance(error, SystemExit):
        raise error
    _say(f"internal error, {described(error)} (--debug shows where)")
    return 1


def _say(message: str) -> None:
    typer.echo("headrace: " + masked(" ".join(message.split())), err=True)
