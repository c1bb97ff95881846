"""`headrace pipeline compact`: merge small files of a lake. Elsewhere: the job (`pipeline/compact/`)."""

from typing import Annotated, Any

import typer

from headrace.cli.common import options
from headrace.cli.common.output import counted, size
from headrace.cli.pipeline import jobs


def compact(
    lake: jobs.Lake = None,
    file_bytes: Annotated[
        str | None,
        typer.Option(
            "--file-bytes",
            metavar="SIZE",
            help="How large files become; those of half of it are left alone.  [else 128MiB]",
        ),
    ] = None,
    sweep_after: Annotated[
        str | None,
        typer.Option(
            "--sweep-after",
            metavar="DURATION",
            help="Delete files that the table has not named for so long, such as 12h or 7d.  [else 7d]",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what there is to do, and change nothing.")
    ] = False,
    master: jobs.Master = None,
    config_file: options.ConfigFile = None,
    as_json: options.Json = False,
) -> None:
    """Merge the small files that an export leaves into a few large ones, with the same rows.

    Exports and readers may run meanwhile, and the job may be killed at any moment. Files that are no longer
    in the table, and files left by killed jobs, are deleted when they are older than --sweep-after: a reader
    may use an old state of the table for that long.

    \b
    headrace pipeline compact --lake /lake
    headrace pipeline compact --lake /lake --dry-run
    headrace pipeline compact --lake /lake --file-bytes 256MiB --sweep-after 30d
    """
    found = jobs.settings(
        config_file,
        lake=lake,
        file_bytes=file_bytes,
        sweep_after_s=jobs.seconds("--sweep-after", sweep_after),
        master=master,
    )
    directory = jobs.lake_of(found)
    with jobs.running("compact") as job:
        summary = job.run(
            directory,
            file_bytes=found.file_bytes,
            sweep_after_s=found.sweep_after_s,
            dry_run=dry_run,
            master=found.master,
            progress=job.progress,
        )
    jobs.print_summary(summary, _words, as_json=as_json)


def _words(summary: Any) -> str:
    would = "would have " if summary.dry_run else ""
    if summary.merged:
        records = f" with {counted(summary.records, 'record')}" if summary.records else ""
        said = (
            f"{would}merged {counted(summary.merged, 'file')} ({size(summary.bytes)}){records} of "
            f"{summary.lake} into {summary.made:,}"
        )
    else:
        said = f"nothing to merge in {summary.lake}"
    if summary.left:
        said += f"; {counted(summary.left, 'file')} were merged by someone else meanwhile"
    if summary.folded:
        said += f"; put together the notes of {summary.folded:,} batches"
    if summary.swept:
        said += f"; {would}deleted {counted(summary.swept, 'old file')}"
    return said
