"""The cache's metrics."""

from pathlib import Path

import cache.component
import cache.settings
import kit.findings


class Nobody:
    def report(self, origin: str, findings: list[kit.findings.Finding]) -> None:
        pass


def test_metrics_have_fixed_labels(tmp_path: Path) -> None:
    settings = cache.settings.CacheSettings(store=tmp_path / "store", views=tmp_path / "views")
    component = cache.component.Cache(settings, state_dir=tmp_path, reporter=Nobody())
    families = list(component.metrics())
    assert families
    allowed = {"dataset", "kind", "state", "stage", "result"}
    for family in families:
        assert family.name.startswith("nodeagent_")
        assert family.documentation
        for sample in family.samples:
            assert set(sample.labels) <= allowed
