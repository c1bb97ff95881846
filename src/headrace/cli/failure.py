"""The two ways a command ends badly, each one line on standard error and an exit code."""

from typer.exceptions import TyperException

from headrace.errors import HeadraceError


class UsageError(TyperException):
    """The command line makes no sense: exit code 2."""

    exit_code = 2


class CommandError(HeadraceError):
    """The command could not do what it was asked: exit code 1."""
