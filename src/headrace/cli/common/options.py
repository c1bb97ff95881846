"""Options that several commands share, the parsing of their values, and the layout of help texts.

Help texts show `TOPIC…` for an argument that may be repeated, and no Python types.
"""

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from headrace.cli.common.output import UsageError
from headrace.cli.common.server import HttpApi, request
from headrace.config.load import SETTINGS, Loaded, load, nearest
from headrace.config.settings import Config, Listen
from headrace.config.values import SECONDS, Quantity, parse_seconds
from headrace.errors import HeadraceError, OptionError
from headrace.printing import quoted
from headrace.tls import DEFAULT_FILES, TlsFiles
from headrace.tokens import token_in


def option(usage: str, text: str, **more: Any) -> Any:
    """Describe an option by its usage, such as `--lake DIR` or `--json`, and its help."""
    flag, _, metavar = usage.partition(" ")
    return typer.Option(flag, metavar=metavar or None, help=text, **more)


def argument(metavar: str, text: str, **more: Any) -> Any:
    return typer.Argument(metavar=metavar, help=text, **more)


Url = Annotated[
    str | None,
    option(
        "--url URL",
        "The server's address: figg://HOST:PORT, wombat://HOST:PORT or, with TLS, figgs:// or wombats://."
        "  [env HEADRACE_URL, else figg://127.0.0.1:8119]",
    ),
]
Http = Annotated[
    str | None,
    option(
        "--http HOST:PORT",
        "The server's HTTP address; https://HOST:PORT with TLS.  [env HEADRACE_HTTP, else 127.0.0.1:8121]",
    ),
]
Token = Annotated[
    str | None,
    option(
        "--token TOKEN",
        "A token, if the server asks for one; others on the machine can see it here.  "
        "[env HEADRACE_TOKEN]",
    ),
]


class TokenFlags(NamedTuple):
    """Options of commands that show a token to the server."""

    token: Token = None
    token_file: Annotated[
        str | None,
        option("--token-file FILE", "A file with the token, which is read for each connection."),
    ] = None
    insecure_token: Annotated[
        bool,
        option(
            "--insecure-token",
            "Send the token also without TLS to another machine, where others can read it.",
        ),
    ] = False

    def find(self) -> str | None:
        """Return the token; None without one. Raises UsageError."""
        if self.token and self.token_file:
            raise UsageError("--token and --token-file exclude each other")
        if self.token_file:
            return _token_in(self.token_file)
        return self.token or os.environ.get("HEADRACE_TOKEN") or None

    def for_client(self, name: str = "token") -> dict[str, Any]:
        """Return the options of a client. It reads a file again for each connection: the token may change."""
        file, found = self.token_file, self.find()
        source = found if file is None else lambda: _token_in(file)
        return {name: source, "insecure_token": self.insecure_token}


def _token_in(file: str) -> str:
    try:
        return token_in(file, "--token-file")
    except OptionError as error:
        raise UsageError(str(error)) from None


NO_TOKEN_FLAGS = TokenFlags()


class TlsFlags(NamedTuple):
    """Options of commands that connect to a server with TLS."""

    ca: Annotated[
        str | None,
        option(
            "--ca FILE",
            "The authority of the server's certificate, in PEM.  [env HEADRACE_CA, else the system's]",
        ),
    ] = None
    cert: Annotated[
        str | None,
        option(
            "--cert FILE",
            "A certificate of this client, in PEM, if the server asks for one.  [env HEADRACE_CERT]",
        ),
    ] = None
    key: Annotated[
        str | None,
        option("--key FILE", "The key of that certificate.  [env HEADRACE_KEY, else in its file]"),
    ] = None

    @property
    def files(self) -> TlsFiles:
        return TlsFiles(self.ca or "", self.cert or "", self.key or "")


Timeout = Annotated[
    float,
    option(
        "--timeout DURATION",
        "How long to try to reach a server, such as 500ms, 30s or 5m; without a unit, seconds.  "
        "[default 5s]",
        parser=lambda text: _timeout_s(text),
        show_default=False,
    ),
]
Json = Annotated[bool, option("--json", "Print JSON.")]
MOMENT_HELP = "how long ago (90s, 10m, 2h, 7d, 1w), an ISO 8601 time, or milliseconds since 1970"
_COMPLETE_TIMEOUT_S = 1.0
_COMPLETED_MAX = 100


