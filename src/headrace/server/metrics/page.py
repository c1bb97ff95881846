"""Prints the page about metrics, `docs/metrics.md`, from their declarations: `make docs` calls it."""

from collections.abc import Iterator

from headrace.server.metrics.declarations import (
    APPLIER,
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    LABELLED_COUNTERS,
    LABELLED_GAUGES,
    LIMITED_GAUGES,
    PREFIX,
    PROCESS,
)

_INTRODUCTION = """\
# Metrics

`GET /metrics` on the HTTP listener, for Prometheus. The answer has the format that the request asks for:
OpenMetrics, or the older text format. `make docs` writes this page from `server/metrics/declarations.py`.

[`deploy/grafana/headrace.json`](../deploy/grafana/headrace.json) is a dashboard with these metrics, and
[`deploy/prometheus/alerts.yaml`](../deploy/prometheus/alerts.yaml) has alert rules, each with what to do.
[Operating](operating.md#health-and-metrics) says what counting costs.

The number of series is limited, whatever clients do. All counters begin at 0 when the server starts.
In OpenMetrics `headrace_connections_total` has the type `unknown`, because there is a gauge
`headrace_connections`."""


def page() -> str:
    """Return the page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _INTRODUCTION
    counters = [(name, text, "") for name, text in COUNTERS.items()]
    counters += [(name, one.help, _labels(one.labels)) for name, one in LABELLED_COUNTERS.items()]
    yield from _table("Counters", counters)
    gauges = [(name, text, "") for name, text in GAUGES.items()]
    gauges += [(name, one.help, _labels(one.labels)) for name, one in LABELLED_GAUGES.items()]
    gauges += [
        (name, one.help, f"`{one.label}`: {one.limit}") for name, one in LIMITED_GAUGES.items()
    ]
    yield from _table("Gauges", gauges)
    yield "\n## Histograms\n"
    yield "Each has `_bucket` with the label `le`, `_sum` and `_count`.\n"
    yield "| name | meaning | upper bounds of the buckets |\n|---|---|---|"
    for name, one in HISTOGRAMS.items():
        bounds = ", ".join(f"{bound:g}" if bound < 1 else f"{bound:,g}" for bound in one.bounds)
        yield f"| `{PREFIX}{name}` | {one.help} | {bounds} |"
    yield "\n## Processes\n"
    yield (
        "On Linux. The applier process, which writes segments, has the same metrics with the prefix "
        f"`{APPLIER}_`.\n"
    )
    yield "| name | meaning |\n|---|---|"
    for name, text in PROCESS.items():
        yield f"| `{name}` | {text} |"


def _table(title: str, rows: list[tuple[str, str, str]]) -> Iterator[str]:
    yield f"\n## {title}\n"
    yield "| name | meaning | labels |\n|---|---|---|"
    for name, text, labels in rows:
        yield f"| `{PREFIX}{name}` | {text} | {labels} |"


def _labels(labels: dict[str, tuple[str, ...]]) -> str:
    return "; ".join(
        f"`{label}`: {', '.join(f'`{value}`' for value in values)}"
        for label, values in labels.items()
    )


if __name__ == "__main__":
    print(page(), end="")
