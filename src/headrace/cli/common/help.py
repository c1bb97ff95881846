"""The layout of help texts: `TOPIC…` for an argument that may be repeated, and no Python types."""

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

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
        from headrace.cli.common.output import UsageError
        from headrace.config.load import nearest
        from headrace.printing import quoted

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
