"""Metrics for Prometheus: what :mod:`refimpl.server.engine_counts` counted, under vLLM's names.

They stand in a registry of their own: nothing global of ``prometheus_client`` is touched, and several servers may be in one
process. Figures are put into Prometheus's form when they are scraped, not in the engine's steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from refimpl.server.engine_counts import EngineCounts, Labels, Snapshot
from refimpl.server.metric_names import METRICS, MetricName

if TYPE_CHECKING:
    from refimpl.engine import Engine

OWN_PREFIX, VLLM_PREFIX = "refimpl:", "vllm:"
LABELS = ("model_name", "engine")


class ServerMetrics(Collector):
    """The metrics of a server: those of each engine that it is told to watch.

    Args:
        model_name: the label ``model_name`` of every sample: the name under which the model is served.
        vllm_names: expose what vLLM has under ``vllm:`` too, for dashboards made for it.

    Example:
        >>> from refimpl import LLM, SamplingParams
        >>> with LLM("tiny") as llm:
        ...     metrics = ServerMetrics("tiny")
        ...     metrics.watch(llm.engine)
        ...     output = llm.generate("Hello", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        ...     text = metrics.render().decode()
        >>> 'refimpl:generation_tokens_total{engine="0",model_name="tiny"} 4.0' in text
        True

    """

    content_type = CONTENT_TYPE_LATEST
    """Of what :meth:`render` returns."""

    def __init__(self, model_name: str, vllm_names: bool = False) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._prefixes = (OWN_PREFIX, VLLM_PREFIX) if vllm_names else (OWN_PREFIX,)
        self._engines: dict[str, EngineCounts] = {}
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def watch(self, engine: Engine, label: str = "0") -> None:
        """Count what an engine does from now on; ``label`` is the label ``engine`` of its samples: a replica's number."""
        if label in self._engines:
            self._engines[label].unsubscribe()
        self._engines[label] = EngineCounts(engine)

    def close(self) -> None:
        """Follow the engines no further. What was counted stays."""
        for counts in self._engines.values():
            counts.unsubscribe()

    def render(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are not checked against other collectors."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """All metrics, for the registry."""
        snapshots = {label: counts.snapshot() for label, counts in tuple(self._engines.items())}
        for prefix in self._prefixes:
            for metric in METRICS:
                if metric.in_vllm or prefix != VLLM_PREFIX:
                    yield self._family(prefix, metric, snapshots)

    def _family(self, prefix: str, metric: MetricName, snapshots: dict[str, Snapshot]) -> Metric:
        names = (*LABELS, *metric.labels)
        if metric.kind == "histogram":
            histogram = HistogramMetricFamily(prefix + metric.name, metric.text, labels=names)
            for label, snapshot in snapshots.items():
                bounds, counts, total = snapshot.histograms[metric.name]
                buckets = [
                    (_bound(bound), float(count)) for bound, count in zip((*bounds, float("inf")), counts, strict=True)
                ]
                histogram.add_metric(self._labels(label), buckets, total)
            return histogram
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(prefix + metric.name, metric.text, labels=names)
        for label, snapshot in snapshots.items():
            for more, value in snapshot.values[metric.name].items():
                family.add_metric(self._labels(label, more), value)
        return family

    def _labels(self, engine: str, more: Labels = ()) -> list[str]:
        return [self._model_name, engine, *more]


def _bound(value: float) -> str:
    """A bucket's label, as Prometheus's own clients write it."""
    return "+Inf" if value == float("inf") else str(float(value))
