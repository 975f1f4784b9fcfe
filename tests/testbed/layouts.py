"""OCI image layouts on disk, and tars of them."""

import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.testbed import registry

CONFIG = "application/vnd.oci.image.config.v1+json"
NAME = "org.opencontainers.image.ref.name"


def blob(folder: Path, data: bytes) -> tuple[str, int]:
    """Put it there; its digest and size."""
    name = registry.digest(data)
    place = folder / "blobs" / "sha256" / name.removeprefix("sha256:")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)
    return name, len(data)


def descriptor(folder: Path, kind: str, data: bytes, **more: Any) -> dict[str, Any]:
    name, size = blob(folder, data)
    return {"mediaType": kind, "digest": name, "size": size, **more}


def write(
    folder: Path, tag: str, layers: Sequence[registry.Layer], *, mark: str = "", index: bool = False
) -> registry.Pushed:
    """A layout with one image more, named ``tag``. ``index``: by way of an index of platforms."""
    platform = {"architecture": "amd64", "os": "linux"}
    content = {
        **platform,
        "config": {"Env": [f"MARK={mark}", "PATH=/bin"], "Cmd": ["/bin/true"]},
        "rootfs": {"type": "layers", "diff_ids": [each.raw_digest for each in layers]},
    }
    config = descriptor(folder, CONFIG, json.dumps(content).encode())
    listed = [descriptor(folder, f"{registry.LAYER}+gzip", each.packed) for each in layers]
    manifest = {
        "schemaVersion": 2,
        "mediaType": registry.MANIFEST,
        "config": config,
        "layers": listed,
    }
    top = descriptor(folder, registry.MANIFEST, json.dumps(manifest).encode())
    documents = config["size"] + top["size"]
    if index:
        body = {"schemaVersion": 2, "manifests": [top | {"platform": platform}]}
        top = descriptor(folder, registry.INDEX, json.dumps(body).encode())
        documents += top["size"]
    file = folder / "index.json"
    others = json.loads(file.read_text())["manifests"] if file.exists() else []
    others = [each for each in others if each["annotations"][NAME] != tag]
    entry = top | {"annotations": {NAME: tag}}
    file.write_text(json.dumps({"schemaVersion": 2, "manifests": [*others, entry]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return registry.Pushed(str(folder), top["digest"], config["digest"], tuple(layers), documents)


def pack(folder: Path, file: Path, mode: str = "w") -> Path:
    """A tar of a layout, as skopeo's oci-archive has it."""
    with tarfile.open(file, mode) as archive:  # type: ignore[call-overload]
        for each in sorted(folder.rglob("*")):
            archive.add(each, each.relative_to(folder), recursive=False)
    return file
