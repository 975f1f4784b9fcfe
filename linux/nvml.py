"""How busy the GPUs are, from NVIDIA's management library (NVML): a child process (``main``).

Its calls can hang while a driver or a GPU is in trouble, so the agent never makes them itself.
The bindings are the optional package nvidia-ml-py; it loads ``libnvidia-ml.so.1`` of the driver.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import kit.errors
import kit.messages

DEVICE = Path("/dev/nvidiactl")
_REMEDY = "it is tried again; without a GPU leave the extra nodeagent[gpu] out"


@dataclass(frozen=True)
class Sample:
    """``busy``: of each GPU that tells it, from 0 to 1: the part of the driver's last sample period
    (between a sixth of a second and a second) in which a kernel ran. One in MIG mode tells
    nothing."""

    gpus: int
    busy: tuple[float, ...]


def installed() -> bool:
    """Whether the bindings are there. It loads nothing."""
    return importlib.util.find_spec("pynvml") is not None


def main() -> None:
    """Answers ``None`` with a Sample."""
    kit.messages.serve(type(None), lambda _: sample())


def sample() -> Sample:
    """Of all GPUs now. HostError says why nothing is known."""
    try:
        import pynvml
    except ImportError as error:
        raise kit.errors.HostError("GPUs", f"nvidia-ml-py: {error}", _REMEDY) from error
    busy = []
    try:
        if not _begun:
            pynvml.nvmlInit()
            _begun.append(True)
        count = pynvml.nvmlDeviceGetCount()
        for index in range(count):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                busy.append(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
            except pynvml.NVMLError_NotSupported:
                continue
    except pynvml.NVMLError as error:
        raise kit.errors.HostError("GPUs", f"NVML: {error}", _REMEDY) from error
    return Sample(count, tuple(busy))


_begun: list[bool] = []  # of this process
