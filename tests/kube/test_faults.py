"""What befalls the way to the API server: a real agent and a real server, a proxy between them.

After each fault the agent is current again: it applies a change made meanwhile, and what it says of
it is rolled up. The suite shortens the agent's pauses tenfold; ``make test-kube-faults`` runs it as
it is, with the server away for ten minutes.
"""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kube import watching
from nodeagent.cluster import kinds
from tests.kube import agents
from tests.kube.test_crds import dataset
from tests.testbed import agent, api_proxy, kube_api, leftovers, waiting
from tests.testbed.control_plane import ControlPlane

FACTOR = float(os.environ.get("KUBE_FAULTS_FACTOR", "10"))
AWAY_SECONDS = float(os.environ.get("KUBE_FAULTS_AWAY", "4"))
CURRENT_SECONDS = 30.0  # after a fault; a watch that is only silent is given up later
LIST_SECONDS = watching.LIST_SECONDS / FACTOR
NODE = "gpu-faults"
NAME = "faulty"
EVERYBODY = {"cacheddatasets", "imagesets", "nodes"}  # follow these

pytestmark = [pytest.mark.real, pytest.mark.timeout(900 if FACTOR < 10 else 150)]


class Rig:
    """One agent with one dataset, followed through ``proxy``."""

    def __init__(self, plane: ControlPlane, proxy: api_proxy.ApiProxy, node: agent.Agent) -> None:
        self.plane, self.proxy, self.node = plane, proxy, node
        self._api = kube_api.Api(plane.api_port, plane.pki)

    def change(self) -> int:
        """The new priority of the dataset."""
        priority = int(self.there()["spec"].get("priority", 0)) + 1
        patch = f'{{"spec": {{"priority": {priority}}}}}'
        self.plane.kubectl("patch", "cds", NAME, "--type=merge", "-p", patch)
        return priority

    def there(self) -> dict[str, Any]:
        found: dict[str, Any] = self._api.read(f"{kinds.API}/cacheddatasets/{NAME}")
        return found

    def applied(self) -> int:
        return int(self.node.dataset(NAME)["priority"])

    def until_current(self, priority: int, since: float, what: str) -> None:
        """The agent applied it, said so, and it was rolled up."""

        def current() -> bool:
            found = self.there()
            status = found.get("status") or {}
            return (
                self.applied() == priority
                and status.get("observedGeneration") == found["metadata"]["generation"]
                and status["ready"] == "1/1"
            )

        waiting.until(
            current, CURRENT_SECONDS, f"{what}: to be current", pause=0.1,
            detail=lambda: f"{self.there()}\n{self.node.said()[-3000:]}",
        )  # fmt: skip
        asked = len(self.proxy.seen(since=since))
        print(f"\n{what}: current {time.monotonic() - since:.1f} s after it, {asked} requests")

    def lists(self, since: float) -> dict[str, int]:
        """Lists since then of what every agent follows. The one that rolls up follows more, and
        begins anew when it lost the Lease; no kind is listed more often than it may."""
        seconds = time.monotonic() - since
        found = self.proxy.lists(since)
        most = int(seconds / LIST_SECONDS) + 2  # one at the beginning, one at the end
        assert max(found.values(), default=0) <= most, f"{found} within {seconds:.1f} s"
        return {kind: count for kind, count in found.items() if kind in EVERYBODY}


@pytest.fixture(scope="module")
def rig(plane: ControlPlane, run_folder: Path) -> Iterator[Rig]:
    folder = run_folder / "faults"
    files = folder / "files"
    files.mkdir(parents=True)
    (files / "a").write_text("data of a")
    proxy = api_proxy.ApiProxy(plane.api_port, plane.pki)
    proxy.start()
    try:
        with agents.made(plane, folder / "node", NODE, {"pool": "faults"}) as node:
            node.settings["kubernetes"]["server"] = f"https://127.0.0.1:{proxy.port}"
            node.start(sys.executable, "-m", "tests.kube.scaled", str(FACTOR))
            source = {"kind": "dir", "path": str(files)}
            plane.apply(dataset(NAME, source=source, nodeSelector={"pool": "faults"}, priority=1))
            made = Rig(plane, proxy, node)
            waiting.until(
                lambda: (made.there().get("status") or {}).get("ready") == "1/1",
                60, "the dataset", detail=node.said,
            )  # fmt: skip
            yield made
    finally:
        proxy.stop()
        leftovers.clear(folder)


def refusals(rig: Rig, status: int, since: float) -> int:
    return sum(each.status == status for each in rig.proxy.seen(since=since))


def test_server_away_and_back_costs_no_list(rig: Rig) -> None:
    began = time.monotonic()
    with rig.proxy.down():
        priority = rig.change()
        time.sleep(AWAY_SECONDS)  # the fault itself
        assert rig.applied() == priority - 1
        assert rig.node.dataset(NAME)["state"] == "complete"
    over = time.monotonic()
    rig.until_current(priority, over, "away")
    assert rig.lists(began) == {}


