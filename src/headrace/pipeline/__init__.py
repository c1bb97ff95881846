"""Jobs between the log and a lake, on Spark: needs the extra `pipeline`. The same as `headrace pipeline`."""

from headrace.pipeline.aggregate import Summary as AggregateSummary
from headrace.pipeline.aggregate import aggregate
from headrace.pipeline.aggregate_stream import aggregate_stream
from headrace.pipeline.audit import audit
from headrace.pipeline.audit_plan import AuditReport
from headrace.pipeline.compact import Summary as CompactSummary
from headrace.pipeline.compact import compact
from headrace.pipeline.dedupe import Summary as DedupeSummary
from headrace.pipeline.dedupe import dedupe
from headrace.pipeline.export import Summary as ExportSummary
from headrace.pipeline.export import export
from headrace.pipeline.replay import Summary as ReplaySummary
from headrace.pipeline.replay import replay
from headrace.pipeline.report import Summary as ReportSummary
from headrace.pipeline.report import report

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
