"""Write docs/metrics.md from an agent that has as much to say as one can."""

import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client.core import Metric

sys.path.insert(0, str(Path(__file__).parents[1]))

from nodeagent.api import figures
from tests.testbed import census

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "metrics.md"

HEAD = """\
# Metrics

`admin.metrics` (`http://127.0.0.1:9470/metrics`) has every series below; [security.md](security.md)
says how Prometheus gets there. Alert rules are in `deploy/alerts`; [runbook.md](runbook.md) has an
entry for each. `deploy/dashboards` has two Grafana dashboards, of one node and of all
([deploy.md](deploy.md#dashboards)).

The column *series* counts them on a node with {datasets} datasets, {images} images,
{volumes} volumes, findings in each room, and a cluster: {total} in all. A test allows no more
than {most}; a node that tells how busy its GPUs are has two more. Each dataset costs {each} of
them; images, volumes, files and pods cost none. For what one of these is like, see
`nodeagent status` or [the API](cli.md).

## How to read them

* **A state is a label.** `nodeagent_cache_state{{dataset="coco",state="filling"}} 1` says that coco
  is being filled. There is one series for each dataset, with the state of now; when the state
  changes, that series ends and another begins. So `nodeagent_cache_state{{state="failed"}}` asks
  for a state, and `count by (state) (nodeagent_cache_state)` counts. There is no series with value
  0 for the other states: with ten datasets they were a third of all series. The same holds for
  {states}.
* **No finding, no series.** {findings}
  have a series only for what finds something now.
  `sum(nodeagent_findings{{severity="critical"}}) or vector(0)` gives the 0.
* **Unknown is absent.** A time or a size that is not known has no series; it is never 0.
* Names end with their unit; counters end with `_total` and begin at 0 with each start of the agent.
  Times are Unix times in seconds (`_timestamp_seconds`). What is 1 or 0 is named as a fact.

`scripts/metrics_doc.py` makes this page from the code; a test checks that it is current.
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
_UNITS = {"bytes": "bytes", "seconds": "seconds", "fds": "files"}


def families() -> list[Metric]:
    """Everything that ``/metrics`` shows of the agent in ``tests/testbed/census.py``."""
    with tempfile.TemporaryDirectory() as folder:
        agent = census.agent(Path(folder), with_gpus=True)
        return list(figures.registry(agent.state).collect())


def unit(family: Metric) -> str:
    words = family.name.removesuffix("_total").split("_")
    if words[-2:] == ["timestamp", "seconds"] or family.name == "process_start_time_seconds":
        return "Unix time"
    return _UNITS.get(words[-1], "")


def is_state(family: Metric) -> bool:
    return "as a label; the value is 1" in family.documentation


def labels(family: Metric) -> str:
    """Each label, with its values where they are few and do not depend on the settings."""
    found = []
    for name in dict.fromkeys(label for each in family.samples for label in each.labels):
        values = sorted({each.labels[name] for each in family.samples})
        listed = name in ("kind", "part", "what", "how", "reason", "fate", "source", "component")
        listed = listed and len(values) <= MOST_VALUES
        found.append(f"`{name}`" + (f" ({', '.join(values)})" if listed else ""))
    return ", ".join(found)


def row(family: Metric) -> str:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    meaning = re.sub(r"\s+", " ", family.documentation).replace("|", "\\|")
    cells = (f"`{name}`", family.type, unit(family), labels(family), len(family.samples), meaning)
    return f"| {' | '.join(map(str, cells))} |"


def sections(found: Iterable[Metric]) -> Iterator[str]:
    grouped: dict[str, list[Metric]] = {title: [] for title in TITLES}
    for family in found:
        begins = [each for each in TITLES if family.name.startswith(f"{each}_")]
        grouped[max(begins, key=len, default="process")].append(family)
    for begin, its in grouped.items():
        yield f"## {TITLES[begin]}\n"
        yield "| series | type | unit | labels | series | meaning |"
        yield "| --- | --- | --- | --- | ---: | --- |"
        yield from (row(each) for each in sorted(its, key=lambda family: family.name))
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
        most=MOST_SERIES,
        each=of_a_dataset,
        states=", ".join(
            f"`{f.name}`" for f in found if is_state(f) and "cache_state" not in f.name
        ),
        findings=", ".join(f"`{f.name}`" for f in found if f.name.endswith("findings")),
    )
    return "\n".join([head, *sections(found)]).rstrip("\n") + "\n"


if __name__ == "__main__":
    TARGET.write_text(document())
