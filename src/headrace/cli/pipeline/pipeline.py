"""`headrace pipeline`: jobs between the log and a lake, one file each. Elsewhere: the jobs (`pipeline/`)."""

import typer

from headrace.cli.common.help import App
from headrace.cli.pipeline import aggregate as pipeline_aggregate
from headrace.cli.pipeline import audit as pipeline_audit
from headrace.cli.pipeline import compact as pipeline_compact
from headrace.cli.pipeline import dedupe as pipeline_dedupe
from headrace.cli.pipeline import export as pipeline_export
from headrace.cli.pipeline import replay as pipeline_replay
from headrace.cli.pipeline import report as pipeline_report

app = App()

app.command("export")(pipeline_export.export)
app.command("aggregate", short_help="Fold all records of each topic into one state.")(
    pipeline_aggregate.aggregate
)
app.command("compact", short_help="Make few large files of many small ones.")(
    pipeline_compact.compact
)
app.command("dedupe", short_help="Copy rows without those whose key came before.")(
    pipeline_dedupe.dedupe
)
app.command("replay", short_help="Publish what a lake has of a topic.")(pipeline_replay.replay)
app.command("report", short_help="Draw what the log has seen.")(pipeline_report.report)
app.command("audit")(pipeline_audit.audit)


@app.callback(invoke_without_command=True)
def _jobs(context: typer.Context) -> None:
    """Run a job between the log and a lake, on Spark.

    Needs `pip install 'headrace[pipeline]'` and Java 17 or newer.

    \b
    headrace pipeline export --lake /lake --once     what the log has, into a table
    headrace pipeline compact --lake /lake           its small files into large ones
    headrace pipeline dedupe --lake /lake --into /rows --json-path '$.id'     every key once
    headrace pipeline replay orders --to test --lake /lake     back from it into a topic
    headrace pipeline report --out report.html       a page with plots of what the log has seen
    headrace pipeline aggregate --lake /lake --reducer last --into /states     a state for each topic
    headrace pipeline audit --lake /lake             whether anything was lost
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
