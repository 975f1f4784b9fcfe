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


def state(name: str, text: str, words: Mapping[Any, str], *labels: str) -> Metric:
    """One series for each thing: its word is the last label, its value is 1.

    ``words``: by the labels before the last one; by ``()`` where there are none. When the word
    changes, the series of the old word ends and that of the new one begins, so that a thing costs
    one series however many words there are.
    """
    now = {((key,) if isinstance(key, str) else key) + (word,): 1.0 for key, word in words.items()}
    return gauge(name, text, now, *labels)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    for key, value in values.items() if isinstance(values, Mapping) else [((), values)]:
        family.add_metric([key] if isinstance(key, str) else key, value)
    return family
