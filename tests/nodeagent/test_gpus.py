"""How busy GPUs are: the real nvidia-ml-py in a real child, over a library that stands in for NVML.

No GPU is here; what a driver's own library does was not tried.
"""

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import kit.errors
import kit.processes
from linux import nvml
from nodeagent import gpus
from tests.testbed import waiting

SOURCE = Path(__file__).with_name("nvml.c")


class Driver:
    """What the library says."""

    def __init__(self, folder: Path) -> None:
        self.file, self.device = folder / "says", folder / "nvidiactl"
        self.device.touch()
        self.says("0")

    def says(self, text: str) -> None:
        self.file.with_suffix(".new").write_text(text)
        self.file.with_suffix(".new").rename(self.file)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-Wall", "-o", str(library), str(SOURCE)], check=True
    )
    made = Driver(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("NVML_FILE", str(made.file))
    monkeypatch.setattr(nvml, "DEVICE", made.device)
    monkeypatch.setattr(gpus, "FIRST_PAUSE", 0.0)
    return made


@pytest_asyncio.fixture
async def found() -> AsyncIterator[gpus.Gpus]:
    made = gpus.Gpus()
    yield made
    await made._worker.close()


async def ended() -> None:
    """A child that was given up is gone: until then there is no other."""
    await waiting.until_async(lambda: not kit.processes.hanging(gpus.ABOUT), what="its end")


def figures(found: gpus.Gpus) -> dict[str, float]:
    return {sample.name: sample.value for f in found.metrics() for sample in f.samples}


async def test_what_the_gpus_tell_is_two_series(driver: Driver, found: gpus.Gpus) -> None:
    driver.says("100 50 -1 0")
    await found.look()
    assert figures(found) == {"nodeagent_gpus": 4, "nodeagent_gpu_busy_ratio": 0.5}
    driver.says("0 0 0 0")
    await found.look()
    assert figures(found)["nodeagent_gpu_busy_ratio"] == 0.25  # of the last minute
    assert found.reason == ""


async def test_looks_that_are_kept_are_bounded(driver: Driver, found: gpus.Gpus) -> None:
    driver.says("100")
    await found.look()
    driver.says("0")
    for _ in range(gpus.KEPT):
        await found.look()
    assert figures(found)["nodeagent_gpu_busy_ratio"] == 0.0


@pytest.mark.parametrize(
    ("says", "reason"),
    [("", "there is none"), ("-1", "no GPU tells"), ("lost", "NVML: Driver Not Loaded")],
)
async def test_no_figures_have_a_reason(
    driver: Driver, found: gpus.Gpus, says: str, reason: str
) -> None:
    driver.says("70")
    await found.look()
    driver.says(says)
    await found.look()
    assert figures(found) == {}
    assert reason in found.reason
    driver.says("70")
    await ended()
    await found.look()  # a new child, where the old one had a driver that is gone
    assert figures(found)["nodeagent_gpu_busy_ratio"] == 0.7


async def test_a_library_that_hangs_stops_nothing_and_is_asked_again_once_it_has_ended(
    driver: Driver, found: gpus.Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.says("70")
    await found.look()
    driver.says("hang")
    monkeypatch.setattr(gpus, "ANSWER_SECONDS", 0.5)
    await found.look()
    assert "no answer within 0.5s" in found.reason
    assert figures(found) == {}
    monkeypatch.setattr(gpus, "ANSWER_SECONDS", 30.0)
    driver.says("30")
    await ended()
    await found.look()
    assert figures(found)["nodeagent_gpu_busy_ratio"] == 0.3


async def test_no_child_is_started_beside_one_that_hangs(
    driver: Driver, found: gpus.Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kit.processes, "hanging", lambda _: 1)
    await found.look()
    assert found._worker.starts == 0


async def test_without_a_driver_or_its_library_there_is_a_plain_reason(
    driver: Driver, found: gpus.Gpus
) -> None:
    (driver.file.parent / "libnvidia-ml.so.1").unlink()
    await found.look()
    assert "NVML" in found.reason
    assert figures(found) == {}
    driver.device.unlink()
    starts = found._worker.starts
    await ended()
    await found.look()
    assert "driver is not loaded here" in found.reason
    assert found._worker.starts == starts  # no child only to find that out


def test_without_the_package_the_reason_is_its_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(kit.errors.HostError, match="nvidia-ml-py"):
        nvml.sample()


def test_stalls_are_read_as_the_kernel_writes_them(tmp_path: Path) -> None:
    file = tmp_path / "io"
    file.write_text(
        "some avg10=3.53 avg60=3.40 avg300=6.64 total=1455612720\n"
        "full avg10=0.00 avg60=0.00 avg300=0.03 total=207989474\n"
    )
    assert gpus.io_stalled(file) == 1455.61272
    file.write_text("nonsense\n")
    assert gpus.io_stalled(file) is None
    assert gpus.io_stalled(tmp_path / "none") is None
    if os.path.exists(gpus.PRESSURE):
        assert (gpus.io_stalled() or 0) > 0
