"""What Prometheus is told of a node's proxy. Served on the admin side only: names of models are nobody else's."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from polarq_proxy.counters import Counters
from polarq_proxy.endpoints import Fleet

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 900)
_OWN_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2)


class Spread(Collector):
    """A histogram that is added to at each call: prometheus_client's own takes a lock for each of its numbers, because
    other programs have threads."""

    def __init__(self, name: str, text: str, label: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        self._name, self._text, self._label = name, text, label
        self._bounds = bounds
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}
        registry.register(self)

    def add(self, label: str, seconds: float) -> None:
        counts = self._counts.get(label)
        if counts is None:
            counts = self._counts[label] = [0] * (len(self._bounds) + 1)
            self._sums[label] = 0.0
        counts[bisect_left(self._bounds, seconds)] += 1
        self._sums[label] += seconds

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label])
        for label, counts in self._counts.items():
            bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
            family.add_metric([label], list(zip(bounds, accumulate(counts), strict=True)), self._sums[label])
        return [family]


class Times:
    """How long calls take, in seconds: as harnesses see it, at the engine, and in the proxy itself."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._first_byte = Spread(
            "polarq_proxy_first_byte_seconds",
            "From a streamed request to the first of what was sampled.",
            "dialect",
            _SECONDS,
            registry,
        )
        self._total = Spread(
            "polarq_proxy_call_seconds", "From a request to its recorded answer.", "dialect", _SECONDS, registry
        )
        self._engine = Spread(
            "polarq_proxy_engine_seconds", "What of a call the engine took.", "engine", _SECONDS, registry
        )
        self._own = Spread(
            "polarq_proxy_own_seconds",
            "What of a call neither the engine took nor a pause, a pace or a full engine held back.",
            "dialect",
            _OWN_SECONDS,
            registry,
        )

    def first_byte(self, dialect: str, seconds: float) -> None:
        self._first_byte.add(dialect, seconds)

    def ended(self, dialect: str, engine: str, *, total_s: float, engine_s: float, held_s: float) -> None:
        self._total.add(dialect, total_s)
        self._engine.add(engine, engine_s)
        self._own.add(dialect, max(0.0, total_s - engine_s - held_s))


class Metrics:
    """`page` is the text of /metrics."""

    def __init__(self, counters: Counters, fleet: Fleet, gauges: Callable[[], Mapping[str, float]]) -> None:
        self._registry = CollectorRegistry()
        self.times = Times(self._registry)
        self._registry.register(_State(counters, fleet, gauges))

    def page(self) -> bytes:
        return generate_latest(self._registry)


class _State(Collector):
    """What the proxy counts anyway, read when it is asked for."""

    def __init__(self, counters: Counters, fleet: Fleet, gauges: Callable[[], Mapping[str, float]]) -> None:
        self._counters = counters
        self._fleet = fleet
        self._gauges = gauges

    def collect(self) -> Iterable[Metric]:
        counters = self._counters
        plain = {
            "calls": (counters.calls, "Model calls that were recorded."),
            "sampled_tokens": (counters.sampled_tokens, "Tokens sampled in recorded calls."),
            "prompt_tokens": (counters.prompt_tokens, "Prompt tokens of recorded calls."),
            "replays": (counters.replays, "Calls answered without sampling, because they repeated one."),
            "aborted": (counters.aborted, "Calls that ended before their answer did."),
            "continued": (counters.continued, "Calls that were cut while they were sampled and went on from there."),
            "breaks": (counters.breaks, "Calls that go on from an earlier one without starting with its tokens."),
            "forged_control_tokens": (counters.forged, "Control tokens that messages' own text brought into prompts."),
        }
        for name, (value, text) in plain.items():
            yield CounterMetricFamily(f"polarq_proxy_{name}", text, value=value)
        yield _labelled("errors", "Calls that were not answered.", "kind", counters.errors)
        yield _labelled("untrainable", "Recorded calls that cannot be trained on.", "reason", counters.untrainable_by)
        yield _labelled("exact", "How prompts were made in exact mode, or why not.", "outcome", counters.exact)
        yield _labelled("side_calls", "Recorded calls beside the task.", "kind", counters.side)
        for name, level in self._gauges().items():
            yield GaugeMetricFamily(f"polarq_proxy_{name}", _GAUGES[name], value=level)
        yield self._endpoints("up", "Whether an inference server answers.", lambda e: e.state.reachable is True)
        yield self._endpoints("gives_ids", "Whether it gives token ids.", lambda e: e.state.gives_ids is True)
        yield self._endpoints("in_flight", "Model calls at an inference server.", lambda e: e.in_flight)

    def _endpoints(self, name: str, text: str, read: Callable[..., float]) -> Metric:
        family = GaugeMetricFamily(f"polarq_proxy_engine_{name}", text, labels=["url", "engine", "model"])
        for endpoint in self._fleet.endpoints:
            family.add_metric([endpoint.spec.base_url, endpoint.engine.name, endpoint.model], float(read(endpoint)))
        return family


_GAUGES = {
    "in_flight": "Model calls under way.",
    "sessions": "Rollouts that this proxy remembers.",
    "paused": "Whether model calls are held back.",
    "held_back": "Model calls that wait for the end of a pause.",
}


def _labelled(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"polarq_proxy_{name}", text, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([str(value)], count)
    return family
