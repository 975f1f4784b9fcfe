"""Settings: what is refused, and what they mean on a node."""

from pathlib import Path
from typing import Any

import pydantic
import pytest

import kit.errors
from nodeagent import configfile
from preheat import settings
from preheat.settings import PreheatSettings


def test_settings_dump_to_themselves(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "preheat:\n"
        "  runtime: containerd\n"
        "  socket: /run/containerd/containerd.sock\n"
        "  pin_budget: 200GiB\n"
        "  retain: {for: 24h}\n"
        "  images:\n"
        "    - {ref: reg.example/fw/torch:v1, pin: always, priority: 10}\n"
        "    - {ref: reg.example/fw/jax:v1, pin: {for: 72h}}\n"
        "    - {ref: reg.example/fw/tmp:v1, pin: never}\n"
    )
    loaded: Any = configfile.load(file)
    file.write_text(configfile.dump(loaded))

    assert configfile.load(file) == loaded
    assert loaded.preheat.pin_budget == 200 * 1024**3


@pytest.mark.parametrize(
    "wrong",
    [
        {"images": [{"ref": "ubuntu"}]},
        {"images": [{"ref": "r.e/a:b"}, {"ref": "r.e/a:b"}]},
        {"images": [{"ref": "r.e/a:b", "pin": "sometimes"}]},
        {"windows": ["25:00-01:00"]},
        {"runtime": "crio", "bytes_per_second": "1MiB"},
        {"platform": "amd64"},
        {"credentials": {"provider_dir": "/x"}},
        {"kubelet": {"gc_high": "70%", "gc_low": "80%"}},
        {"socket": "relative.sock"},
        {"partial_keep": "4h", "attempt_timeout": "4h"},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError):
        PreheatSettings.model_validate(wrong)


def test_windows_may_cross_midnight() -> None:
    windows = ("22:00-06:00",)
    assert settings.in_window(windows, 23 * 60)
    assert settings.in_window(windows, 5 * 60)
    assert not settings.in_window(windows, 6 * 60)
    assert not settings.in_window(windows, 12 * 60)
    assert settings.in_window((), 0)


def test_complete_fills_in_the_node() -> None:
    empty = settings.complete(PreheatSettings())
    given = PreheatSettings(platform="linux/arm64", node="n1")

    assert empty.platform.startswith("linux/")
    assert empty.node
    assert settings.complete(given) == given


def test_turns_spread_nodes_evenly() -> None:
    """Each second of the spread has its share of 7,500 nodes; each node keeps its own turn."""

    def turn(number: int) -> float:
        return settings.turn(PreheatSettings(node=f"node{number}", spread=300.0), "r.e/a:b")

    turns = [turn(n) for n in range(7500)]
    per_second = [0] * 300
    for each in turns:
        per_second[int(each)] += 1
    assert max(per_second) < 60  # 25 on average; all at once would be 7,500
    assert turn(1) == turns[1]


def test_thresholds_come_from_the_kubelets_file(tmp_path: Path) -> None:
    file = tmp_path / "kubelet.yaml"
    file.write_text(
        "imageGCHighThresholdPercent: 70\nimageGCLowThresholdPercent: 60\n"
        'evictionHard: {imagefs.available: "20%"}\n'
    )
    found = settings.thresholds(settings.KubeletSettings(config=file))
    assert (found.gc_high, found.gc_low, found.eviction_free) == (0.7, 0.6, 0.2)


def test_thresholds_refuse_an_unusable_file(tmp_path: Path) -> None:
    file = tmp_path / "kubelet.yaml"
    file.write_text("- a list")
    with pytest.raises(kit.errors.SettingsError):
        settings.thresholds(settings.KubeletSettings(config=file))
