"""Which devices are the node's own, which are guarded and which unproven, on recorded nodes."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import kit.errors
from kit import messages
from linux import stack
from linux.blockdev import Number
from volumes import settings
from volumes.guard import scope

NODES = sorted(Path(__file__).with_name("nodes").glob("*.yaml"))
_SHAPE = ("disk", "slaves", "links", "lower")


def load(file: Path) -> dict[str, Any]:
    """All words are text: '8:0' is no number of minutes."""
    found: dict[str, Any] = yaml.load(file.read_text(), Loader=yaml.BaseLoader)
    return found


NODE = {file.stem: load(file) for file in NODES}
LATER = [(name, step) for name, node in NODE.items() for step in node.get("after", {})]


class Tree:
    """A node's /sys, /proc and /dev/disk in a folder."""

    def __init__(self, folder: Path, node: Mapping[str, Any], step: Mapping[str, Any]) -> None:
        self.folder = folder
        gone = step.get("gone", ())
        self.devices: dict[str, dict[str, Any]] = {
            name: {**node["devices"].get(name, {}), **step.get("devices", {}).get(name, {})}
            for name in {**node["devices"], **step.get("devices", {})}
            if name not in gone
        }
        for place in ("sys/class/block", "sys/dev/block", "proc/1", "proc/self", *stack.LINKS):
            (folder / place.replace("by-", "dev/disk/by-")).mkdir(parents=True, exist_ok=True)
        for name in self.devices:
            self._device(name)
        for pool, members in node.get("btrfs", {}).items():
            for member in members:
                (folder / "sys/fs/btrfs" / pool / "devices" / member).mkdir(parents=True)
        drivers = "".join(f"{n:>3} {driver}\n" for n, driver in node["drivers"].items())
        (folder / "proc/devices").write_text(f"Block devices:\n{drivers}")
        swaps = "".join(f"{path} partition 9 0 -2\n" for path in node.get("swaps", ()))
        (folder / "proc/swaps").write_text(f"Filename Type Size Used Priority\n{swaps}")
        mounts = step.get("mounts", node["mounts"])
        table = "".join(_line(number, text) for number, text in enumerate(mounts, 1))
        (folder / "proc/1/mountinfo").write_text(table)
        self.opened = step.get("opened", node.get("opened", {}))
        self.nodes = step.get("nodes", node.get("nodes", {}))

    def _device(self, name: str) -> None:
        fields = self.devices[name]
        disk = fields.get("disk")
        home = self.folder / "sys/devices" / (f"{disk}/{name}" if disk else name)
        files = {key: text for key, text in fields.items() if key not in _SHAPE}
        for file, text in ({"size": "2048"} | files | ({"partition": "1"} if disk else {})).items():
            (home / file).parent.mkdir(parents=True, exist_ok=True)
            (home / file).write_text(f"{text}\n")
        for slave in fields.get("slaves", ()):
            (home / "slaves" / slave).mkdir(parents=True)
        (self.folder / "sys/class/block" / name).symlink_to(home)
        if "dev" in fields:  # a path of NVMe multipath has none
            (self.folder / "sys/dev/block" / fields["dev"]).symlink_to(home)
        for link in fields.get("links", ()):
            (self.folder / "dev/disk" / link).symlink_to(f"../../{name}")

    def read(self) -> stack.Stack:
        def disk_below(name: str) -> Number | None:
            lower = self.devices[name].get("lower")
            if lower is None:
                return None
            major, minor = self.devices[lower]["dev"].split(":")
            return int(major), int(minor)

        found = stack.read(str(self.folder), disk_below=disk_below)
        opened = {name: tuple(programs.split()) for name, programs in self.opened.items()}
        told = dataclasses.replace(found, opened=opened, nodes=self.nodes)
        return stack.decoded(messages.encode(told))


def _line(number: int, text: str) -> str:
    device, target, fstype, source, *rest = text.split(" ")
    root = rest[0].removeprefix("root=") if rest else "/"
    return f"{number} 0 {device} {root} {target} rw - {fstype} {source} rw\n"


