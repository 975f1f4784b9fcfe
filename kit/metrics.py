"""Metric families from plain values. All names begin with ``nodeagent_``."""

from collections.abc import Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

# A value, or values by label; by a tuple of labels where a family has several.
Values = float | Mapping[Any, float]


def gauge(name: str, text: str, values: Values, *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(f"nodeagent_{name}", text, labels=labels), values)


def counter(name: str, text: str, values: Values, *labels: str) -> Metric:
    return _filled(CounterMetricFamily(f"nodeagent_{name}", text, labels=labels), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    for key, value in values.items() if isinstance(values, Mapping) else [((), values)]:
        family.add_metric([key] if isinstance(key, str) else key, value)
    return family
