"""Jobs between the log and a lake, on Spark: needs the extra `pipeline`. The same as `headrace pipeline`."""

from headrace.pipeline.aggregate.job import AggregateSummary, aggregate
from headrace.pipeline.aggregate.stream import aggregate_stream
from headrace.pipeline.audit.job import audit
from headrace.pipeline.audit.plan import AuditReport
from headrace.pipeline.compact import CompactSummary, compact
from headrace.pipeline.dedupe.job import DedupeSummary, dedupe
from headrace.pipeline.export.job import ExportSummary, export
from headrace.pipeline.replay import ReplaySummary, replay
from headrace.pipeline.report.job import ReportSummary, report

__all__ = [
    "AggregateSummary",
    "AuditReport",
    "CompactSummary",
    "DedupeSummary",
    "ExportSummary",
    "ReplaySummary",
    "ReportSummary",
    "aggregate",
    "aggregate_stream",
    "audit",
    "compact",
    "dedupe",
    "export",
    "replay",
    "report",
]
