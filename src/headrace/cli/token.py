"""`headrace token`: make, list and revoke tokens in a data directory, beside its server or without one."""

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.access import tokens
from headrace.access.tokens import StoredToken, Tokens
from headrace.cli.common import options
from headrace.cli.common.options import App, argument, option
from headrace.cli.common.output import CommandError, moment, note, print_json, print_table
from headrace.errors import DamagedTokensError
from headrace.log import shared_file
from headrace.log.disk import Disk
from headrace.log.layout import TOKENS_NAME
from headrace.printing import counted, printable

app = App(name="token")

Name = Annotated[
    str, argument("NAME", "The token's name, which is printed in lists and log lines.")
]


@app.callback()
def token() -> None:
    """Make, list and revoke tokens of clients.

    Tokens are kept, hashed, in the data directory; a running server notices each change within a second. The
    first token turns access control on: from then on, clients without a token may do only what
    `access.anonymous` says.
    """


@app.command("create")
def create(
    name: Name,
    grants: Annotated[
        list[str],
        option(
            "--grant OPERATION:PATTERN",
            "What the token allows, such as 'publish,create:orders/*' or 'all:*'; may be repeated.",
        ),
    ],
    expires: Annotated[
        str | None,
        option(
            "--expires DURATION", "How long the token is valid, such as 90d.  [default: for ever]"
        ),
    ] = None,
    as_json: options.Json = False,
    *,
    data: options.DataFlags,
) -> None:
    """Make a token, and print it once.

    Nobody can read it again: the data directory has only its hash. Operations are publish, subscribe,
    inspect, create, delete (of topics), cursors (of readers), batches (of producers), join
    (CHANNEL/PROCESSOR), as (users of Logux), admin, and all. In a pattern, * matches any characters, but
    never a leading $.

    \b
    headrace token create shop --grant 'publish,create:orders/*' --expires 90d
    headrace token create prometheus --grant 'inspect:*' > token
    headrace token create operator --grant 'all:*' --grant 'all:$*'
    """
    now_ms = time.time_ns() // 1_000_000
    valid_s = None if expires is None else options.seconds("--expires", expires)
    if valid_s is not None and valid_s <= 0:
        raise CommandError("--expires must be more than 0")
    expires_ms = None if valid_s is None else now_ms + int(valid_s * 1000)
    made = tokens.make_token(secrets.token_bytes(tokens.SECRET_BYTES))
    stored = _change(
        data,
        lambda known: tokens.added(known, name, made, grants, now_ms=now_ms, expires_ms=expires_ms),
    )
    if as_json:
        print_json({"token": made} | _fields(stored[-1], now_ms))
        return
    until = "" if expires_ms is None else f" until {moment(expires_ms)}"
    note(f"the token {printable(name)} is valid{until}; it is shown here once:")
    typer.echo(made)


@app.command("list")
def list_(
    as_json: Annotated[bool, option("--json", "Print one JSON object per line.")] = False,
    *,
    data: options.DataFlags,
) -> None:
    """List the tokens, revoked and expired ones too.

    Tokens of the configuration file are not listed: see `headrace config`.

    \b
    headrace token list
    """
    now_ms = time.time_ns() // 1_000_000
    found = read_tokens(data.config.data_dir)
    if as_json:
        for one in found or ():
            print_json(_fields(one, now_ms))
    elif not found:
        note("no tokens" + (" yet" if found is None else ": access control is on"))
    else:
        print_table([_row(one, now_ms) for one in found], optional=("created",))


@app.command("revoke")
def revoke(name: Name, *, data: options.DataFlags) -> None:
    """Revoke a token.

    A running server ends the connections and requests of the token within a second.

    \b
    headrace token revoke shop
    """
    now_ms = time.time_ns() // 1_000_000
    _change(data, lambda known: tokens.revoked(known, name, now_ms))
    note(f"the token {printable(name)} is revoked")


@app.command("prune")
def prune(*, data: options.DataFlags) -> None:
    """Remove revoked and expired tokens from the list.

    Where there was no token yet, access control is on from now on, and nobody has a token.

    \b
    headrace token prune
    """
    now_ms = time.time_ns() // 1_000_000
    removed = 0

    def pruned(known: Tokens) -> Tokens:
        nonlocal removed
        kept = tokens.pruned(known, now_ms)
        removed = len(known) - len(kept)
        return kept

    _change(data, pruned)
    note(f"removed {counted(removed, 'token')}")


def read_tokens(data_dir: Path) -> Tokens | None:
    """Return the tokens in a data directory; None without a file. Raises CommandError for a damaged file."""
    path = data_dir / TOKENS_NAME
    found = shared_file.read(path, tokens.FILE_BYTES_MAX)
    return None if found is None else _decode(path, found.data)


def damage_of(data_dir: Path) -> str:
    """Return what is wrong with the file of tokens in a data directory; empty if nothing is."""
    try:
        read_tokens(data_dir)
    except (CommandError, OSError) as error:
        return str(error)
    return ""


def _change(data: options.DataFlags, edit: Callable[[Tokens], Tokens]) -> Tokens:
    """Change the tokens in the data directory, which is made if it does not exist. Return the new ones."""
    directory = data.config.data_dir
    disk, path = Disk(), directory / TOKENS_NAME
    changed: Tokens = ()

    def change(known: bytes | None) -> bytes:
        nonlocal changed
        changed = edit(() if known is None else _decode(path, known))
        return tokens.encode(changed)

    if not directory.exists():
        disk.make_directory(directory, 0o750)
        note(f"made the data directory {directory}")
    shared_file.change(path, disk, tokens.FILE_BYTES_MAX, change)
    return changed


def _decode(path: Path, data: bytes) -> Tokens:
    try:
        return tokens.decode(data)
    except DamagedTokensError as error:
        raise CommandError(
            f"{path} is damaged: {error}; restore it from a backup, or delete it and make new tokens"
        ) from None


def _fields(one: StoredToken, now_ms: int) -> dict[str, Any]:
    return {
        "name": one.name,
        "state": one.state(now_ms),
        "grants": list(one.grants),
        "created_ms": one.created_ms,
        "expires_ms": one.expires_ms,
        "revoked_ms": one.revoked_ms,
    }


def _row(one: StoredToken, now_ms: int) -> dict[str, str]:
    return {
        "token": printable(one.name),
        "state": one.state(now_ms),
        "grants": " ".join(map(printable, one.grants)),
        "created": moment(one.created_ms),
        "expires": moment(one.expires_ms) if one.expires_ms is not None else "never",
    }