def test_version_that_is_gone_costs_one_list_of_each_kind(rig: Rig) -> None:
    began = time.monotonic()
    rig.proxy.watches = "410 event"
    rig.proxy.cut()
    waiting.until(
        lambda: rig.lists(began).keys() >= {"cacheddatasets", "imagesets"},
        60, "lists", detail=rig.node.said,
    )  # fmt: skip
    rig.proxy.watches = ""
    over = time.monotonic()
    rig.until_current(rig.change(), over, "410")
    waiting.until(lambda: set(rig.lists(began)) == EVERYBODY, 60, "lists of all kinds")
    assert not rig.proxy.seen("list") and not rig.proxy.seen("page")  # all were streamed


def test_watch_that_is_refused_for_long_is_listed_seldom(rig: Rig) -> None:
    """By a server that streams no lists, and is not asked for that again."""
    began = time.monotonic()
    rig.proxy.watches, rig.proxy.streams = "410", 422
    rig.proxy.cut()
    waiting.until(
        lambda: all(rig.lists(began).get(kind, 0) >= 2 for kind in EVERYBODY),
        40 + 3 * LIST_SECONDS, "lists again and again", detail=lambda: rig.lists(began),
    )  # fmt: skip
    rig.proxy.watches, rig.proxy.streams = "", 0
    assert {each.kind for each in rig.proxy.seen("list", began)} >= EVERYBODY
    asked = rig.proxy.seen("stream", began)
    assert {each.status for each in asked} == {422}
    assert len(asked) <= len(EVERYBODY) + 1, asked  # each at most once, and the roll-up's
    rig.until_current(rig.change(), time.monotonic(), "410 for long")


def test_pause_that_the_server_asks_for_is_kept_by_all_requests(rig: Rig) -> None:
    began = time.monotonic()
    pause = 3
    rig.proxy.answer = (429, f"Retry-After: {pause}\r\n")
    rig.proxy.cut()
    priority = rig.change()
    time.sleep(5)  # the fault itself
    refused = [each for each in rig.proxy.seen(since=began) if each.status == 429]
    seconds = time.monotonic() - began
    rig.proxy.answer = None
    over = time.monotonic()
    rig.until_current(priority, over, "429")
    assert refused
    by_path: dict[tuple[str, str], int] = {}
    for each in refused:
        by_path[each.what, each.path] = by_path.get((each.what, each.path), 0) + 1
    assert max(by_path.values()) <= seconds / pause + 2, by_path
    # Another kind may still have to list after the case before; this one was current.
    assert "cacheddatasets" not in rig.lists(began)


def test_connections_that_lost_their_other_end_are_given_up(rig: Rig) -> None:
    began = time.monotonic()
    assert rig.proxy.half_open() >= 4
    rig.until_current(rig.change(), began, "half-open")
    assert rig.lists(began) == {}
    rig.proxy.cut()


def test_expired_token_is_read_anew(rig: Rig) -> None:
    began = time.monotonic()
    file = Path(rig.node.settings["kubernetes"]["token_file"])
    good = file.read_text()
    try:
        file.write_text(good[:-20] + "A" * 20)
        rig.proxy.cut()
        priority = rig.change()
        waiting.until(lambda: refusals(rig, 401, began) >= 5, 30, "refusals")
        assert rig.applied() == priority - 1
    finally:
        file.write_text(good)
    rig.until_current(priority, time.monotonic(), "expired token")
    assert rig.lists(began) == {}


def test_slow_watch_is_followed_and_not_given_up(rig: Rig) -> None:
    rig.proxy.rate = 1500
    rig.proxy.cut()
    began = time.monotonic()
    rig.until_current(rig.change(), began, "slow watch")
    rig.proxy.rate = 0
    assert rig.lists(began) == {}


def test_watch_that_ends_at_once_is_not_asked_for_without_pause(rig: Rig) -> None:
    began = time.monotonic()
    rig.proxy.watches = "end"
    rig.proxy.cut()
    waiting.until(lambda: len(rig.proxy.seen("watch", began)) >= 12, 60, "watches")
    rig.proxy.watches = ""
    asked = len(rig.proxy.seen("watch", began))
    seconds = time.monotonic() - began  # in which all of them were
    # Doubled pauses from a tenth of a second: of four watches.
    assert asked <= 4 * (6 + seconds / (watching.PAUSES[1] * 0.75 / FACTOR)), asked
    rig.until_current(rig.change(), time.monotonic(), "watches that end")
    assert rig.lists(began) == {}


def test_another_etcd_empties_no_node_and_an_older_one_is_followed(rig: Rig) -> None:
    plane = rig.plane
    copy = plane.copy_of_etcd()
    before = rig.applied()
    plane.advance(3000)
    rig.until_current(rig.change(), time.monotonic(), "before")
    known = int(rig.there()["metadata"]["resourceVersion"])

    plane.restart(None)
    began = time.monotonic()
    # An empty one knows neither the kinds nor the agent.
    waiting.until(lambda: refusals(rig, 401, began) >= 5, 60, "refusals", detail=rig.node.said)
    assert rig.node.dataset(NAME)["state"] == "complete"
    assert rig.applied() == before + 1

    began = time.monotonic()  # the agent may be current before the server says that it is ready
    plane.restart(copy)
    assert int(rig.there()["metadata"]["resourceVersion"]) < known
    rig.until_current(before, began, "an older etcd")
    rig.until_current(rig.change(), time.monotonic(), "after it")
    waiting.until(lambda: set(rig.lists(began)) == EVERYBODY, 60, "lists of all kinds")
