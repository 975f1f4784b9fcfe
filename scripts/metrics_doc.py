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

The agent serves these metrics at `http://127.0.0.1:9470/metrics` (`admin.metrics`).
The parentheses after a metric's name hold its labels.

## How to read them

* **A state is a label.** The series of the current state has the value 1. Other states have no
  series. To count datasets by state, write `count by (state) (nodeagent_cache_state)`.
  The values of `nodeagent_preheat_images` are numbers of images.
* **If there is no finding, there is no series.** Many unknown values have no series either. To get
  0, write
  `sum(nodeagent_findings{{severity="critical"}}) or vector(0)`.

## How many series a node has

A node with {datasets} datasets has about {total} series. Each dataset adds up to {each} series.
GPUs add two.
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
            yield pages.wrapped(f"The usual Python metrics: {named}.")
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
        total=sum(len(family.samples) for family in found if family.name not in OF_GPUS),
        each=of_a_dataset,
    )
    return "\n".join([pages.reflowed(head), *sections(found)]).rstrip("\n") + "\n"


if __name__ == "__main__":
    TARGET.write_text(document())
