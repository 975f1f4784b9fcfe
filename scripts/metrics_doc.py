"""Write docs/metrics.md from an agent that has as much to say as one can."""

import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pages
from prometheus_client.core import Metric

sys.path.insert(0, str(Path(__file__).parents[1]))

from nodeagent.api import figures
from tests.testbed import census

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "metrics.md"

HEAD = """\
# Metrics

The agent serves these metrics at `admin.metrics`: `http://127.0.0.1:9470/metrics`.
[monitoring.md](monitoring.md) connects Prometheus, alerts and dashboards. [runbook.md](runbook.md)
explains each alert.

## How to read them

* Names that end in `_total` are counters. Most start at 0 when the agent starts; those of the
  kernel (`guard_checks`, `io_stalled`) do not. All other
  metrics are gauges.
* The name ends with the unit. Times (`_timestamp_seconds`) are Unix times.
* **A state is a label.** `nodeagent_cache_state{{dataset="coco",state="filling"}} 1` means that
  coco is being filled. Each dataset has one series, for its current state. The other states have
  no series. Count with `count by (state) (nodeagent_cache_state)`. {states} work the
  same.
* **No finding, no series.** This is true for {findings}. To get 0 instead of no result, write
  `sum(nodeagent_findings{{severity="critical"}}) or vector(0)`.
* **Unknown means no series.** An unknown time is never 0.

## How many series a node has

A node with {datasets} datasets in a cluster has about {total} series. Each dataset adds {each}.
GPUs add two. Images, volumes, files and pods add none.

The parentheses after a name hold its labels.
"""

# Of labels whose values lie in the code: shown when there are no more than so many.
MOST_VALUES = 6
MOST_SERIES = 320  # of the node that census.py makes
OF_GPUS = ("nodeagent_gpus", "nodeagent_gpu_busy_ratio")  # counted apart: few nodes have them
TITLES = {
    "nodeagent_cache": "Cache",
    "nodeagent_csi": "Volumes of pods (CSI)",
    "nodeagent_preheat": "Images",
    "nodeagent_volumes": "Volumes: the guard",
    "nodeagent_volume": "Volumes: the audit",
    "nodeagent_cluster": "The cluster",
    "nodeagent": "The agent",
    "process": "The process",
}


def families() -> list[Metric]:
    """Everything that ``/metrics`` shows of the agent in ``tests/testbed/census.py``."""
    with tempfile.TemporaryDirectory() as folder:
        agent = census.agent(Path(folder), with_gpus=True)
        return list(figures.registry(agent.state).collect())


def is_state(family: Metric) -> bool:
    return "as a label; the value is 1" in family.documentation


def labels(family: Metric) -> str:
    """Each label, with its values where they are few and do not depend on the settings."""
    found = []
    for name in dict.fromkeys(label for each in family.samples for label in each.labels):
        values = sorted({each.labels[name] for each in family.samples})
        listed = name in ("kind", "part", "what", "how", "reason", "fate", "source", "component")
        listed = listed and len(values) <= MOST_VALUES
        found.append(f"`{name}={'|'.join(values)}`" if listed else f"`{name}`")
    return ", ".join(found)


def item(family: Metric) -> str:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return pages.item(name, labels(family), family.documentation)


def sections(found: Iterable[Metric]) -> Iterator[str]:
    grouped: dict[str, list[Metric]] = {title: [] for title in TITLES}
    for family in found:
        begins = [each for each in TITLES if family.name.startswith(f"{each}_")]
        grouped[max(begins, key=len, default="process")].append(family)
    for begin, its in grouped.items():
        yield f"## {TITLES[begin]}\n"
        its.sort(key=lambda family: family.name)
        if begin == "process":  # not ours: every Python program has them
            named = ", ".join(f"`{each.name}{'_total' * (each.type == 'counter')}`" for each in its)
            yield pages.wrapped(f"The usual metrics of a Python program: {named}.")
        else:
            yield from (item(each) for each in its)
        yield ""


def document() -> str:
    """The whole page."""
    found = families()
    of_a_dataset = sum(
        each.labels.get("dataset") == "dataset-00" for f in found for each in f.samples
    )
    head = HEAD.format(
        datasets=census.DATASETS,
        images=census.IMAGES,
        volumes=census.VOLUMES,
        total=sum(len(family.samples) for family in found if family.name not in OF_GPUS),
        each=of_a_dataset,
        states=", ".join(
            f"`{f.name}`" for f in found if is_state(f) and "cache_state" not in f.name
        ),
        findings=", ".join(f"`{f.name}`" for f in found if f.name.endswith("findings")),
    )
    return "\n".join([pages.reflowed(head), *sections(found)]).rstrip("\n") + "\n"


if __name__ == "__main__":
    TARGET.write_text(document())
