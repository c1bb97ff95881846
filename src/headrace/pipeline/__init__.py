"""Jobs between the log and a lake, on Spark: needs the extra `pipeline`. The same as `headrace pipeline`."""

from headrace.pipeline.aggregate.job import AggregateSummary as AggregateSummary
from headrace.pipeline.aggregate.job import aggregate
from headrace.pipeline.aggregate.stream import aggregate_stream
from headrace.pipeline.audit.job import audit
from headrace.pipeline.audit.plan import AuditReport
from headrace.pipeline.compact.job import CompactSummary as CompactSummary
from headrace.pipeline.compact.job import compact
from headrace.pipeline.dedupe.job import DedupeSummary as DedupeSummary
from headrace.pipeline.dedupe.job import dedupe
from headrace.pipeline.export.job import ExportSummary as ExportSummary
from headrace.pipeline.export.job import export
from headrace.pipeline.replay.job import ReplaySummary as ReplaySummary
from headrace.pipeline.replay.job import replay
from headrace.pipeline.report.job import ReportSummary as ReportSummary
from headrace.pipeline.report.job import report

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