def complete_topic(incomplete: str) -> list[str]:
    """Return topics with this prefix, for shell completion; none if no server answers in time."""
    try:
        query: dict[str, Any] = {"prefix": incomplete or None, "limit": _COMPLETED_MAX}
        api = http_api(None)
        found = request(api, "GET", "/v1/topics", timeout_s=_COMPLETE_TIMEOUT_S, **query)
    except (HeadraceError, UsageError):
        return []
    return [topic["name"] for topic in found["topics"] if topic["name"].isprintable()]


Topic = Annotated[str, argument("TOPIC", "The topic's name.", autocompletion=complete_topic)]

ConfigFile = Annotated[
    Path | None, option("--config FILE", "A TOML file of settings.  [env HEADRACE_CONFIG]")
]


class DataFlags(NamedTuple):
    """Options of commands that use a data directory without its server."""

    data_dir: Annotated[
        str | None,
        option("--data-dir DIR", "The server's data directory.  [default headrace-data]"),
    ] = None
    config_file: ConfigFile = None

    @property
    def config(self) -> Config:
        return load({"data_dir": self.data_dir}, os.environ, self.config_file).config


class HttpFlags(NamedTuple):
    """Options of commands that ask the server's HTTP API."""

    http: Http = None
    token: TokenFlags = NO_TOKEN_FLAGS
    tls: TlsFlags = TlsFlags()

    @property
    def api(self) -> HttpApi:
        return http_api(self.http, self.token, self.tls.files)


class SettingsFlags(NamedTuple):
    """Options of commands that take every setting."""

    data_dir: Annotated[str | None, option("--data-dir DIR", SETTINGS["data_dir"].doc)] = None
    figg: Annotated[
        str | None, option("--figg HOST:PORT", "Where Figg answers; port 0 takes a free one.")
    ] = None
    ws: Annotated[str | None, option("--ws HOST:PORT", "Where the WebSocket protocols answer.")] = (
        None
    )
    http: Annotated[str | None, option("--http HOST:PORT", "Where the HTTP API answers.")] = None
    insecure_open: Annotated[
        bool,
        option(
            "--insecure-open", "Listen on other addresses than loopback without access control."
        ),
    ] = False
    durability: Annotated[str | None, option("--durability NAME", "synced, written or memory.")] = (
        None
    )
    config_file: ConfigFile = None
    log_format: Annotated[str | None, option("--log-format NAME", "human or json.")] = None
    log_level: Annotated[
        str | None, option("--log-level NAME", "debug, info, warning or error.")
    ] = None
    others: Annotated[
        list[str] | None,
        option("--set KEY=VALUE", "Any other setting, such as journal.files=8; may be repeated."),
    ] = None

    def load(self) -> Loaded:
        flags: dict[str, object] = {
            "data_dir": self.data_dir,
            "listen.figg": self.figg,
            "listen.ws": self.ws,
            "listen.http": self.http,
            "listen.insecure_open": "true" if self.insecure_open else None,
            "durability": self.durability,
            "log_format": self.log_format,
            "log_level": self.log_level,
        }
        for assignment in self.others or []:
            key, equals, value = assignment.partition("=")
            if not equals:
                raise UsageError(f"--set takes KEY=VALUE, not {quoted(assignment)}")
            if flags.get(key) is not None:
                raise UsageError(f"{key} is given twice on the command line")
            flags[key] = value
        return load(flags, os.environ, self.config_file)


class SpanFlags(NamedTuple):
    """Options for the records that a command prints."""

    from_offset: Annotated[
        int | None,
        option("--from-offset N", "Begin with the record at this offset.", min=0, max=2**64 - 1),
    ] = None
    from_start: Annotated[bool, option("--from-start", "Begin with the oldest record kept.")] = (
        False
    )
    last: Annotated[
        int | None, option("--last N", "Begin this many records before the end.", min=0)
    ] = None
    since: Annotated[str | None, option("--since TIME", f"Begin at a time: {MOMENT_HELP}.")] = None
    limit: Annotated[int | None, option("--count N", "End after this many records.", min=1)] = None
    until_end: Annotated[
        bool,
        option(
            "--until-end",
            "End where the topic ends now. Begins with the oldest record, if nothing else is said.",
        ),
    ] = False


