"""Options that several commands share, the parsing of their values, and the layout of help texts.

Help texts show `TOPIC…` for an argument that may be repeated, and no Python types.
"""

import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from headrace.cli.common.output import UsageError
from headrace.cli.common.server import HttpApi, request
from headrace.config.load import SETTINGS, Loaded, load, nearest
from headrace.config.settings import Listen
from headrace.config.values import SECONDS, Quantity, parse_seconds
from headrace.errors import HeadraceError
from headrace.printing import quoted

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="The server's address: figg://HOST:PORT, wombat://HOST:PORT or, with TLS, wombats://HOST."
        "  [env HEADRACE_URL, else figg://127.0.0.1:8119]",
    ),
]
Http = Annotated[
    str | None,
    typer.Option(
        "--http",
        metavar="HOST:PORT",
        help="The server's HTTP address.  [env HEADRACE_HTTP, else 127.0.0.1:8121]",
    ),
]
Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        metavar="TOKEN",
        help="The token that the HTTP address takes; others on the machine can see it here.  "
        "[env HEADRACE_TOKEN]",
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        metavar="DURATION",
        help="How long to try to reach a server, such as 500ms, 30s or 5m; without a unit, seconds.  "
        "[default 5s]",
        parser=lambda text: _timeout_s(text),
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
FromOffset = Annotated[
    int | None,
    typer.Option(
        "--from-offset",
        metavar="N",
        min=0,
        max=2**64 - 1,
        help="Begin with the record at this offset.",
    ),
]
FromStart = Annotated[bool, typer.Option("--from-start", help="Begin with the oldest record kept.")]
Last = Annotated[
    int | None,
    typer.Option("--last", metavar="N", min=0, help="Begin this many records before the end."),
]
MOMENT_HELP = "how long ago (90s, 10m, 2h, 7d, 1w), an ISO 8601 time, or milliseconds since 1970"
Since = Annotated[
    str | None, typer.Option("--since", metavar="TIME", help=f"Begin at a time: {MOMENT_HELP}.")
]
Count = Annotated[
    int | None, typer.Option("--count", metavar="N", min=1, help="End after this many records.")
]
UntilEnd = Annotated[
    bool,
    typer.Option(
        "--until-end",
        help="End where the topic ends now. Begins with the oldest record, if nothing else is said.",
    ),
]
_COMPLETE_TIMEOUT_S = 1.0
_COMPLETED_MAX = 100


def complete_topic(incomplete: str) -> list[str]:
    """Return topics with this prefix, for shell completion; none if no server answers in time."""
    try:
        query: dict[str, Any] = {"prefix": incomplete or None, "limit": _COMPLETED_MAX}
        api = http_api(None, None)
        found = request(api, "GET", "/v1/topics", timeout_s=_COMPLETE_TIMEOUT_S, **query)
    except (HeadraceError, UsageError):
        return []
    return [topic["name"] for topic in found["topics"] if topic["name"].isprintable()]


Topic = Annotated[
    str,
    typer.Argument(metavar="TOPIC", help="The topic's name.", autocompletion=complete_topic),
]

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="A TOML file of settings.  [env HEADRACE_CONFIG]"
    ),
]
DataDir = Annotated[
    str | None, typer.Option("--data-dir", metavar="DIR", help=SETTINGS["data_dir"].doc)
]
ReadDataDir = Annotated[
    str | None,
    typer.Option(
        "--data-dir", metavar="DIR", help="The server's data directory.  [default headrace-data]"
    ),
]
Figg = Annotated[
    str | None,
    typer.Option(
        "--figg", metavar="HOST:PORT", help="Where Figg answers; port 0 takes a free one."
    ),
]
Ws = Annotated[
    str | None,
    typer.Option("--ws", metavar="HOST:PORT", help="Where the WebSocket protocols answer."),
]
ListenHttp = Annotated[
    str | None, typer.Option("--http", metavar="HOST:PORT", help="Where the HTTP API answers.")
]
Durability = Annotated[
    str | None, typer.Option("--durability", metavar="NAME", help="synced, written or memory.")
]
LogFormat = Annotated[
    str | None, typer.Option("--log-format", metavar="NAME", help="human or json.")
]
LogLevel = Annotated[
    str | None, typer.Option("--log-level", metavar="NAME", help="debug, info, warning or error.")
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any other setting, such as journal.files=8; may be repeated.",
    ),
]


_TIMEOUT_S_MIN = 0.1


def seconds(option: str, text: str) -> float:
    """Return the duration given for an option, in seconds; a number without a unit is in seconds."""
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise UsageError(f"{option} takes {error}, not {quoted(text)}") from None