def wanted(**fields: Any) -> settings.GuardSettings:
    return settings.GuardSettings.model_validate({"scope": "csi", **fields})


def said(found: Mapping[str, scope.Judgement], names: Mapping[str, str]) -> dict[str, str]:
    """As the files say it: of an unproven device not why, there is only one."""
    return {
        name: "unproven"
        if found[name].whose is scope.Whose.UNPROVEN
        else f"{found[name].whose} {found[name].why}"
        for name in names
    }


def first(name: str, folder: Path) -> dict[str, str]:
    """What the node wrote down at its first attach."""
    return scope.first(Tree(folder / "first", NODE[name], {}).read(), wanted())


@pytest.mark.parametrize("name", NODE)
def test_a_node_at_the_first_attach(name: str, tmp_path: Path) -> None:
    node, seen = NODE[name], Tree(tmp_path, NODE[name], {}).read()
    found = scope.decide(seen, wanted(), first(name, tmp_path))
    assert said(found, node["expect"]) == node["expect"]
    assert set(found) == {device.name for device in seen.devices}
    all_of_it = scope.decide(seen, wanted(scope="all"), first(name, tmp_path / "all"))
    assert said(all_of_it, node.get("all", {})) == node.get("all", {})


@pytest.mark.parametrize(("name", "step"), LATER)
def test_a_node_later(name: str, step: str, tmp_path: Path) -> None:
    change = NODE[name]["after"][step]
    seen = Tree(tmp_path, NODE[name], change).read()
    found = scope.decide(seen, wanted(own=change.get("own", ())), first(name, tmp_path))
    assert said(found, change["expect"]) == change["expect"]


def test_nothing_written_down_leaves_the_stack_of_the_root_and_swap(tmp_path: Path) -> None:
    """As after the file was lost: no volume becomes the node's own by that."""
    seen = Tree(tmp_path, NODE["bare-metal-lvm"], {}).read()
    found = scope.decide(seen, wanted(), {})
    own = {name for name, judged in found.items() if judged.whose is scope.Whose.OWN}
    assert own == {"dm-0", "dm-1", "sda", "sda1", "sda2", "sda3", "sr0"}


def test_a_decision_says_which_device_decided(tmp_path: Path) -> None:
    seen = Tree(tmp_path, NODE["multipath-san"], {}).read()
    found = scope.decide(seen, wanted(), {})
    path = "/var/lib/kubelet/plugins/kubernetes.io/csi/csi.san.example/0f/globalmount"
    assert str(found["dm-3"]) == f"guarded: used by kubelet ({path})"
    assert str(found["dm-1"]) == "own: root file system (dm-0)"


@pytest.mark.parametrize(("mapping", "uuid", "group"), [
    ("vg-lv", "LVM-1", "vg"), ("a--b-c--d", "LVM-1", "a-b"), ("mpatha", "mpath-3600", ""),
])  # fmt: skip
def test_the_group_of_a_logical_volume(mapping: str, uuid: str, group: str) -> None:
    device = stack.StackedDevice("dm-0", (253, 0), mapping=mapping, uuid=uuid)
    assert scope.group(device) == group


def test_the_reader_tells_this_machine(tmp_path: Path) -> None:
    found = stack.read(programs=True)
    assert {device.name for device in found.devices} <= set(os.listdir("/sys/class/block"))
    assert found.mounts
    assert found.opened is not None
    assert stack.decoded(stack.encoded("/", True)).devices == found.devices


def test_a_kernel_without_swap_has_none(tmp_path: Path) -> None:
    tree = Tree(tmp_path, NODE["iscsi"], {})
    (tmp_path / "proc/swaps").unlink()
    assert tree.read().swaps == ()


def test_more_devices_than_can_be_told_apart_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = Tree(tmp_path, NODE["iscsi"], {})
    monkeypatch.setattr(stack, "MOST_DEVICES", 2)
    with pytest.raises(kit.errors.HostError, match="there are 5, and at most 2"):
        tree.read()
