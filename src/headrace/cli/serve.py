"""`headrace serve`: start the server with the settings in force. Elsewhere: the server (`server/`)."""

from functools import partial

import typer

from headrace.cli.common import options
from headrace.cli.common.output import discard_unwritable, is_quiet


def serve(
    data_dir: options.DataDir = None,
    figg: options.Figg = None,
    ws: options.Ws = None,
    http: options.ListenHttp = None,
    durability: options.Durability = None,
    config_file: options.ConfigFile = None,
    log_format: options.LogFormat = None,
    log_level: options.LogLevel = None,
    others: options.Set = None,
) -> None:
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
    if is_quiet() and log_level is None:
        log_level = "warning"
    load = partial(
        options.load_settings,
        config_file=config_file,
        data_dir=data_dir,
        figg=figg,
        ws=ws,
        http=http,
        durability=durability,
        log_format=log_format,
        log_level=log_level,
        others=others,
    )
    config = load().config
    # Imported here: the other commands do not need the server.
    from headrace.server.server import run

    code = run(config, lambda: load().config)
    discard_unwritable()
    raise typer.Exit(code)
