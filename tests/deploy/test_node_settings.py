"""A slip in the ConfigMap, then everything that starts an agent anew: the guard stays as it was.

The guard enforces by the settings, not by an operator's word. What is tried all the time is to
write to a volume that holds data. A good ConfigMap brings all back without a hand on the node.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.deploy.test_node_reboot import reboot
from tests.testbed import earlier, grave, installed, waiting
from tests.testbed.agent import ApiError

pytestmark = [pytest.mark.real, pytest.mark.timeout(420)]

SLIP, WRONG = "object_keys", "no/absolute/path"  # of the section cache; no schema can tell


@pytest.fixture
def enforcing_by_settings(node: installed.Node) -> Iterator[installed.Node]:
    guard = node.values["settings"]["volumes"]["guard"]
    guard["mode"] = "enforce"
    node.helm("upgrade", node.image.tag)
    yield node
    guard["mode"] = "dry-run"
    node.values["settings"]["cache"].pop(SLIP, None)
    node.values.pop("checkSettings", None)
    node.helm("upgrade", node.image.tag)


def in_force(node: installed.Node) -> float | None:
    """What the alert ``SettingsUnusable`` looks at; None while no agent answers."""
    with contextlib.suppress(OSError):
        lines = node.agent.get("/metrics").splitlines()
        (found,) = (each for each in lines if each.startswith("nodeagent_settings_in_force"))
        return float(found.split()[-1])
    return None


def guard_of(node: installed.Node) -> dict[str, Any] | None:
    """None while an agent that starts has not looked at the kernel."""
    try:
        found: dict[str, Any] = node.agent.get("/v1/volumes/guard")
    except ApiError as error:
        assert error.status == 503, error
        return None
    return found


def attached(node: installed.Node) -> bool:
    """What the kernel has, whether or not an agent runs."""
    guard = node.cell.guard()
    try:
        return guard.read().attached
    finally:
        guard.close()


def check(node: installed.Node, *, settings_in_force: bool, booted: bool = False) -> None:
    """``booted``: the agent may not have looked at the kernel yet."""
    wanted = 1.0 if settings_in_force else 0.0
    waiting.until(
        lambda: in_force(node) == wanted, 60, "the settings to be taken over or refused",
        pause=0.2, detail=node.detail,
    )  # fmt: skip

    def guards() -> bool:
        if (guard := guard_of(node)) is None:
            return False
        with grave.missing_denial():
            assert booted or (guard["attached"], guard["mode"]) == (True, "enforce"), guard
        return bool(guard["in_force"])  # proved anew when an agent has started

    waiting.until(guards, 60, "the guard to be proved", pause=0.2, detail=node.detail)


def test_a_slip_in_the_configmap_never_lowers_the_guard(
    enforcing_by_settings: installed.Node, volume: str
) -> None:
    node = enforcing_by_settings
    before = earlier.build(node.image)
    node.kube.import_image(before.archive)
    node.pod()
    waiting.until(
        lambda: (guard_of(node) or {}).get("mode") == "enforce", 60, "the mode to be taken"
    )
    check(node, settings_in_force=True)

    with installed.attempts(node.cell, volume) as first:
        node.values["settings"]["cache"][SLIP] = WRONG
        with pytest.raises(AssertionError, match="pre-upgrade hooks failed"):
            node.helm("upgrade", node.image.tag)
        said = node.kube.kubectl("logs", "-n", installed.SPACE, "job/nodeagent--check")
        assert SLIP in said
        check(node, settings_in_force=True)
        node.values["checkSettings"] = False
        node.helm("upgrade", node.image.tag)
        check(node, settings_in_force=False)
        node.delete()
        check(node, settings_in_force=False)
        node.kill()
        node.pod()
        check(node, settings_in_force=False)
        node.helm("upgrade", before.tag)
        node.pod(tag=before.tag)
        check(node, settings_in_force=False)
        node.helm("upgrade", node.image.tag)
        node.pod(tag=node.image.tag)
        check(node, settings_in_force=False)

    reboot(node)  # takes the guard out of the kernel; the pod's first container brings it back
    waiting.until(lambda: attached(node), 120, "the guard to be attached", detail=node.detail)
    with installed.attempts(node.cell, volume) as second:
        check(node, settings_in_force=False, booted=True)
        pod = node.pod()["metadata"]["name"]
        said = node.kube.kubectl("logs", "-n", installed.SPACE, pod, "-c", "boot")
        assert "enforce" in said, said  # before the agent began
        del node.values["settings"]["cache"][SLIP], node.values["checkSettings"]
        node.helm("upgrade", node.image.tag)
        check(node, settings_in_force=True)
        node.all_ready()
    for tried in (first, second):
        with grave.missing_denial():
            assert set(tried.outcomes) == {"Operation not permitted"}, tried.outcomes


def test_a_missing_directory_or_secret_keeps_no_guard_away(
    enforcing_by_settings: installed.Node,
) -> None:
    node = enforcing_by_settings
    datasets = node.values["settings"]["cache"]["datasets"]
    source = {"kind": "dir", "path": "/mnt/that-nobody-mounted"}
    datasets.append({**datasets[0], "name": "away", "source": source})
    node.values["secretName"] = "nobody-made-it"
    try:
        node.helm("upgrade", node.image.tag)
        check(node, settings_in_force=True)
        # One dataset lacks its source, and the guard is there all the same.
        node.kube.kubectl("delete", "pod", "-n", installed.SPACE, "-l", installed.PODS)
        check(node, settings_in_force=True)

        def said() -> bool:
            with contextlib.suppress(ApiError):  # the cache is starting
                return f"{source['path']}: it is empty" in str(node.agent.get("/v1/datasets/away"))
            return False

        waiting.until(said, 60, "the cache to say what is missing", detail=node.detail)
    finally:
        datasets.pop()
        del node.values["secretName"]
