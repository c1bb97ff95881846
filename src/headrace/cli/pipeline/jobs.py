"""`headrace pipeline`: the commands of the jobs between the log and a lake, their progress and their end.

Elsewhere: the options of each job (`config/pipeline.py`), and the jobs (`pipeline/`).
"""

import importlib
import json
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime
from functools import partial
from types import FrameType
from typing import Annotated, Any

import msgspec
import typer

from headrace.cli.common import options
from headrace.cli.common.options import App, option
from headrace.cli.common.output import CommandError, ProgressBar, UsageError, moment, note
from headrace.cli.pipeline.options import Given, command
from headrace.config.pipeline import (
    AggregateOptions,
    AggregateStreamOptions,
    AuditOptions,
    CompactOptions,
    DedupeOptions,
    ExportOptions,
    ReplayOptions,
    ReportOptions,
)
from headrace.config.values import Quantity
from headrace.errors import OptionError
from headrace.printing import counted, quoted, size


def _run(name: str, keywords: dict[str, Any], *, has_progress: bool = True) -> Any:
    """Return the summary of a job, after showing its progress; raise CommandError if a package is missing."""
    try:
        run = getattr(importlib.import_module("headrace.pipeline"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("headrace"):
            raise
        raise CommandError(
            f"this needs: pip install 'headrace[pipeline]' ({error.name} is missing)"
        ) from None
    with _told_on_standard_error(), ProgressBar() as bar:
        progress = {"progress": bar.advance_to} if has_progress else {}
        try:
            return run(**keywords, **progress)
        except OptionError as error:
            raise UsageError(str(error)) from None
        except KeyboardInterrupt:
            note("interrupted: run the same command again to do the rest")
            raise


@contextmanager
def _told_on_standard_error() -> Iterator[None]:
    """Print log messages of jobs to standard error, on a terminal also debug messages.

    Other loggers print warnings and errors only.
    """
    jobs = logging.getLogger("headrace.pipeline")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("headrace: %(message)s"))
    before, jobs.propagate = jobs.level, False
    jobs.setLevel(logging.DEBUG if sys.stderr.isatty() else logging.INFO)
    jobs.addHandler(handler)
    others = logging.StreamHandler()
    others.setLevel(logging.WARNING)
    # py4j logs a traceback if the JVM has died; the job itself reports that in one sentence.
    others.addFilter(lambda record: "py4j" not in record.pathname)
    logging.root.addHandler(others)
    try:
        yield
    finally:
        logging.root.removeHandler(others)
        jobs.removeHandler(handler)
        jobs.setLevel(before)
        jobs.propagate = True


def _print(given: Given, summary: Any, words: Callable[[Any], str]) -> None:
    typer.echo(json.dumps(summary._asdict()) if given.as_json else words(summary))


@contextmanager
def _ending() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C or SIGTERM has asked a job to end after its current work.

    A second signal ends the job at once.
    """
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


app = App()


@app.callback(invoke_without_command=True)
def _jobs(context: typer.Context) -> None:
    """Run a job between the log and a lake, on Spark.

    Needs `pip install 'headrace[pipeline]'` and Java 17 or newer.

    \b
    headrace pipeline export --lake /lake --once     the records of the log, into a table
    headrace pipeline compact --lake /lake           its small files into large ones
    headrace pipeline dedupe --lake /lake --into /rows --json-path '$.id'     every key once
    headrace pipeline replay orders --to test --lake /lake     records of the lake, into a topic
    headrace pipeline report --out report.html       a page with plots of log and lake
    headrace pipeline aggregate --lake /lake --reducer last --into /states     a state for each topic
    headrace pipeline audit --lake /lake             a check whether anything was lost
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@command(app, "export")
def _export(given: Given) -> None:
    """Write topics to a lake table, every record exactly once.

    The job runs until Ctrl-C or SIGTERM and finishes its batch first; with --once it ends by itself. You can
    kill it at any moment: the next run continues where the table ends. Without topics or a pattern, it
    exports all topics.

    \b
    headrace pipeline export --lake /lake --once
    headrace pipeline export orders returns --lake /lake --every 60s
    headrace pipeline export events --lake /lake --decode json --schema 'id bigint, name string'
    headrace pipeline export --config headrace.toml --master spark://host:7077
    """
    keywords = given.keywords(ExportOptions) | given.server(given.values["data_dir"])
    with nullcontext(lambda: False) if keywords["once"] else _ending() as stop:
        summary = _run("export", keywords | {"stop": stop})
    _print(given, summary, _export_words)


def _export_words(summary: Any) -> str:
    if summary.batches:
        said = (
            f"exported {counted(summary.records, 'record')} ({size(summary.bytes)}) of "
            f"{counted(summary.topics, 'topic')} to {summary.lake} in "
            f"{counted(summary.batches, 'batch', 'batches')} and {counted(summary.files, 'file')}"
        )
    else:
        said = f"nothing new for {summary.lake}"
    if summary.lost:
        said += f"; {counted(summary.lost, 'record')} lost: see retention.wait_for"
    return said if summary.told else f"{said}; the server was not told, so retention does not know"


@command(
    app,
    "aggregate",
    short_help="Fold all records of each topic into one state.",
    also={
        "stream": Annotated[
            bool, option("--stream", "Keep the states up to date until Ctrl-C or SIGTERM.")
        ]
    },
)
def _aggregate(given: Given) -> None:
    """Fold all records of each topic in lake and log into one state, as the server folds channels.

    The states become a Delta table, which is replaced as a whole, in one step. With --stream the job keeps
    running and replaces the states that have changed; it needs no lake. Without topics or a pattern, the job
    takes all topics.

    \b
    headrace pipeline aggregate --lake /lake --reducer last --into /states
    headrace pipeline aggregate --lake /lake --reducer count --into /counts --pattern '\\$channel/.*'
    headrace pipeline aggregate --lake /lake --reducer app:apply --into /documents --publish
    headrace pipeline aggregate --stream --reducer last --into /states
    """
    values = given.values
    for name, flag in (("every_s", "--every"), ("batch_bytes", "--batch-bytes")):
        if values[name] is not None and not values["stream"]:
            raise UsageError(f"{flag} needs --stream: without it the job runs once")
    server = given.server(None if values["publish"] else values["data_dir"])
    if values["stream"]:
        keywords = given.keywords(AggregateStreamOptions) | server
        with _ending() as stop:
            summary = _run("aggregate_stream", keywords | {"stop": stop}, has_progress=False)
    else:
        summary = _run("aggregate", given.keywords(AggregateOptions) | server)
    _print(given, summary, partial(_aggregate_words, publish=values["publish"]))


def _aggregate_words(summary: Any, *, publish: bool) -> str:
    said = (
        f"{summary.reducer} of {counted(summary.messages, 'message')} of "
        f"{counted(summary.topics, 'topic')} in {summary.into}"
    )
    if summary.incomplete:
        said += f"; {counted(summary.incomplete, 'state')} without records that no longer exist"
    if summary.failed:
        said += f"; {summary.failed:,} failed, the first: {summary.first_failure}"
    if publish:
        said += f"; published {counted(summary.published, 'snapshot')}"
    if summary.refused:
        said += f"; {summary.refused:,} not published, the first: {summary.first_refusal}"
    return said


@command(app, "compact", short_help="Merge many small files into a few large ones.")
def _compact(given: Given) -> None:
    """Merge the small files that an export leaves into a few large ones, with the same rows.

    Exports and readers may run meanwhile, and the job may be killed at any moment. Files that are no longer
    in the table, and files left by killed jobs, are deleted when they are older than --sweep-after: a reader
    may use an old state of the table for that long.

    \b
    headrace pipeline compact --lake /lake
    headrace pipeline compact --lake /lake --dry-run
    headrace pipeline compact --lake /lake --file-bytes 256MiB --sweep-after 30d
    """
    _print(given, _run("compact", given.keywords(CompactOptions)), _compact_words)


def _compact_words(summary: Any) -> str:
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
        said += f"; another job has merged {counted(summary.left, 'file')} meanwhile"
    if summary.swept:
        said += f"; {would}deleted {counted(summary.swept, 'old file')}"
    return said


@command(app, "dedupe", short_help="Copy rows without duplicates.")
def _dedupe(given: Given) -> None:
    """Copy the rows of a lake to another table, without rows whose key occurred before in their topic.

    Messages that publishers have sent again become one row. Each run takes the rows that the lake has
    received since the last one, and may be killed at any moment. Without topics and a pattern, it takes all
    topics.

    \b
    headrace pipeline dedupe --lake /lake --into /rows --json-path '$.id'
    headrace pipeline dedupe --lake /lake --into /rows --payload --window 10m
    headrace pipeline dedupe orders --lake /lake --into /rows --key order_id --window all
    """
    values = given.values
    values["window_s"] = _window(values["window_s"])
    # Either of them overrides both keys of the settings; an empty one does not count.
    is_given = bool(values["payload"] or values["key"] or values["json_path"])
    for name in ("key", "json_path"):
        values[name] = values[name] or ("" if is_given else None)
    keywords = given.keywords(DedupeOptions)
    if sum(bool(keywords[name]) for name in ("key", "json_path", "payload")) != 1:
        raise UsageError("say what identifies a row: one of --key, --json-path and --payload")
    _print(given, _run("dedupe", keywords), _dedupe_words)


def _window(text: str | None) -> str | None:
    """Return the window as the setting has it, where 0 means for ever."""
    if text == "all":
        return "0"
    if text is not None and not options.seconds("--window", text):
        raise UsageError("--window takes a duration above 0, or all")
    return text


def _dedupe_words(summary: Any) -> str:
    if not summary.rows:
        return f"nothing new for {summary.into}"
    said = (
        f"kept {summary.kept:,} of {counted(summary.rows, 'row')} of "
        f"{counted(summary.topics, 'topic')} in {summary.into}"
    )
    if summary.without_key:
        said += f"; {summary.without_key:,} without a key"
    return said


@command(app, "replay", short_help="Publish a lake's records to a topic.")
def _replay(given: Given) -> None:
    """Publish the records that a lake has of a topic to another topic, in their order.

    Publishes all records, or those between two offsets or times. Repeat the same command until it succeeds:
    it continues where it was killed, and does nothing once it is done.

    \b
    headrace pipeline replay orders --to orders-again --lake /lake
    headrace pipeline replay orders --to test --lake /lake --since 2026-01-31T08:00Z --until 2026-01-31T09:00Z
    headrace pipeline replay orders --to test --lake /lake --from-offset 0 --rate 500 --name second
    """
    now = datetime.now().astimezone()
    keywords = given.keywords(ReplayOptions) | given.server()
    for name in ("since", "until"):
        if name in keywords:
            keywords[name] = _moment(f"--{name}", keywords[name], now)
    _print(given, _run("replay", keywords), _replay_words)


def _moment(option: str, text: str, now: datetime) -> int:
    takes = f"{option} takes an ISO 8601 time, or milliseconds since 1970, not {quoted(text)}"
    if Quantity.parse(text) is not None:
        raise UsageError(f"{takes}: a repeat has to mean the same moment")
    try:
        return options.parse_moment(text, now)
    except ValueError:
        raise UsageError(takes) from None


def _replay_words(summary: Any) -> str:
    where = f"{summary.topic} (offsets {summary.start} to {summary.end})"
    if summary.batches:
        said = (
            f"replayed {counted(summary.records, 'record')} ({size(summary.bytes)}) of {where} to "
            f"{summary.to} in {counted(summary.batches, 'batch', 'batches')}"
        )
    else:
        said = f"nothing to replay of {where} to {summary.to}"
    if summary.resumed > summary.start:
        said += f"; offsets {summary.start} to {summary.resumed} were replayed before"
    return said


@command(app, "report", short_help="Write a page with plots of log and lake.")
def _report(given: Given) -> None:
    """Write one self-contained HTML page with plots of what log and lake hold.

    Messages and bytes over time, busiest topics, sizes, silences, and how far readers are behind. Reads no
    payload. With a lake, the page also covers records that the log has deleted since.

    \b
    headrace pipeline report
    headrace pipeline report --lake /lake --out week.html --json week.json
    headrace pipeline report orders returns --data-dir /var/lib/headrace
    """
    keywords = given.keywords(ReportOptions) | given.server(given.values["data_dir"])
    typer.echo(_report_words(_run("report", keywords)))


def _report_words(summary: Any) -> str:
    where = f"{summary.page} and {summary.json}" if summary.json else summary.page
    said = (
        f"{where}: {counted(summary.messages, 'message')} ({size(summary.bytes)}) of "
        f"{counted(summary.topics, 'topic')}"
    )
    if summary.messages:
        said += f", {moment(summary.first_ms)} to {moment(summary.last_ms)}"
    if summary.damaged:
        said += f"; {counted(summary.damaged, 'part')} of the log could not be counted"
    return said


@command(
    app,
    "audit",
    also={
        "no_log": Annotated[bool, option("--no-log", "Read only the lake, even if there is a log.")]
    },
)
def _audit(given: Given) -> None:
    """Check that nothing was lost, or report exactly what.

    Reads every byte of the log and of the lake: checksums, ordinals without a gap, and both against each
    other, byte for byte. Exit code 1 if anything is missing or damaged. Changes nothing, and may run beside a
    server.

    \b
    headrace pipeline audit
    headrace pipeline audit --lake /lake --data-dir /var/lib/headrace
    headrace pipeline audit --lake /lake --no-log
    headrace pipeline audit orders --lake /lake --http 127.0.0.1:8121 --json
    """
    http, data_dir, no_log = (given.values[name] for name in ("url", "data_dir", "no_log"))
    options.only_one(http=bool(http), data_dir=bool(data_dir), no_log=no_log)
    keywords = given.keywords(AuditOptions)
    if no_log and not keywords["lake"]:
        raise UsageError(
            "--no-log needs a lake: give --lake DIR, or set lake in [pipeline] of --config"
        )
    settings = options.SettingsFlags(data_dir=data_dir, config_file=given.config_file)
    directory = settings.load().config.data_dir
    # A data directory is preferred: it shows more than a server, which does not expose its journal. A
    # directory that the user names must exist.
    has_directory = not http and bool(no_log or data_dir or directory.exists())
    server = given.server(has_directory)
    if not (http or has_directory):
        text = f"there is no directory {directory} here: reading the log from {server['url']}"
        typer.echo(f"headrace: {text}", err=True)
    keywords |= {"data_dir": directory if has_directory and not no_log else "", **server}
    report = _run("audit", keywords)
    if given.as_json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    else:
        for line in report.lines():
            typer.echo(line)
    raise typer.Exit(1 if report.lost else 0)
