"""`headrace man`: man pages, made from the help texts of all commands."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace import __version__
from headrace.cli.common.options import argument, option
from headrace.cli.common.output import UsageError, note
from headrace.printing import counted, quoted

PREFORMATTED = "\b"
"""Line of a help text before a paragraph whose lines are kept as they are, such as examples."""


def man(
    context: typer.Context,
    command: Annotated[list[str] | None, argument("COMMAND", "Such as `pipeline export`.")] = None,
    to: Annotated[
        Path | None, option("--to DIR", "Write the pages of all commands to this directory.")
    ] = None,
) -> None:
    """Print the man page of a command, or write all pages.

    \b
    headrace man publish | man -l -
    headrace man --to /usr/local/share/man/man1
    """
    root = context.find_root()
    if to is not None:
        if command:
            raise UsageError("--to writes the pages of all commands: leave out COMMAND")
        to.mkdir(parents=True, exist_ok=True)
        written = 0
        for name, page in pages(root):
            (to / f"{name}.1").write_text(page, "utf-8")
            written += 1
        note(f"{counted(written, 'page')} written to {to}")
        return
    wanted = "-".join(["headrace", *(command or [])])
    found = dict(pages(root))
    if wanted not in found:
        raise UsageError(f"there is no command {quoted(' '.join(command or []))}")
    typer.echo(found[wanted], nl=False)


def pages(root: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and the page of a command and all commands below it."""
    yield _page(root)
    for name in getattr(root.command, "commands", {}):
        child = root.command.get_command(root, name)
        if not child.hidden:
            yield from pages(type(root)(child, info_name=name, parent=root))


def _page(context: Any) -> tuple[str, str]:
    command, path = context.command, context.command_path
    name = path.replace(" ", "-")
    summary, _, rest = (command.help or "").replace("\r", "").partition("\n\n")
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    lines = [
        f'.TH {_word(name.upper())} 1 "" "headrace {__version__}" "Headrace"',
        ".SH NAME",
        f"{_text(name)} \\- {_text(_joined(summary).rstrip('.'))}",
        ".SH SYNOPSIS",
        f".B {_text(usage)}",
    ]
    if rest:
        lines += [".SH DESCRIPTION", *_paragraphs(rest)]
    options = [
        record for param in command.get_params(context) if (record := _record(param, context))
    ]
    if options:
        lines.append(".SH OPTIONS")
        for usage_of_option, help_text in options:
            lines += [".TP", f".B {_text(usage_of_option)}", _text(_joined(help_text))]
    subcommands = [
        child
        for key in getattr(command, "commands", {})
        if not (child := command.get_command(context, key)).hidden
    ]
    if subcommands:
        lines.append(".SH COMMANDS")
        for child in subcommands:
            first = _joined((child.help or "").partition("\n\n")[0])
            lines += [".TP", f".BR {_text(f'{name}-{child.name}')} (1)", _text(first)]
    if context.parent is not None:
        lines += [".SH SEE ALSO", f".BR {_text(context.parent.command_path.replace(' ', '-'))} (1)"]
    return name, "\n".join(lines) + "\n"


def _record(param: Any, context: Any) -> tuple[str, str] | None:
    """Return the usage and the help of a parameter; None if the help does not show it."""
    found = param.get_help_record(context)
    if found is not None or getattr(param, "hidden", False):
        return found  # type: ignore[no-any-return]
    return param.display_name_raw, param.help or ""


def _paragraphs(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(text.split("\n\n")):
        if number:
            yield ".PP"
        first, _, rest = paragraph.partition("\n")
        if first.strip() == PREFORMATTED:
            yield ".nf"
            yield from map(_text, rest.split("\n"))
            yield ".fi"
        else:
            yield _text(_joined(paragraph))


def _joined(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _text(text: str) -> str:
    """Escape a line for roff: a period at its beginning would be a request."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\(ga")
    escaped = re.sub(r"[^\x00-\x7f]", lambda found: f"\\[u{ord(found[0]):04X}]", escaped)
    return f"\\&{escaped}" if escaped[:1] in (".", "'") else escaped


def _word(text: str) -> str:
    return f'"{_text(text)}"'
