"""The text format of metrics, read with Prometheus' own parser."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from plait.runtime.server.ops.prometheus import Histogram, Metric, to_prometheus_text

VALUES = st.floats(0, 1e9, allow_nan=False)


def samples(metrics):
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(to_prometheus_text(metrics))
        for sample in family.samples
    }


@given(st.dictionaries(st.text(max_size=10), VALUES, max_size=4), st.text(max_size=20))
def test_values_and_labels_round_trip(values, text) -> None:
    metric = Metric("gauge", "a:b_c", text, ("label",))
    for label, value in values.items():
        metric.set(value, label)
    read = samples([metric])
    expected = {("a:b_c", (("label", label),)): value for label, value in values.items()}
    assert read == expected


@given(
    st.lists(st.tuples(VALUES, st.integers(1, 5)), max_size=20), st.lists(VALUES, min_size=1, max_size=6, unique=True)
)
def test_buckets_count_observations_at_or_below_their_bound(observed, bounds) -> None:
    histogram = Histogram("h", "", sorted(bounds))
    for value, times in observed:
        histogram.observe(value, times=times)
    read = samples([histogram])
    total = sum(times for _, times in observed)
    for bound in bounds:
        (count,) = [v for (name, labels), v in read.items() if name == "h_bucket" and float(labels[0][1]) == bound]
        assert count == sum(times for value, times in observed if value <= bound)
    assert read["h_bucket", (("le", "+Inf"),)] == read["h_count", ()] == total
    assert abs(read["h_sum", ()] - sum(value * times for value, times in observed)) <= 1e-6 * max(1, read["h_sum", ()])
