"""The two ways a command ends badly, each one line on standard error and an exit code."""

from typer.exceptions import TyperException

from headrace.errors import HeadraceError


def with_hint(reason: str) -> str:
    """The reason why a server was not reached, and what to look at next where that is known."""
    if "is it running?" in reason:
        return f"{reason} (`headrace serve` starts one)"
    if "broke the protocol" in reason or "the server answered" in reason:
        return f"{reason}; is it the server's address for this protocol?"
    return reason


class UsageError(TyperException):
    """The command line makes no sense: exit code 2."""

    exit_code = 2


class CommandError(HeadraceError):
    """The command could not do what it was asked: exit code 1."""
