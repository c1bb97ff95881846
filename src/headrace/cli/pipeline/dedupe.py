"""`headrace pipeline dedupe`: remove rows with duplicate keys. Elsewhere: the job (`pipeline/dedupe/`)."""

from typing import Annotated, Any

import typer

from headrace.cli.common import options
from headrace.cli.common.output import UsageError, counted
from headrace.cli.pipeline import jobs


def dedupe(
    topics: jobs.Topics = None,
    lake: jobs.Lake = None,
    into: Annotated[
        str | None,
        typer.Option(
            "--into",
            metavar="DIR",
            help="The table of rows that stay; made when missing.  [pipeline.dedupe_into]",
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            "--key",
            metavar="COLUMN",
            help="Rows are known by a column of the lake.  [pipeline.dedupe_key]",
        ),
    ] = None,
    json_path: Annotated[
        str | None,
        typer.Option(
            "--json-path",
            metavar="PATH",
            help="Rows are known by what is there in payloads, such as $.order.id.  "
            "[pipeline.dedupe_json_path]",
        ),
    ] = None,
    payload: Annotated[
        bool, typer.Option("--payload", help="Rows are known by their whole payload.")
    ] = False,
    window: Annotated[
        str | None,
        typer.Option(
            "--window",
            metavar="DURATION",
            help="How long a key counts, such as 12h or 7d, or all.  [pipeline.dedupe_window_s, else 1d]",
        ),
    ] = None,
    pattern: jobs.Pattern = None,
    master: jobs.Master = None,
    config_file: options.ConfigFile = None,
    as_json: options.Json = False,
) -> None:
    """Copy the rows of a lake to another table, without those whose key their topic has had before.

    What publishers have sent again becomes one row. Each run takes what the lake has got since the last one,
    and may be killed at any moment. Without topics and a pattern, all topics.

    \b
    headrace pipeline dedupe --lake /lake --into /rows --json-path '$.id'
    headrace pipeline dedupe --lake /lake --into /rows --payload --window 10m
    headrace pipeline dedupe orders --lake /lake --into /rows --key order_id --window all
    """
    found = jobs.settings(
        config_file,
        lake=lake,
        pattern=pattern,
        dedupe_window_s=_window_s(window),
        dedupe_into=into,
        master=master,
    )
    if not found.dedupe_into:
        raise UsageError("say where the rows go: --into DIR")
    if not (key or json_path or payload):
        key, json_path = found.dedupe_key, found.dedupe_json_path
    if sum((bool(key), bool(json_path), payload)) != 1:
        raise UsageError("say what rows are known by: one of --key, --json-path and --payload")
    directory = jobs.lake_of(found)
    with jobs.running("dedupe") as job:
        summary = job.run(
            directory,
            found.dedupe_into,
            topics or (),
            key=key or "",
            json_path=json_path or "",
            payload=payload,
            window_s=found.dedupe_window_s or None,
            pattern=jobs.pattern_of(found, topics, pattern),
            master=found.master,
            task_bytes=found.part_bytes,
            progress=job.progress,
        )
    jobs.print_summary(summary, _words, as_json=as_json)


def _window_s(text: str | None) -> float | None:
    """Return the window as the setting has it: seconds, where 0 means no limit."""
    if text == "all":
        return 0.0
    found = jobs.seconds("--window", text)
    if found == 0:
        raise UsageError("--window takes an age above 0, or all")
    return found


def _words(summary: Any) -> str:
    if not summary.rows:
        return f"nothing new for {summary.into}"
    said = (
        f"kept {summary.kept:,} of {counted(summary.rows, 'row')} of "
        f"{counted(summary.topics, 'topic')} in {summary.into}"
    )
    if summary.without_key:
        said += f"; {summary.without_key:,} without a key"
    return said
