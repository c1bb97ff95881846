"""Text of a scrape: the counts of the server, and values that are read at that moment.

The Prometheus client library formats them, as OpenMetrics or as the older text format, as the request asks.
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    UnknownMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from headrace.server.metrics.declarations import (
    APPLIER,
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    LABELLED_COUNTERS,
    LABELLED_GAUGES,
    LIMITED_GAUGES,
    PREFIX,
)
from headrace.server.metrics.metrics import Metrics
from headrace.server.metrics.readings import Instruments, Readings

_OPEN_METRICS = "application/openmetrics-text"


class Scrapes:
    """The answers to `GET /metrics`."""

    def __init__(
        self, metrics: Metrics, instruments: Instruments, applier_pid: Callable[[], int]
    ) -> None:
        self._metrics = metrics
        self._instruments = instruments
        self._processes = (
            ProcessCollector(registry=None),
            ProcessCollector(APPLIER, applier_pid, registry=None),
        )

    async def answer(self, accept: str) -> tuple[bytes, str]:
        """Return the body and the media type of an answer, in the format that the header `accept` prefers."""
        await self._instruments.lags.measure()
        encoder, media_type = choose_encoder(accept)
        registry = CollectorRegistry()
        is_open = media_type.startswith(_OPEN_METRICS)
        self._metrics.fold()
        readings = self._instruments.read()
        registry.register(_Families(self._metrics, readings, is_open_metrics=is_open))
        for process in self._processes:
            registry.register(process)
        return encoder(registry), media_type


class _Families:
    """Implements `Collector` of the library, for one scrape."""

    def __init__(self, metrics: Metrics, readings: Readings, *, is_open_metrics: bool) -> None:
        self._metrics = metrics
        self._readings = readings
        self._is_open_metrics = is_open_metrics

    def collect(self) -> Iterable[Metric]:
        yield from self._counters()
        yield from self._gauges()
        yield from self._histograms()

    def _counters(self) -> Iterator[Metric]:
        for name, help_text in COUNTERS.items():
            value = self._metrics.counts[name]
            if self._is_open_metrics and name.removesuffix("_total") in GAUGES:
                # OpenMetrics has one name for both: only the counter's type gets lost.
                yield UnknownMetricFamily(PREFIX + name, help_text, value)
            else:
                yield CounterMetricFamily(PREFIX + name, help_text, value)
        for name, one in LABELLED_COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, one.help, labels=list(one.labels))
            for labels, value in self._metrics.labelled[name].items():
                counter.add_metric(labels, value)
            yield counter

    def _gauges(self) -> Iterator[Metric]:
        found = self._readings
        for name, help_text in GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, help_text, found.gauges[name])
        for name, one in LABELLED_GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, one.help, labels=list(one.labels))
            for labels, value in found.labelled[name].items():
                gauge.add_metric(labels, value)
            yield gauge
        for name, limited in LIMITED_GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, limited.help, labels=[limited.label])
            for label, value in found.limited[name].items():
                gauge.add_metric([label], value)
            yield gauge

    def _histograms(self) -> Iterator[Metric]:
        for name, one in HISTOGRAMS.items():
            histogram = self._metrics.histograms[name]
            bounds = [*map(str, one.bounds), "+Inf"]
            buckets = list(zip(bounds, histogram.cumulative(), strict=True))
            yield HistogramMetricFamily(PREFIX + name, one.help, buckets, histogram.sum)
