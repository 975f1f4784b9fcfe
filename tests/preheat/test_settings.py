"""Settings: what is refused, and what they mean on a node."""

from pathlib import Path
from typing import Any

import pydantic
import pytest

from nodeagent import configfile
from preheat import settings
from preheat.settings import PreheatSettings


def test_settings_dump_to_themselves(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "preheat:\n"
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
        {"platform": "amd64"},
        {"credentials": {"provider_dir": "/x"}},
        {"socket": "relative.sock"},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError):
        PreheatSettings.model_validate(wrong)


def test_complete_fills_in_the_platform() -> None:
    empty = settings.complete(PreheatSettings())
    given = PreheatSettings(platform="linux/arm64")

    assert empty.platform.startswith("linux/")
    assert settings.complete(given) == given
