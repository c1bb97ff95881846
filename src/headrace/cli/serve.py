"""`headrace serve`: start the server with the settings in force. Elsewhere: the server (`server/`)."""

import typer

from headrace.cli.common import options
from headrace.cli.common.output import discard_unwritable, is_quiet


def serve(settings: options.Settings) -> None:
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

    code = run(config, lambda: settings.load().config)
    discard_unwritable()
    raise typer.Exit(code)
