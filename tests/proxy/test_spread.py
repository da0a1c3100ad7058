"""Histograms that are cheap to add to read like prometheus_client's own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from polarq_proxy.metrics import Spread

BOUNDS = (0.005, 0.5, 1, 900)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 1000) | st.sampled_from(BOUNDS)), max_size=20))
def test_a_spread_is_the_histogram_of_the_same_values(values: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    spread = Spread("seconds", "How long.", "dialect", BOUNDS, ours)
    histogram = Histogram("seconds", "How long.", ["dialect"], buckets=BOUNDS, registry=theirs)
    for label, value in values:
        spread.add(label, value)
        histogram.labels(label).observe(value)
    assert _lines(ours) == _lines(theirs)


def _lines(registry: CollectorRegistry) -> list[str]:
    page = generate_latest(registry).decode()
    return [line for line in page.splitlines() if "_created" not in line]
