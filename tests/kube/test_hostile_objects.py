"""A thousand objects of somebody who may make them and wants more, on a real agent."""

import asyncio
import hashlib
import os
import random
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kube import client
from tests.kube import agents, hostile
from tests.kube.test_crds import dataset
from tests.testbed import agent, waiting
from tests.testbed.control_plane import ControlPlane

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

COUNT = 1000
PATHS = {
    "CachedDataset": "/apis/nodeagent.io/v1alpha1/cacheddatasets",
    "ImageSet": "/apis/nodeagent.io/v1alpha1/imagesets",
}
KEY = "QVFBQUFBPT0="
OTHER_KEY = "b3RoZXIga2V5"


def look(folder: Path) -> dict[str, tuple[Any, ...]]:
    """All that is in ``folder``, with what a change of it would change."""
    found = {}
    for each in sorted([folder, *folder.rglob("*")]):
        status = each.lstat()
        content = b"" if each.is_dir() else each.read_bytes()
        found[str(each)] = (
            status.st_ino, status.st_mode, status.st_uid, status.st_size, status.st_mtime_ns,
            hashlib.sha256(content).hexdigest(),
        )  # fmt: skip
    return found


async def create(plane: ControlPlane, objects: list[dict[str, Any]]) -> Counter[str]:
    """How many of each kind the server took; '' counts those that it refused."""
    server = client.ApiServer(plane.admin)
    taken: Counter[str] = Counter()

    async def one(thing: dict[str, Any]) -> None:
        try:
            await server.request(
                "POST", PATHS[thing["kind"]], thing, about=thing["kind"], deadline=waiting.limit(60)
            )
        except client.KubeError as error:
            assert error.status in (400, 404, 409, 422), (error, thing)
            taken[""] += 1
        else:
            taken[thing["kind"]] += 1

    try:
        for at in range(0, len(objects), 50):
            await asyncio.gather(*map(one, objects[at : at + 50]))
    finally:
        await server.close()
    return taken


def elsewhere(mark: str, own: tuple[Path, ...]) -> list[str]:
    """Paths with the mark on this machine that are not below ``own``."""
    words = [word for each in own for word in ("-path", str(each), "-prune", "-o")]
    places = ["/run", "/tmp", "/etc", "/var/lib", "/mnt", "/root", str(Path.cwd())]
    done = subprocess.run(
        ["find", *places, "-maxdepth", "5", *words, "-name", f"*{mark}*", "-print"],
        capture_output=True, text=True, timeout=waiting.limit(60), check=False,
    )  # fmt: skip
    return done.stdout.splitlines()


def test_nothing_outside_the_agents_folders_changes(plane: ControlPlane, area: Path) -> None:
    """Neither while the objects are there nor when they are deleted."""
    mark = f"mark{os.urandom(4).hex()}"
    outside = area / "outside"
    volume = outside / "kubelet/pods/uid/volumes/kubernetes.io~empty-dir/mine"
    for folder in (outside, volume):
        folder.mkdir(parents=True)
        for name in ("wanted.json", "guard-wanted.admin", f"{mark}.key", mark):
            (folder / name).write_text("of somebody else")
    plane.secret("ceph", admin=KEY, json=KEY, key=KEY)
    plane.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "other"}},
        {
            "apiVersion": "v1", "kind": "Secret", "data": {"key": OTHER_KEY},
            "metadata": {"name": "ceph", "namespace": "other"},
        },
    )  # fmt: skip
    climbing = [
        text
        for folder in (outside, volume)
        for name in ("wanted", "guard-wanted", f"{mark}-stolen")
        for text in hostile.climbing(str(folder), name)
    ]
    pairs = [
        dataset(
            "", source=hostile.CEPHFS, freshness="snapshot", secretRef={"name": text, "key": key}
        )
        for text in (*climbing, "../../other/secrets/ceph", "ceph/../../../other/secrets/ceph")
        for key in ("json", "admin", "key", "/key")
    ]
    others = [*hostile.of(*climbing), *hostile.of(*(f"{text}{mark}" for text in hostile.TEXTS))]
    sample = random.Random(1).sample(others, COUNT - len(pairs))
    made = hostile.named([*pairs, *sample])

    with agents.made(plane, area / "node", "hostile", drop_after="1s") as node:
        # Where no containers are: sets of images are judged, and nothing is pulled.
        node.settings["preheat"] = {"socket": str(area / "no.sock")}
        node.settings["cache"]["source_timeout"] = "2s"
        own = (node.folder, node.socket.parent, plane.folder)
        before = look(outside)
        try:
            taken = asyncio.run(create(plane, made))
            assert sum(taken.values()) == COUNT
            (area / "files").mkdir()
            (area / "files/a").write_text("a")
            plane.apply(dataset("plain", source={"kind": "dir", "path": str(area / "files")}))
            node.start()
            # Both kinds are listed before anything is judged.
            waiting.until(
                lambda: judged(node) >= taken["CachedDataset"], 120, "all of them", pause=1,
                detail=lambda: (taken, judged(node), node.said()[-2000:]),
            )  # fmt: skip
            waiting.until(
                lambda: node.call("GET", "/v1/datasets/plain")["state"] == "complete",
                60, "a dataset among them", detail=node.said,
            )  # fmt: skip
            secrets = node.socket.parent / "secrets"
            waiting.until(secrets.exists, 30, "the key", detail=node.said)
            assert {each.read_text() for each in secrets.iterdir()} == {KEY}
            assert look(outside) == before
        finally:
            plane.kubectl("delete", "cacheddatasets,imagesets", "--all", "--wait=false")
        waiting.until(
            lambda: not node.call("GET", "/v1/datasets")["datasets"], 60, "all to go",
            detail=node.said,
        )  # fmt: skip
        waiting.until(lambda: not list(secrets.iterdir()), 60, "the keys to go", detail=node.said)
        assert look(outside) == before
        assert elsewhere(mark, (*own, outside)) == []
        kept = [each for each in node.state.rglob("*") if each.is_file()]
        assert not any(OTHER_KEY.encode() in each.read_bytes() for each in kept)
        assert "the cluster's part failed" not in node.said()
    print(f"taken {taken}")


def judged(node: agent.Agent) -> int:
    """CachedDatasets of the hostile that are in force, or of which the agent says why not."""
    found = node.call("GET", "/v1/findings")["findings"]
    refused = {each["subject"] for each in found if each["rule"].startswith("intent-")}
    in_force = {each["name"] for each in node.call("GET", "/v1/datasets")["datasets"]}
    named = in_force | {each.removeprefix("CachedDataset ") for each in refused}
    return len([each for each in named if not each.startswith("ImageSet ")]) - ("plain" in named)
