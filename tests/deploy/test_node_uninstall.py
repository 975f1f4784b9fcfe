"""The chart's Job takes everything of ours off the node; the last test, because the agent goes."""

import pytest

from tests.testbed import installed, kubernetes, waiting

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def ended(node: installed.Node, *, removing: bool) -> tuple[str, str]:
    """The log of the Job that lists, or of the one that removes, and how it ended."""

    def found() -> tuple[str, str] | None:
        for job in node.kube.get("jobs", "-n", installed.SPACE)["items"]:
            if job["status"].get("conditions") and ("-yes-" in job["metadata"]["name"]) is removing:
                break
        else:
            return None
        name = job["metadata"]["name"]
        said = node.kube.kubectl("logs", "-n", installed.SPACE, f"job/{name}")
        return said, next(c["type"] for c in job["status"]["conditions"] if c["status"] == "True")

    result: tuple[str, str] = waiting.until(
        found, 120, "the Job to end", pause=0.5,
        detail=lambda: node.kube.kubectl("describe", "pods", "-n", installed.SPACE),
    )  # fmt: skip
    return result


def test_job_lists_and_then_removes_all_that_is_ours(node: installed.Node) -> None:
    node.all_ready()
    row = node.pinned_image()
    assert node.leases()
    state = node.kube.root / installed.STATE
    assert (state / "settings.yaml").exists()
    node.values["pools"] = {"default": {"nodeSelector": {"nodeagent/taken-off": "yes"}}}
    node.values["uninstall"] = {"nodes": [kubernetes.NODE]}
    node.helm("upgrade", node.image.tag)
    waiting.until(
        lambda: not node.kube.pods(installed.SPACE, installed.PODS), 60, "the agent to go"
    )

    said, how = ended(node, removing=False)

    assert how in ("Complete", "SuccessCriteriaMet"), said
    for word in ("views/", "nodeagent-pin-", "guard program", "settings.yaml"):
        assert word in said, said
    assert node.leases()  # it only lists
    node.values["uninstall"]["confirm"] = True
    node.helm("upgrade", node.image.tag)
    said, how = ended(node, removing=True)
    assert how in ("Complete", "SuccessCriteriaMet"), said
    assert node.leases() == []
    # The memory of volumes stays; the directory itself is a mount point of the Job.
    left = [path for path in state.rglob("*") if path.is_file()]
    assert not [path for path in left if path.parent.name != "ledger"]
    assert f"{installed.STATE}/" not in node.kube.on_node("cat", "/proc/self/mountinfo").stdout
    assert node.cell.guard().detach() == 0  # no program was left
    kubelet = node.kube.root / "var/lib/kubelet"
    assert not [*kubelet.glob("plugins/nodeagent.io"), *kubelet.glob("plugins_registry/nodeagent*")]
    assert installed.PINNED in node.kube.images()
    images = node.kube.on_node("ctr", "-n", "k8s.io", "images", "ls").stdout.splitlines()
    records = [line for line in images if row["digest"] in line]
    assert records and not [line for line in records if "pinned" in line]
