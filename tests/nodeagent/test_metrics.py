"""The series of a node: how many, how they are called, and that docs/metrics.md has them."""

import subprocess
from pathlib import Path
from types import ModuleType

import prometheus_client
import pytest
from prometheus_client.core import Metric

from kit.metrics import state
from nodeagent.api import figures
from tests.testbed import census, scripts

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made() -> ModuleType:
    return scripts.load("metrics_doc")


@pytest.fixture
def registry(tmp_path: Path) -> prometheus_client.CollectorRegistry:
    return figures.registry(census.agent(tmp_path).state)


@pytest.fixture
def families(registry: prometheus_client.CollectorRegistry) -> list[Metric]:
    return list(registry.collect())


def test_a_full_node_has_at_most_320_series(made: ModuleType, families: list[Metric]) -> None:
    assert made.MOST_SERIES == 320
    counts = {family.name: len(family.samples) for family in families}
    assert sum(counts.values()) <= made.MOST_SERIES, counts


def test_a_gpu_node_has_two_more(made: ModuleType, families: list[Metric], tmp_path: Path) -> None:
    more = list(figures.registry(census.agent(tmp_path / "gpus", with_gpus=True).state).collect())
    there = {family.name for family in families}
    assert {f.name: len(f.samples) for f in more if f.name not in there} == dict.fromkeys(
        made.OF_GPUS, 1
    )


def test_every_family_is_counted(families: list[Metric]) -> None:
    """One without a sample in the census would be missing in the count and in the document."""
    assert [family.name for family in families if not family.samples] == []
    assert len({family.name for family in families}) == len(families)


def test_images_volumes_and_files_cost_no_series(families: list[Metric]) -> None:
    values = {value for f in families for each in f.samples for value in each.labels.values()}
    assert "dataset-00" in values
    assert not [value for value in values if "image-" in value or "rbd0" in value or "/" in value]
    datasets = [each.labels["dataset"] for f in families for each in f.samples
                if "dataset" in each.labels]  # fmt: skip
    assert len(datasets) == 10 * census.DATASETS


def test_names_and_labels_are_what_prometheus_asks_for(
    registry: prometheus_client.CollectorRegistry, families: list[Metric]
) -> None:
    shown = prometheus_client.generate_latest(registry)
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=shown, capture_output=True, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")
    for family in families:
        assert family.documentation.strip().endswith(".") or not family.name.startswith("nodeagent")
        assert len({frozenset(each.labels) for each in family.samples}) == 1, family.name
        if "timestamp" in family.name:
            assert family.name.endswith("_timestamp_seconds")


def test_a_state_is_one_series_whatever_it_is() -> None:
    for word in ("filling", "complete"):
        family = state("x", "Its state.", {"coco": word}, "dataset", "state")
        (sample,) = family.samples
        assert (sample.labels, sample.value) == ({"dataset": "coco", "state": word}, 1.0)
    (sample,) = state("x", "Its state.", {(): "down"}, "state").samples
    assert (sample.labels, sample.value) == ({"state": "down"}, 1.0)


def test_document_is_current(made: ModuleType, families: list[Metric]) -> None:
    document = (ROOT / "docs" / "metrics.md").read_text()
    assert document == made.document(), "run scripts/metrics_doc.py"
    for family in families:
        assert f"`{family.name}" in document
