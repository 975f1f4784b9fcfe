"""Labels of the Node that say which datasets are whole there."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kit.room
from kube import client
from nodeagent.cluster import follow, kinds, labels
from nodeagent.settings import ClusterSettings, Settings
from nodeagent.state import Findings, RunningRoom, State
from tests.kube import agents
from tests.kube.test_crds import dataset
from tests.kube.test_storage import ask
from tests.testbed import agent, waiting
from tests.testbed.control_plane import ControlPlane, unique

PREFIX = "dataset.nodeagent.io/"
VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")  # of a label
NODE = "gpu-label"

names = st.sampled_from([f"{PREFIX}{each}" for each in "abcdefgh"])
sets = st.dictionaries(names, st.text("ab0-_./é", max_size=70))


@given(sets, sets, st.integers(0, 10))
def test_changes_make_the_node_say_what_is_whole_and_no_more(
    there: dict[str, str], whole: dict[str, str], most: int
) -> None:
    wanted = labels.chosen(there, whole, most)
    assert len(wanted) == min(most, len(whole))
    stays = len(there.keys() & whole.keys() & wanted.keys())
    assert stays == min(most, len(there.keys() & whole.keys()))  # none goes for another one
    assert all(VALUE.fullmatch(each) for each in wanted.values())
    made = labels.changes(there, wanted)
    after: dict[str, str | None] = {**there, **made}
    assert {key: text for key, text in after.items() if text is not None} == wanted
    assert labels.changes(wanted, wanted) == {}


# --- the shell


class Server:
    """Remembers patches of labels. ``trouble``: instead of an answer."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.trouble: client.KubeError | None = None
        self.asked = 0

    async def request(self, method: str, path: str, body: Any, **more: Any) -> dict[str, Any]:
        self.asked += 1
        assert (method, path) == ("PATCH", f"/api/v1/nodes/{NODE}")
        if self.trouble is not None:
            raise self.trouble
        self.sent.append(body["metadata"]["labels"])
        return {}


class Made:
    """A labeller with a room that has what ``whole`` says."""

    def __init__(self, **more: Any) -> None:
        self.server = Server()
        self.whole: dict[str, str] = {}
        self.node: dict[str, dict[str, Any]] = {NODE: {"uid": "u", "labels": {"mine": "x"}}}
        follower = SimpleNamespace(
            node=SimpleNamespace(objects=self.node), name=NODE, asked=ClusterSettings(**more)
        )
        presence = kit.room.Presence("dataset", lambda _: self.whole, lambda *_: None)
        room = SimpleNamespace(presence=presence, name="cache")
        self.running = RunningRoom(cast(Any, room), cast(Any, None), started=True)
        self.state = State(Settings(), Findings(), [self.running])
        self.labeller = labels.Labeller(
            cast(follow.Follower, follower), cast(client.ApiServer, self.server), self.state
        )

    @property
    def rules(self) -> list[str]:
        return [each.rule for each in self.state.findings.current()]


async def test_label_goes_whose_answer_was_lost() -> None:
    """The watch does not show it yet, and the write may have come through all the same."""
    made = Made()
    made.whole = {"coco": "frozen-1"}
    made.server.trouble = client.KubeError("Node", "no answer within 10s")
    with pytest.raises(client.KubeError):
        await made.labeller._write(add=True)
    made.server.trouble, made.whole = None, {}
    await made.labeller.lost()
    assert made.server.sent == [{f"{PREFIX}coco": None}]