def _timeout_s(text: str | float) -> float:
    found = seconds("--timeout", str(text))
    if found < _TIMEOUT_S_MIN:
        raise UsageError(f"--timeout must be at least {_TIMEOUT_S_MIN:g} s, not {found:g} s")
    return found


def url_or_default(url: str | None) -> str:
    return url or os.environ.get("HEADRACE_URL") or f"figg://{Listen().figg}"


def http_api(http: str | None, token: str | None) -> HttpApi:
    """Return the given HTTP API, or that of the environment, or the default one."""
    address = http or os.environ.get("HEADRACE_HTTP") or str(Listen().http)
    base = address.rstrip("/") if "://" in address else f"http://{address}"
    return HttpApi(base, token or os.environ.get("HEADRACE_TOKEN") or None)


def is_same_server(url: str | None, http: str | None) -> bool:
    """Return True if the HTTP address probably belongs to the server at `url`.

    False if only the URL was given: the default HTTP address may be that of another server.
    """
    url_named = bool(url or os.environ.get("HEADRACE_URL"))
    return bool(http or os.environ.get("HEADRACE_HTTP")) or not url_named


def is_elsewhere(url: str | None, http: str | None) -> bool:
    """Return True if the default HTTP address is certainly not that of the server at `url`."""
    host = urlsplit(url or os.environ.get("HEADRACE_URL") or "").hostname
    return not is_same_server(url, http) and host not in ("127.0.0.1", "localhost", "::1")


def load_settings(
    *,
    config_file: Path | None,
    data_dir: str | None = None,
    figg: str | None = None,
    ws: str | None = None,
    http: str | None = None,
    durability: str | None = None,
    log_format: str | None = None,
    log_level: str | None = None,
    others: list[str] | None = None,
) -> Loaded:
    flags: dict[str, object] = {
        "data_dir": data_dir,
        "listen.figg": figg,
        "listen.ws": ws,
        "listen.http": http,
        "durability": durability,
        "log_format": log_format,
        "log_level": log_level,
    }
    for assignment in others or []:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise UsageError(f"--set takes KEY=VALUE, not {quoted(assignment)}")
        if flags.get(key) is not None:
            raise UsageError(f"{key} is given twice on the command line")
        flags[key] = value
    return load(flags, os.environ, config_file)


def only_one(**given: bool) -> None:
    """Raise UsageError if several of these options are given. Names are option names without dashes."""
    names = ["--" + name.replace("_", "-") for name, used in given.items() if used]
    if len(names) > 1:
        raise UsageError(f"{' and '.join(names)} exclude each other")


def parse_moment(text: str, now: datetime) -> int:
    """Return milliseconds since 1970; raise ValueError if the text is not a time.

    A text without a time zone is in the zone of `now`.
    """
    ago = Quantity.parse(text)
    if ago is not None and ago.unit == SECONDS:
        return max(0, int(now.timestamp() * 1000 - ago.value * 1000))
    if (
        text.isascii() and text.isdigit() and len(text) > 8
    ):  # shorter ones are dates such as 20250131
        return int(text)
    when = datetime.fromisoformat(text)
    if when.tzinfo is None:
        when = when.replace(tzinfo=now.tzinfo)
    return max(0, int(when.timestamp() * 1000))


MORE = "…"


class App(typer.Typer):
    """A group of commands with this layout. Brackets in help texts are not treated as markup."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            add_completion=settings.pop("add_completion", False),
            cls=_Group,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            **settings,
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        return super().command(name, cls=_Command, **settings)


class _Group(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; suggest similar names, because typer's own hint suggests hardly similar ones."""
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            hint = nearest(args[0], self.list_commands(ctx))
            raise UsageError(
                f"there is no command {quoted(args[0])}{hint} (see `{ctx.command_path} --help`)"
            )
        return super().resolve_command(ctx, args)


class _Command(TyperCommand):
    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = [self.options_metavar] if self.options_metavar else []
        for argument in self._arguments(ctx):
            name = _name(argument)
            pieces.append(name if argument.required else f"[{name}]")
        return pieces

    def format_options(self, ctx: Any, formatter: Any) -> None:
        arguments = [(_name(one), one.help or "") for one in self._arguments(ctx)]
        records = [
            param.get_help_record(ctx)
            for param in self.get_params(ctx)
            if not isinstance(param, TyperArgument)
        ]
        for title, rows in (("Arguments", arguments), ("Options", list(filter(None, records)))):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def _arguments(self, ctx: Any) -> list[TyperArgument]:
        return [param for param in self.get_params(ctx) if isinstance(param, TyperArgument)]


def _name(argument: TyperArgument) -> str:
    return argument.display_name_raw + (MORE if argument.nargs != 1 else "")