class ConnectionFlags(NamedTuple):
    """Options of a command that connects to the server, and also asks its HTTP address."""

    url: Url = None
    http: Http = None
    token: TokenFlags = NO_TOKEN_FLAGS
    tls: TlsFlags = TlsFlags()
    timeout_s: Timeout = 5.0

    @property
    def is_same_server(self) -> bool:
        """True if the HTTP address probably belongs to the server at `url`.

        False if only the URL was given: the default HTTP address may be that of another server.
        """
        url_named = bool(self.url or os.environ.get("HEADRACE_URL"))
        return bool(self.http or os.environ.get("HEADRACE_HTTP")) or not url_named

    @property
    def is_elsewhere(self) -> bool:
        """True if the default HTTP address is certainly not that of the server at `url`."""
        host = urlsplit(self.url or os.environ.get("HEADRACE_URL") or "").hostname
        return not self.is_same_server and host not in ("127.0.0.1", "localhost", "::1")


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


def http_api(
    http: str | None, token: TokenFlags = NO_TOKEN_FLAGS, tls: TlsFiles = DEFAULT_FILES
) -> HttpApi:
    """Return the given HTTP API, or that of the environment, or the default one."""
    address = http or os.environ.get("HEADRACE_HTTP") or str(Listen().http)
    base = address.rstrip("/") if "://" in address else f"http://{address}"
    return HttpApi(base, token.find(), tls.or_environment(), token.insecure_token)


def is_for_subcommand(context: typer.Context, *given: object) -> bool:
    """True if a subcommand follows. Raise UsageError if options were given before it."""
    # A group of options that were not given is a tuple of nothing.
    is_given = any(any(one) if isinstance(one, tuple) else one for one in given)
    if context.invoked_subcommand is not None and is_given:
        raise UsageError(f"options go behind `{context.invoked_subcommand}`")
    return context.invoked_subcommand is not None


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
    # Shorter numbers are dates such as 20250131.
    if text.isascii() and text.isdigit() and len(text) > 8:
        return int(text)
    when = datetime.fromisoformat(text)
    if when.tzinfo is None:
        when = when.replace(tzinfo=now.tzinfo)
    return max(0, int(when.timestamp() * 1000))


class App(typer.Typer):
    """A group of commands with this layout. Brackets in help texts are not treated as markup.

    A parameter of a command whose type is a NamedTuple stands for the options that are its fields, and these
    may be groups of options too.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            add_completion=settings.pop("add_completion", False),
            cls=_Group,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            **settings,
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        add = super().command(name, cls=_Command, **settings)
        return lambda function: add(_with_groups(function))

    def callback(self, **settings: Any) -> Callable[[Any], Any]:
        add = super().callback(**settings)
        return lambda function: add(_with_groups(function))


def _with_groups(function: Callable[..., Any]) -> Callable[..., Any]:
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        if hasattr(parameter.annotation, "_fields"):
            groups[parameter.name] = parameter.annotation
        parameters += _single(parameter)

    def run(**values: Any) -> Any:
        for name, group in groups.items():
            values[name] = _made(group, values)
        return function(**values)

    run.__doc__ = function.__doc__
    by_name = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    return with_parameters(run, by_name) if groups else function


def _single(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    """Yield the options that a parameter stands for."""
    if hasattr(parameter.annotation, "_fields"):
        for field in inspect.signature(parameter.annotation).parameters.values():
            yield from _single(field)
    else:
        yield parameter


def _made(group: Any, values: dict[str, Any]) -> Any:
    """Take the values of a group of options out of `values`, and return the group."""
    return group(
        *(
            _made(field.annotation, values)
            if hasattr(field.annotation, "_fields")
            else values.pop(name)
            for name, field in inspect.signature(group).parameters.items()
        )
    )


def with_parameters(
    function: Callable[..., Any], parameters: Sequence[inspect.Parameter]
) -> Callable[..., Any]:
    """Give a function the parameters from which typer makes options."""
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {one.name: one.annotation for one in parameters}
    return function


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
    return argument.display_name_raw + ("…" if argument.nargs != 1 else "")