async def test_loss_adds_nothing_and_never_stops_a_room(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made()
    made.node[NODE]["labels"][f"{PREFIX}old"] = "x"
    made.whole = {"new": "frozen-1"}
    await made.labeller.lost()
    assert made.server.sent == [{f"{PREFIX}old": None}]
    made.server.trouble = client.KubeError("Node", "no answer")
    await made.labeller.lost()  # and returns
    monkeypatch.setattr(labels, "LOST_SECONDS", 0.01)
    async with made.labeller._lock:  # held by a write that hangs
        await made.labeller.lost()


async def test_nothing_is_said_before_a_room_has_looked() -> None:
    made = Made()
    made.node[NODE]["labels"][f"{PREFIX}coco"] = "frozen-1"
    made.running.started = False
    await made.labeller._write(add=True)
    made.running.started = True
    made.node.clear()
    await made.labeller._write(add=True)
    assert made.server.sent == []


async def test_labels_are_bounded_and_what_is_left_out_is_found() -> None:
    made = Made(labels=2)
    made.whole = dict.fromkeys("abc", "frozen-1")
    await made.labeller._write(add=True)
    assert list(made.server.sent[0]) == [f"{PREFIX}a", f"{PREFIX}b"]
    assert made.rules == ["label-limit"]
    del made.whole["c"]
    await made.labeller._write(add=True)
    assert made.rules == []


async def test_refused_label_is_a_finding_until_it_is_taken() -> None:
    """As on a cluster that is too old for policies, where the chart gives no such right."""
    made = Made()
    made.whole = {"coco": "frozen-1"}
    made.server.trouble = client.KubeError("Node", "the API server answers 403", 403)
    following = asyncio.create_task(made.labeller.follow())
    try:
        await waiting.until_async(lambda: made.rules == ["label-refused"], 30, "the finding")
        assert "403" in made.state.findings.current()[0].message
        made.server.trouble = None
        await waiting.until_async(lambda: made.server.sent, 60, "the label")
        await waiting.until_async(lambda: made.rules == [], 30, "the finding to clear")
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_server_that_does_not_answer_refuses_nothing() -> None:
    """Nobody has to give the agent more rights for that."""
    made = Made()
    made.whole = {"coco": "frozen-1"}
    made.server.trouble = client.KubeError("Node", "no answer within 10s")
    following = asyncio.create_task(made.labeller.follow())
    try:
        await waiting.until_async(lambda: made.server.asked, 30, "the attempt")
        await asyncio.sleep(0)
        assert made.rules == []
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


# --- on a real API server


@pytest.fixture
async def mine(plane: ControlPlane) -> AsyncIterator[client.ApiServer]:
    """The login of the agent of NODE."""
    for name in (NODE, "gpu-other"):
        plane.node(name, owned="by-others", **{f"{PREFIX}theirs": "x"})
    server = client.ApiServer(plane.account(unique("agent"), NODE))
    try:
        yield server
    finally:
        await server.close()
        plane.kubectl("delete", "node", NODE, "gpu-other", "--wait=false")


@pytest.mark.real
@pytest.mark.parametrize("path", ["", "/status"])
async def test_agent_writes_labels_of_datasets_of_its_node_and_nothing_else_of_it(
    plane: ControlPlane, mine: client.ApiServer, path: str
) -> None:
    async def patch(body: dict[str, Any], node: str = NODE) -> str:
        return await ask(mine, "PATCH", f"/api/v1/nodes/{node}{path}", body)

    def label(**keys: str | None) -> dict[str, Any]:
        return {"metadata": {"labels": {k.replace("__", "/"): v for k, v in keys.items()}}}

    await waiting.until_async(lambda: patch(label(odd="x")), 30, "the policy")
    ours = {"metadata": {"labels": {f"{PREFIX}coco": "frozen-1", f"{PREFIX}theirs": None}}}
    assert await patch(ours) == ""
    assert plane.get("node", NODE)["metadata"]["labels"] == {
        "kubernetes.io/hostname": NODE, "owned": "by-others", f"{PREFIX}coco": "frozen-1",
    }  # fmt: skip
    assert "writes no object of another node" in await patch(ours, "gpu-other")
    for each in ({"odd": "x"}, {"owned": "by-me"}, {"owned": None}, {"nodeagent.io__x": "y"}):
        assert "no others" in await patch(label(**each)), each
    why = "changes nothing of its node but"
    taint = {"key": "mine", "effect": "NoExecute"}
    for meta in (
        {"annotations": {"a": "b"}},
        {"finalizers": ["a.b/c"]},
        {"ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "x", "uid": "y"}]},
    ):
        assert why in await patch({"metadata": meta}), meta
    if path:
        return  # the server leaves the spec alone there
    for spec in ({"unschedulable": True}, {"taints": [taint]}, {"providerID": "x://y"}):
        assert why in await patch({"spec": spec}), spec
    repair = {"key": "nodeagent.io/volume-repair", "effect": "NoSchedule"}

    async def tainted() -> bool:  # docs/audit.md; the cluster's own controllers write taints, too
        before = plane.get("node", NODE)["spec"].get("taints", [])
        return await patch({"spec": {"taints": [*before, repair]}}) == ""

    await waiting.until_async(tainted, 30, "the taint of a repair")


@pytest.fixture
def node(plane: ControlPlane, area: Path) -> Iterator[agent.Agent]:
    mine = {"owned": "by-others", f"{PREFIX}stale": "frozen-0"}
    with agents.made(plane, area / "node", NODE, mine) as made:
        yield made


@pytest.mark.real
@pytest.mark.timeout(150)
def test_label_comes_when_a_dataset_is_complete_and_goes_before_it_does(
    plane: ControlPlane, node: agent.Agent, area: Path
) -> None:
    files = area / "files"
    files.mkdir()
    (files / "a").write_text("data of a")
    name = unique("coco")
    key = PREFIX + name

    def shown() -> dict[str, str]:
        found: dict[str, str] = plane.get("node", NODE)["metadata"]["labels"]
        return found

    node.start()
    plane.apply(dataset(name, source={"kind": "dir", "path": str(files)}, warm=False))
    waiting.until(lambda: f"{PREFIX}stale" not in shown(), 60, "what is not there to go")
    waiting.until(lambda: name in [d["name"] for d in node.get("/v1/datasets")["datasets"]], 60,
                  "the dataset")  # fmt: skip
    assert key not in shown()
    node.tell(name, "warm")
    waiting.until(lambda: key in shown(), 60, "the label", detail=node.said)
    assert node.dataset(name)["state"] == "complete"
    assert shown() == {
        "kubernetes.io/hostname": NODE, "owned": "by-others", key: node.generations(name)[0].name,
    }  # fmt: skip
    listed = plane.kubectl("get", "nodes", "-l", key, "-o", "name")
    assert listed.split() == [f"node/{NODE}"]

    node.kill()  # what is there stays there, and so does the label
    node.start()
    waiting.until(lambda: node.dataset(name)["state"] == "complete", 60, "the dataset again")
    waiting.until(
        lambda: plane.get("nst", NODE)["status"]["summary"]["datasets"] == "1/1", 60, "its object"
    )
    assert key in shown()

    node.remove(name)
    # At once, unless the API server was away for longer than a removal waits for it.
    assert key not in shown() or "may say too much" in node.said()
    waiting.until(lambda: key not in shown(), 60, "the label to go")
    assert shown()["owned"] == "by-others"


def test_prefix_is_that_of_the_policy() -> None:
    assert kinds.label_prefixes() == (PREFIX,)
