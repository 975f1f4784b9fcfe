"""The second witness against an API server that answers, refuses, hangs or is gone."""

import asyncio
import contextlib
import dataclasses
import datetime
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import kit.errors
from kube.client import KubeError
from kube.objects import attachment_name
from kube.settings import AccessSettings, ThisNode
from linux import blockdev
from linux.rbd_sysfs import RbdImage
from tests.nodeagent.test_listeners import certify
from tests.testbed import constants, ports, waiting
from volumes.ledger import witness as witness_module
from volumes.ledger.statement import HOLDS_DATA
from volumes.ledger.store import Entry, Knowledge
from volumes.ledger.witness import VolumeClaim, Witness
from volumes.settings import WitnessSettings

DEVICE = blockdev.BlockDevice(
    "rbd9", (254, 9), "rbd", 2**30, False, diskseq=7,
    image=RbdImage("rbd", "a", "", "", "101d", "f1", 3),
)  # fmt: skip
ENTRY = Entry(DEVICE.volume, type="ext4", uuid="e1", first_seen=1.8e9, last_seen=1.8e9, node="n1")
CLAIM = VolumeClaim("rbd.csi.ceph.com", "handle-1")


class Cluster:
    """One PersistentVolume and its attachment. ``status``: of the next answers, by method."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.annotations: dict[str, str] = {}
        self.handle = CLAIM.handle
        self.attached = True
        self.status: dict[str, int] = {}
        self.silent = False
        self.version = 1
        self.claim: VolumeClaim | None = CLAIM
        self.no_records = False

    async def find(self, device: blockdev.BlockDevice) -> VolumeClaim | None:
        if self.no_records:
            raise kit.errors.HostError("kubelet's directory", "is not there", "")
        return self.claim

    def volume(self) -> dict[str, Any]:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "metadata": {
                "name": "pvc-1", "uid": "u", "resourceVersion": str(self.version),
                "creationTimestamp": now, "annotations": self.annotations,
            },
            "spec": {"csi": {"driver": CLAIM.driver, "volumeHandle": self.handle}},
        }  # fmt: skip

    async def handle_request(self, request: web.Request) -> web.Response:
        self.asked.append(f"{request.method} {request.path.split('/')[-1]}")
        assert request.headers["Authorization"] == "Bearer the-agents-own"
        if self.silent:
            await asyncio.Event().wait()
        if status := self.status.get(request.method):
            return web.json_response({"message": "because"}, status=status)
        if request.path.endswith("/" + attachment_name(CLAIM.driver, CLAIM.handle, "n1")):
            if not self.attached:
                return web.json_response({}, status=404)
            return web.json_response({"spec": {"source": {"persistentVolumeName": "pvc-1"}}})
        assert request.path == "/api/v1/persistentvolumes/pvc-1"
        if request.method == "PATCH":
            assert request.content_type == "application/merge-patch+json"
            change = (await request.json())["metadata"]
            if change["resourceVersion"] != str(self.version):
                return web.json_response({"message": "conflict"}, status=409)
            self.version += 1
            self.annotations |= change["annotations"]
        return web.json_response(self.volume())


ANSWER_SECONDS = 30.0  # for a server in this loop; a busy machine may need some of them


@contextlib.asynccontextmanager
async def asking(cluster: Cluster, folder: Path, **more: Any) -> AsyncIterator[Witness]:
    made = web.Application()
    made.router.add_route("*", "/{path:.*}", cluster.handle_request)
    runner = web.AppRunner(made, shutdown_timeout=0.1)
    await runner.setup()
    (port,) = ports.free(1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    certify(folder, "ca")
    (folder / "own").write_text("the-agents-own\n")
    asked = constants.made(WitnessSettings, **{"timeout": ANSWER_SECONDS, **more})
    access = AccessSettings.model_construct(
        server=f"http://127.0.0.1:{port}", ca_file=folder / "tls.crt", token_file=folder / "own"
    )
    here = ThisNode.model_construct(name="n1", cluster=access)
    witness = Witness(asked, here, cluster.find)
    try:
        yield witness
    finally:
        await witness.close()
        await runner.cleanup()


async def _until(condition: Any) -> None:
    async with asyncio.timeout(waiting.limit(30)):
        while not condition():
            await asyncio.sleep(0.01)


async def test_nothing_is_asked_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    witness = Witness(WitnessSettings(), ThisNode(), Cluster().find)
    assert (await witness.ask(DEVICE)).knowledge is Knowledge.NOT_ASKED
    witness.saw(DEVICE, ENTRY)
    assert witness.status()["waiting_marks"] == 0


async def test_first_content_is_marked_once_and_forbids_from_then_on(tmp_path: Path) -> None:
    cluster = Cluster()
    async with asking(cluster, tmp_path) as witness:
        assert (await witness.ask(DEVICE)).knowledge is Knowledge.NONE
        for _ in range(20):
            witness.saw(DEVICE, ENTRY)
        await _until(lambda: witness.counts["marked"])
        mark = json.loads(cluster.annotations[HOLDS_DATA])
        assert mark == {
            "type": "ext4", "uuid": "e1", "volume": DEVICE.volume, "node": "n1",
            "seen": "2027-01-15T08:00:00+00:00",
        }  # fmt: skip
        said = await witness.ask(DEVICE)
        assert (said.knowledge, said.name) == (Knowledge.CONTENT, "pvc-1")
        for _ in range(20):
            witness.saw(DEVICE, ENTRY)
        assert witness.status()["waiting_marks"] == 0
        assert [each.split()[0] for each in cluster.asked].count("PATCH") == 1
    # Another node, which has seen nothing.
    async with asking(cluster, tmp_path) as other:
        assert (await other.ask(DEVICE)).knowledge is Knowledge.CONTENT
        assert other.counts["marked"] == 0


async def test_other_content_of_the_same_volume_renews_the_mark(tmp_path: Path) -> None:
    cluster = Cluster()
    async with asking(cluster, tmp_path) as witness:
        witness.saw(DEVICE, ENTRY)
        await _until(lambda: witness.counts["marked"] == 1)
        witness.saw(DEVICE, dataclasses.replace(ENTRY, uuid="e2"))
        await _until(lambda: witness.counts["marked"] == 2)
    assert json.loads(cluster.annotations[HOLDS_DATA])["uuid"] == "e2"


async def test_answers_hold_for_a_moment_and_names_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster()
    async with asking(cluster, tmp_path) as witness:
        for _ in range(10):  # mkfs is tried in bursts
            await witness.ask(DEVICE)
        assert len(cluster.asked) == 2  # attachment and volume
        witness._said.clear()
        await witness.ask(DEVICE)
        assert len(cluster.asked) == 3  # the volume
        cluster.claim = dataclasses.replace(CLAIM, name="pvc-1")
    async with asking(cluster, tmp_path) as witness:  # a pod's record has the name
        await witness.ask(DEVICE)
        assert len(cluster.asked) == 4


async def test_record_that_is_gone_is_remembered(tmp_path: Path) -> None:
    """kubelet removes its record when a stage fails; the mapping may stay, and the next stage
    formats it."""
    cluster = Cluster()
    cluster.annotations[HOLDS_DATA] = "{}"
    async with asking(cluster, tmp_path) as witness:
        await witness.ask(DEVICE)
        witness._said.clear()
        cluster.claim = None
        assert (await witness.ask(DEVICE)).knowledge is Knowledge.CONTENT
    async with asking(cluster, tmp_path) as witness:
        assert (await witness.ask(DEVICE)).knowledge is Knowledge.NOT_ASKED


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"silent": True}, "no answer within"),
        ({"status": {"GET": 500}}, "answers 500 (because)"),
        ({"status": {"GET": 401}}, "answers 401"),
        ({"status": {"GET": 403}}, "answers 403"),
        ({"status": {"GET": 429}}, "answers 429"),
        ({"handle": "another"}, "is of volume another, not handle-1"),
        ({"no_records": True}, "kubelet's directory"),
    ],
)
async def test_without_an_answer_it_is_unknown_and_the_time_counts(
    tmp_path: Path, change: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster()
    # Only for an answer that does not come is the deadline short.
    short = {"timeout": 0.1} if "silent" in change else {}
    async with asking(cluster, tmp_path, **short) as witness:
        for name, value in change.items():
            setattr(cluster, name, value)
        first = await witness.ask(DEVICE)
        assert first.knowledge is Knowledge.UNKNOWN
        assert why in first.text
        await asyncio.sleep(0.05)
        again = await witness.ask(DEVICE)
        assert again.silent_for > first.silent_for
        fresh = Cluster()
        for name in change:
            setattr(cluster, name, getattr(fresh, name))
        if short:
            patient = constants.made(WitnessSettings, timeout=ANSWER_SECONDS)
            monkeypatch.setattr(witness, "settings", patient)
            await witness._disconnect()
        assert (await witness.ask(DEVICE)).knowledge is Knowledge.NONE
        assert witness.trouble == ""
        if short:
            monkeypatch.undo()
            await witness._disconnect()
        setattr(cluster, *next(iter(change.items())))
        witness._said.clear()
        assert (await witness.ask(DEVICE)).silent_for < again.silent_for  # it begins anew


async def test_volume_that_is_not_attached_by_the_cluster_has_no_witness(tmp_path: Path) -> None:
    """A driver with attachRequired: false; then nothing names it before its first publish."""
    cluster = Cluster()
    cluster.attached = False
    async with asking(cluster, tmp_path) as witness:
        said = await witness.ask(DEVICE)
    assert said.knowledge is Knowledge.NOT_ASKED
    assert "names" in said.text


async def test_limit_refuses_without_asking_and_marks_leave_half_of_it(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.claim = dataclasses.replace(CLAIM, name="pvc-1")
    async with asking(cluster, tmp_path, per_minute=10) as witness:
        cluster.handle = "another"  # so that no mark is ever written
        for number in range(20):
            image = dataclasses.replace(DEVICE.image, image_id=f"{number}")  # type: ignore[type-var]
            witness.saw(dataclasses.replace(DEVICE, image=image), ENTRY)
        await _until(lambda: witness.counts["limited"])
        assert len(cluster.asked) == 5
        said = [await witness.ask(DEVICE) for _ in range(8)]
        assert len(cluster.asked) == 10
        assert [each.knowledge for each in said] == [Knowledge.UNKNOWN] * 8
        assert "10 times in this minute" in said[-1].text
        assert said[-1].silent_for == 0.0  # not the API server's fault: it opens nothing


async def test_questions_about_forgotten_volumes_leave_half_of_the_limit(tmp_path: Path) -> None:
    """The other half is for leases."""
    cluster = Cluster()
    async with asking(cluster, tmp_path, per_minute=10) as witness:
        for _ in range(5):
            assert await witness.is_attached(CLAIM.driver, CLAIM.handle)
        with pytest.raises(KubeError, match="too often"):
            await witness.is_attached(CLAIM.driver, CLAIM.handle)
        assert (await witness.ask(DEVICE)).knowledge is not Knowledge.UNKNOWN


async def test_account_that_may_not_patch_says_so_and_goes_on_reading(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.status["PATCH"] = 403
    async with asking(cluster, tmp_path) as witness:
        witness.saw(DEVICE, ENTRY)
        await _until(lambda: witness.mark_trouble)
        assert "answers 403 (because)" in witness.mark_trouble
        assert (await witness.ask(DEVICE)).knowledge is Knowledge.NONE
        assert witness.trouble == ""
        cluster.annotations[HOLDS_DATA] = "of another node"
        witness._said.clear()
        assert (await witness.ask(DEVICE)).knowledge is Knowledge.CONTENT
        assert len([each for each in cluster.asked if each.startswith("PATCH")]) == 1


async def test_mark_that_failed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(witness_module, "MARK_LATEST_SECONDS", 0.05)
    cluster = Cluster()
    cluster.status["PATCH"] = 409
    async with asking(cluster, tmp_path) as witness:
        witness.saw(DEVICE, ENTRY)
        await _until(lambda: len(cluster.asked) > 4)
        cluster.status.clear()
        await _until(lambda: witness.counts["marked"])
        assert (witness.mark_trouble, witness.status()["waiting_marks"]) == ("", 0)
    assert HOLDS_DATA in cluster.annotations


async def test_content_that_was_known_before_is_not_asked_about_at_once(tmp_path: Path) -> None:
    """As after a rollout, when 7,500 agents see all their volumes again."""
    cluster = Cluster()
    async with asking(cluster, tmp_path) as witness:
        witness.saw(DEVICE, dataclasses.replace(ENTRY, first_seen=1.7e9))
        (mark,) = witness._marks.values()
        assert mark.due > asyncio.get_running_loop().time()
        await _until(lambda: not witness._wake.is_set())  # the worker has seen that, and waits
        assert cluster.asked == []
        mark.due = 0.0
        witness._wake.set()
        await _until(lambda: witness.counts["marked"])
