"""`headrace backup` and `headrace restore`: copy a data directory. Elsewhere: the work (`log/backup.py`)."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from headrace import __version__
from headrace.cli.common import options
from headrace.cli.common.options import argument, option
from headrace.cli.common.output import CommandError, ProgressBar, moment, note, print_json
from headrace.cli.token import damage_of
from headrace.printing import counted, size

if TYPE_CHECKING:
    from headrace.log.backup import BackupManifest

NoVerify = Annotated[
    bool, option("--no-verify", "Do not read the copy again to check every checksum.")
]
Target = Annotated[Path, argument("DEST", "An empty or new directory for the backup.")]
Source = Annotated[Path, argument("SRC", "A directory that `backup` has made.")]


def backup(
    target: Target,
    data: options.DataFlags,
    no_verify: NoVerify = False,
    as_json: options.Json = False,
) -> None:
    """Back up a data directory, also while a server uses it.

    The backup holds at least every record that was acknowledged before the command began, but none of
    memory topics. The server is not stopped and not asked for anything. Exit code 1 if the log is damaged:
    the backup is then finished, with the damage in it. A backup that was interrupted cannot be restored;
    the next one to the same directory begins anew.

    \b
    headrace backup /backup/2026-11-16 --data-dir /var/lib/headrace
    """
    from headrace.log.backup import back_up

    config = data.config
    with ProgressBar() as bar:
        made = back_up(config.data_dir, target, config.rule, __version__, bar.advance_to)
    _print(made, f"backed up {config.data_dir} to {target}", as_json=as_json)
    if not no_verify:
        _verify(target)


def restore(
    source: Source,
    data: options.DataFlags,
    old: Annotated[
        Path | None,
        option(
            "--old DIR",
            "The data directory that is replaced: what was destroyed, trimmed or dropped there since "
            "the backup is not restored.",
        ),
    ] = None,
    no_verify: NoVerify = False,
    as_json: options.Json = False,
) -> None:
    """Restore a backup to a data directory that is empty or does not exist.

    When a server first starts there, every topic continues far ahead of the end of the backup, with a new
    epoch. Clients that have seen later records are told so, and never mistake new records for those. The
    backup is not changed.

    \b
    headrace restore /backup/2026-11-16 --data-dir /var/lib/headrace
    headrace restore /backup/2026-11-16 --data-dir new --old /var/lib/headrace
    """
    from headrace.log.backup import restore as put_back

    directory = data.config.data_dir
    with ProgressBar() as bar:
        made, revoked = put_back(source, directory, bar.advance_to, old=old)
    _print(made, f"restored {source} to {directory}", as_json=as_json)
    if revoked is None:
        note(
            "what was destroyed, trimmed or dropped since the backup is back, and tokens that were revoked "
            "since then are valid; --old DIR leaves that out"
        )
    else:
        note(
            f"not restored, since {old} has given them up: {counted(revoked.topics, 'topic')}, old records "
            f"of {counted(revoked.trimmed, 'topic')}, {counted(revoked.cursors, 'cursor')}, "
            f"{counted(revoked.notes, 'note')}"
        )
    if not no_verify:
        _verify(directory)


def _verify(directory: Path) -> None:
    from headrace.log.verify.verify import verify

    with ProgressBar() as bar:
        report = verify(directory, (), bar.advance_to)
    if report.damaged or damage_of(directory):
        raise CommandError(
            f"{directory} is finished, but some of it is damaged: "
            f"`headrace verify --data-dir {directory}` names what"
        )


def _print(made: "BackupManifest", what: str, *, as_json: bool) -> None:
    if as_json:
        print_json(msgspec.to_builtins(made))
        return
    note(
        f"{what}: {counted(made.topics, 'topic')}, {counted(made.records, 'record')} "
        f"({size(made.bytes)}), as of {moment(made.made_ms)}"
    )
