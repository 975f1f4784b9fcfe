"""A kubelet's configuration file, for agents whose disk is fuller than a node's may be."""

import json
from pathlib import Path


def written(
    folder: Path, *, high: int = 100, low: int = 99, free: str = "0.1%", **more: object
) -> dict[str, str]:
    """The section ``kubelet`` of settings that name such a file in ``folder``, which is made.

    ``high``, ``low``: per cent of the disk, above and down to which images are deleted. ``free``:
    imagefs.available of evictionHard. ``more``: fields of the KubeletConfiguration.
    """
    content = {
        "imageGCHighThresholdPercent": high,
        "imageGCLowThresholdPercent": low,
        "evictionHard": {"imagefs.available": free},
        **more,
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "kubelet-config.yaml"
    file.write_text(json.dumps(content))
    return {"config": str(file)}
